"""The types with memory on a device, and the functions that pickle them without this memory."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, Final

from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.protocol.serialize import ObjectDictSerializer

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.ipc.frames import Part, allocators, is_on_device, part_of
from dask_devctx.transfer.ipc.parcel import Parts, Reduce

_FEW: Final = 8

_known: dict[type, Reduce | None] = {}


def find(kind: type) -> Reduce | None:
    """Return the function that pickles a type without its memory on a device, or None.

    Notes
    -----
    There are functions for torch's and JAX's types, and for every type that is registered in
    distributed's ``cuda_serialize`` and ``cuda_deserialize``.
    """
    try:
        return _known[kind]
    except KeyError:
        found = _known[kind] = _look_up(kind)
        return found


def are_few(value: object, at_most: int) -> bool:
    """Return whether a value is an array or a few arrays and numbers: it is packed in microseconds.

    Each task of a reduction makes a few, in a dictionary.

    Parameters
    ----------
    value
        The value.
    at_most
        The most bytes of each array in host memory.
    """
    if type(value) is dict:
        parts: Collection[object] = value.values()
    else:
        parts = value if type(value) in (list, tuple) else (value,)  # type: ignore[assignment]
    return len(parts) <= _FEW and all(_is_small(part, at_most) for part in parts)


def _is_small(part: Any, at_most: int) -> bool:
    kind = type(part)
    if kind.__module__ == "numpy":  # an array or a number; it may be not installed
        return hasattr(part, "dtype") and not part.dtype.hasobject and part.nbytes <= at_most
    return kind in (int, float, type(None)) or find(kind) is not None


def _look_up(kind: type) -> Reduce | None:
    libraries = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if "torch" in libraries:
        from dask_devctx.transfer.ipc import torch

        return torch.find(kind)
    if libraries & {"jax", "jaxlib"}:
        from dask_devctx.transfer.ipc import jax

        return jax.find(kind)
    if kind.__name__ == "SimulatedArray" and libraries & {"dask_devctx"}:
        return _simulated
    try:
        serialize = cuda_serialize.dispatch(kind)
        cuda_deserialize.dispatch(kind)
    except TypeError:
        return None
    # This would send each attribute separately, and memory that two attributes share would arrive
    # twice. pickle keeps it shared.
    if isinstance(getattr(serialize, "__self__", None), ObjectDictSerializer):
        return None
    return functools.partial(_by_frames, serialize)


def _by_frames(serialize: Any, value: Any, parts: Parts) -> Any:
    header, frames = serialize(value)
    places = []
    for frame in frames:
        if is_on_device(frame):
            part = part_of(frame)
            parts.gathered |= part.pointer != _address(value)
            places.append(parts.add(part))
        else:
            places.append(frame)
    return _from_frames, (type(value), header, places)


def _from_frames(kind: type, header: Any, frames: list[Any]) -> Any:
    return cuda_deserialize.dispatch(kind)(header, frames)


def _address(value: Any) -> int | None:
    said = getattr(value, "__cuda_array_interface__", None)
    return None if said is None else int(said["data"][0] or 0)


def _simulated(array: Any, parts: Parts) -> Any:
    if array.dtype.hasobject or array.dtype.names or not array.size:
        return NotImplemented
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = array.copy_to(array.device)
    order = "C" if array.flags.c_contiguous else "F"
    part = Part(array._pointer, array.nbytes, "simulated", None, array)
    return _as_simulated, (parts.add(part), array.shape, array.dtype, order)


def _as_simulated(memory: Any, shape: tuple[int, ...], dtype: Any, order: str) -> Any:
    values = memory.view(dtype)
    return values.reshape(shape) if order == "C" else values.reshape(shape[::-1]).T


def _allocate_simulated(nbytes: int, detail: Any, device: Device) -> tuple[Any, int]:
    from dask_devctx.simulated_array import SimulatedArray

    memory = SimulatedArray._empty((nbytes,), "u1")
    return memory, memory._pointer


allocators["simulated"] = _allocate_simulated
