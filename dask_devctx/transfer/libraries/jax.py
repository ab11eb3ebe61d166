"""JAX's arrays. JAX itself orders its copies and keeps their sources alive."""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.libraries import Library, known
from dask_devctx.transfer.parcel import Parcel, Part, Reduce


def _bytes(array: Any) -> dict[Device, int]:
    if isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        return {}
    total: dict[Device, int] = {}
    for shard in array.addressable_shards:
        if shard.device.platform in ("gpu", "cuda"):
            device = Device(shard.device)
            total[device] = total.get(device, 0) + int(shard.data.nbytes)
    return total


def _to_device(array: Any, device: Device) -> Any:
    # An array is spread over devices on purpose: all of them compute on it.
    if len(array.sharding.device_set) > 1:
        return array
    return jax.device_put(array, _jax_device(device))


def _jax_device(device: Device) -> Any:
    for candidate in jax.local_devices(backend="gpu"):
        if candidate.local_hardware_id == device.device_id:
            return candidate
    raise LookupError(
        f"JAX has no device for {device}; it has {jax.local_devices()}. "
        "CUDA_VISIBLE_DEVICES and jax_cuda_visible_devices must show the same devices"
    )


def _empty(shape: tuple[int, ...], dtype: Any, device: Device) -> Any:
    with jax.default_device(_jax_device(device)):
        kind = numpy.uint8 if dtype is None else numpy.dtype(dtype)
        return jax.numpy.empty(shape, kind).block_until_ready()


def pickled_by(kind: type) -> Reduce | None:
    """Return the function that pickles a type of JAX without its device memory, or None."""
    return _pickled if issubclass(kind, jax.Array) else None


def _pickled(array: Any, parcel: Parcel) -> Any:
    if isinstance(array, jax.core.Tracer) or len(array.sharding.device_set) > 1:
        return NotImplemented
    (device,) = array.sharding.device_set
    if device.platform not in ("gpu", "cuda") or not array.size:
        return NotImplemented
    array.block_until_ready()  # JAX does not reveal the stream in which it works
    detail = array.shape, array.dtype.name
    part = Part(array.unsafe_buffer_pointer(), int(array.nbytes), "jax", detail, array)
    return operator.itemgetter(0), ((parcel.add(part),),)


LIBRARY = Library(jax.Array, lambda array: int(array.unsafe_buffer_pointer()), _empty)
known(jax.Array, nbytes=_bytes, move=_to_device, host=jax.device_get)
