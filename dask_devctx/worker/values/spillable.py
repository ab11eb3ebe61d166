"""The types that can be spilled: each is pickled without its memory on a device.

The functions are those that serve transfers between processes, with one difference. An array of
CuPy, and a simulated one, is pickled as a view of its whole allocation. So arrays that share an
allocation still share it when they come back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from dask_devctx.transfer.ipc.frames import Part
from dask_devctx.transfer.ipc.parcel import Parts, Reduce
from dask_devctx.transfer.location import memory_of
from dask_devctx.worker.comms import device_types

_known: dict[type, Reduce | None] = {}


def find(kind: type) -> Reduce | None:
    """Return the function that pickles a type without its memory on a device, or None."""
    try:
        return _known[kind]
    except KeyError:
        found = _known[kind] = _look_up(kind)
        return found


def are_arrays(values: Iterable[Any]) -> bool:
    """Return whether each value is one array, which is pickled as a view of its allocation."""
    return all(find(type(value)) in (_cupy, _simulated) for value in values)


def _look_up(kind: type) -> Reduce | None:
    library = kind.__module__.partition(".")[0]
    if library == "cupy" and kind.__name__ == "ndarray":
        return _cupy
    if library == "dask_devctx" and kind.__name__ == "SimulatedArray":
        return _simulated
    found = device_types.find(kind)
    if found is not None and any(_is_tensor(base) for base in kind.__mro__):
        return _without_history(found)
    return found


def _is_tensor(base: type) -> bool:
    return base.__name__ == "Tensor" and base.__module__.partition(".")[0] == "torch"


def _cupy(array: Any, parts: Parts) -> Any:
    memory = memory_of.find(type(array))(array)
    if memory is None or not memory.base:
        return NotImplemented
    part = Part(memory.base, memory.nbytes, "cupy", None, array)
    offset = array.data.ptr - memory.base
    return _as_cupy, (parts.add(part), offset, array.shape, array.dtype, array.strides)


def _as_cupy(memory: Any, offset: int, shape: Any, dtype: Any, strides: Any) -> Any:
    import cupy

    if not isinstance(memory, cupy.ndarray):  # its bytes on the host
        return memory._view(offset, shape, dtype, strides)
    return cupy.ndarray(shape, dtype, memory.data + offset, strides)


def _simulated(array: Any, parts: Parts) -> Any:
    memory = memory_of.find(type(array))(array)
    if memory is None or array.dtype.hasobject:
        return NotImplemented
    part = Part(memory.base, memory.nbytes, "simulated", None, array)
    offset = array._pointer - memory.base if array.size else 0
    return _as_simulated, (parts.add(part), offset, array.shape, array.dtype, array.strides)


def _as_simulated(memory: Any, offset: int, shape: Any, dtype: Any, strides: Any) -> Any:
    return memory._view(offset, shape, dtype, strides)


def _without_history(found: Reduce) -> Reduce:
    def reduce(tensor: Any, parts: Parts) -> Any:
        if tensor.grad_fn is not None:
            raise TypeError("a tensor with a history (grad_fn) would lose it on the host")
        return found(tensor, parts)

    return reduce


# By the kind of an allocation, the function that makes a view from offset, shape, type and strides.
as_view: Final = {"cupy": _as_cupy, "simulated": _as_simulated}
