"""Host arrays that know of which library's arrays on devices they are copies."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Self

import numpy as np

from dask_devctx.cuda.device import Device
from dask_devctx.transfer import device_of, to_device


class Marked(np.ndarray[Any, Any]):
    """A copy of an array on a device, in host memory; its pieces are of this type, too."""

    on_device: ClassVar[Any]  # returns a host array as one of the library's, on the current device
    __array_priority__ = 1.0  # arrays joined of this type and NumPy's own are of this type

    def __array_function__(self, *args: Any, **kwargs: Any) -> Any:
        # dask joins arrays of a type that has this by NumPy's function, which keeps the type.
        return super().__array_function__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # NumPy pickles only arrays of its own type without a copy of the bytes.
        return type(self)._of, (self.view(np.ndarray),)

    @classmethod
    def _of(cls, array: Any) -> Self:
        return array.view(cls)  # type: ignore[no-any-return]


def _cupy(array: Any) -> Any:
    import cupy

    return cupy.asarray(array)


def _simulated(array: Any) -> Any:
    from dask_devctx.simulated_array import SimulatedArray

    return SimulatedArray.asarray(array)


class FromCuPy(Marked):
    """A copy of one of CuPy's arrays."""

    on_device = staticmethod(_cupy)


class FromSimulated(Marked):
    """A copy of a simulated array."""

    on_device = staticmethod(_simulated)


_MARKS: Final[dict[tuple[str, str], type[Marked]]] = {
    ("cupy", "ndarray"): FromCuPy,
    ("dask_devctx", "SimulatedArray"): FromSimulated,
}


def to_host(array: Any) -> Any:
    """Return an array on a device as a host array that knows its library; others as they are."""
    kind = type(array)
    mark = _MARKS.get((kind.__module__.partition(".")[0], kind.__name__))
    if mark is not None:
        return to_device(array, "cpu").view(mark)
    device = device_of(array)
    if device is None:
        return array
    raise TypeError(
        f"dask's P2P rechunk sends the bytes of arrays, and cannot take a {kind.__qualname__} on "
        f"{device}. Rechunk by tasks: x.rechunk(..., method='tasks'), or "
        "dask.config.set({'array.rechunk.method': 'tasks'})"
    )


def to_current_device(array: Any) -> Any:
    """Return a host array as one of its library on the current device, if it knows the library.

    Without a current device, it is an array of NumPy.
    """
    if not isinstance(array, Marked):
        return array
    host = array.view(np.ndarray)
    return host if Device.current() is None else type(array).on_device(host)
