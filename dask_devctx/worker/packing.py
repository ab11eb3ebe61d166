"""The types with memory on a device, and the functions that pickle them without this memory.

There are two kinds of functions. :func:`find` is for values that are sent: each array arrives in
memory of its own. :func:`find_views` is for values that are spilled: an array of CuPy, and a
simulated one, is a view of its whole allocation. So arrays that share an allocation still share it
when they come back.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from typing import Any, Final

from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.protocol.serialize import ObjectDictSerializer

from dask_devctx.cuda.device import Device
from dask_devctx.transfer import device_of, nbytes_by_device, walk
from dask_devctx.transfer.copy_streams import FEW
from dask_devctx.transfer.libraries import MODULES, named
from dask_devctx.transfer.location import memory_of
from dask_devctx.transfer.parcel import Parcel, Part, Reduce, part_of
from dask_devctx.transfer.traffic import is_dense

_NUMBERS: Final = (int, float, complex, bool, type(None))


def _find(kind: type) -> Reduce | None:
    """Return the function that pickles a type without its memory on a device, or None."""
    if (library := _viewed(kind)) is not None:  # distributed's function would import Numba first
        return functools.partial(_dense, library)
    libraries = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if own := libraries & {"torch", "jax", "jaxlib"}:
        return import_module(MODULES[own.pop()]).pickled_by(kind)  # type: ignore[no-any-return]
    try:
        serialize = cuda_serialize.dispatch(kind)
        cuda_deserialize.dispatch(kind)
    except TypeError:
        return None
    # This would send each attribute separately, and memory that two attributes share would arrive
    # twice. pickle keeps it shared.
    if isinstance(getattr(serialize, "__self__", None), ObjectDictSerializer):
        return None
    if kind.__name__ == "DeviceNDArray":  # Numba's: distributed's function fails if it has gaps
        return functools.partial(_of_numba, serialize)
    return functools.partial(_by_frames, serialize)


find: Final[Callable[[type], Reduce | None]] = functools.cache(_find)


def _find_views(kind: type) -> Reduce | None:
    """Return the function that pickles a type as views of its allocations, or None."""
    if (library := _viewed(kind)) is not None:
        return functools.partial(_view, library)
    found = find(kind)
    if found is not None and {"Tensor"} & {base.__name__ for base in kind.__mro__}:
        return functools.partial(_without_history, found)
    return found


find_views: Final[Callable[[type], Reduce | None]] = functools.cache(_find_views)


def is_array(value: object) -> bool:
    """Return whether a value is one array that is pickled as a view of its allocation."""
    return _viewed(type(value)) is not None


def is_by_frames(kind: type) -> bool:
    """Return whether distributed itself has functions for a type that leave it on its device."""
    return _viewed(kind) == "cupy" or getattr(find(kind), "func", None) is _by_frames


def are_few(values: Iterable[object], at_most: int) -> bool:
    """Return whether values are a few arrays and numbers: they are packed in microseconds.

    Each may be a container of some. Their arrays in host memory have ``at_most`` so many bytes.
    """
    left, nbytes = FEW, 0
    for value in values:
        parts = _parts(value)
        left -= len(parts)
        if left < 0:
            return False
        for part in parts:
            size = _host_nbytes(part)
            if size is None:
                return False
            nbytes += size
    return nbytes <= at_most


def _parts(value: object) -> Collection[object]:
    if type(value) is dict:
        plain = all(type(key) in (str, int) for key in value)
        return value.values() if plain else (value,)
    return value if type(value) in (list, tuple) else (value,)  # type: ignore[return-value]


def _host_nbytes(part: Any) -> int | None:
    """Return the bytes to pickle of an array or a number; None for anything else."""
    kind = type(part)
    if kind in _NUMBERS:
        return 0
    if walk.find(kind) is walk.LEAF and find(kind) is not None:
        is_ready = getattr(part, "is_ready", None)  # JAX's arrays are waited for
        return 0 if nbytes_by_device(part) and (is_ready is None or is_ready()) else None
    numpy = sys.modules.get("numpy")
    if numpy is not None and (kind is numpy.ndarray or isinstance(part, numpy.generic)):
        return None if part.dtype.hasobject else int(part.nbytes)
    return None


def _viewed(kind: type) -> str | None:
    """Return the library of arrays that another array can be a view of, or None."""
    library = kind.__module__.partition(".")[0]
    known = ("cupy", "ndarray"), ("dask_devctx", "SimulatedArray")
    return library if (library, kind.__name__) in known else None


def _by_frames(serialize: Any, value: Any, parcel: Parcel) -> Any:
    header, frames = serialize(value)
    places = []
    for frame in frames:
        if hasattr(frame, "__cuda_array_interface__"):  # it is on a device
            part = part_of(frame)
            parcel.gathered |= part.pointer != _address(value)
            places.append(parcel.add(part))
        else:
            places.append(frame)
    return _from_frames, (type(value), header, places)


def _of_numba(serialize: Any, array: Any, parcel: Parcel) -> Any:
    from dask_devctx.transfer.libraries import numba

    found = numba.with_gaps(array)
    if found is None:
        return _by_frames(serialize, array, parcel)
    address, nbytes, layout = found
    return numba.view, (parcel.add(Part(address, nbytes, "numba", None, array)), *layout)


def _from_frames(kind: type, header: Any, frames: list[Any]) -> Any:
    return cuda_deserialize.dispatch(kind)(header, frames)


def _address(value: Any) -> int | None:
    said = getattr(value, "__cuda_array_interface__", None)
    return None if said is None else int(said["data"][0] or 0)


def _dense(library: str, array: Any, parcel: Parcel) -> Any:
    if array.dtype.hasobject:
        return NotImplemented
    if not is_dense(array.strides, array.shape, array.itemsize):
        home: Any = device_of(array)
        with home:
            array, parcel.gathered = array.copy(), True
        if home is not Device.current():  # the current device's streams know nothing of it
            home.sync()
    at = parcel.add(Part(named(library).pointer(array), array.nbytes, library, None, array))
    return _as_view, (at, 0, array.shape, array.dtype, array.strides)


def _view(library: str, array: Any, parcel: Parcel) -> Any:
    memory = memory_of.find(type(array))(array)
    if memory is None or not memory.base or array.dtype.hasobject:
        return NotImplemented
    at = parcel.add(Part(memory.base, memory.nbytes, library, None, array))
    offset = named(library).pointer(array) - memory.base if array.size else 0
    return _as_view, (at, offset, array.shape, array.dtype, array.strides)


def _as_view(memory: Any, offset: int, shape: Any, dtype: Any, strides: Any) -> Any:
    if type(memory).__module__.partition(".")[0] != "cupy":
        return memory._view(offset, shape, dtype, strides)
    import cupy

    return cupy.ndarray(shape, dtype, memory.data + offset, strides)


def _without_history(found: Reduce, tensor: Any, parcel: Parcel) -> Any:
    if tensor.grad_fn is not None:
        raise TypeError("a tensor with a history (grad_fn) would lose it on the host")
    return found(tensor, parcel)
