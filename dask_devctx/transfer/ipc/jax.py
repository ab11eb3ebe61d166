"""JAX's arrays on one device: each arrives in a new array, filled before JAX uses it."""

from __future__ import annotations

import operator
from typing import Any

import jax

from dask_devctx.transfer.ipc.frames import Part
from dask_devctx.transfer.ipc.parcel import Parts, Reduce


def find(kind: type) -> Reduce | None:
    """Return the function that pickles a type of JAX without its device memory, or None."""
    return _array if issubclass(kind, jax.Array) else None


def _array(array: Any, parts: Parts) -> Any:
    if isinstance(array, jax.core.Tracer) or len(array.sharding.device_set) > 1:
        return NotImplemented
    (device,) = array.sharding.device_set
    if device.platform not in ("gpu", "cuda") or not array.size:
        return NotImplemented
    array.block_until_ready()  # JAX does not reveal the stream in which it works
    detail = [list(array.shape), array.dtype.name]
    part = Part(array.unsafe_buffer_pointer(), int(array.nbytes), "jax", detail, array)
    return operator.itemgetter(0), ((parts.add(part),),)
