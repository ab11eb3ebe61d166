"""CuPy's arrays. The destination's current stream copies the bytes unchanged."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import cupy

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.blocks import Memory, memory_of
from dask_devctx.transfer.host import to_host
from dask_devctx.transfer.location import device_of, nbytes_by_device
from dask_devctx.transfer.move import current_move, to_device
from dask_devctx.transfer.peers import copy_bytes
from dask_devctx.transfer.streams import cupy_stream


def _device_of(array: Any) -> Device:
    return Device(array.data.device_id)


def _bytes(array: Any) -> dict[Device, int]:
    return {Device(array.data.device_id): array.nbytes}


def _bytes_of_many(arrays: list[Any]) -> dict[Device, int]:
    by_ordinal: defaultdict[int, int] = defaultdict(int)
    for array in arrays:
        by_ordinal[array.data.device_id] += array.nbytes
    return {Device(ordinal): nbytes for ordinal, nbytes in by_ordinal.items()}


def _to_device(array: Any, device: Device) -> Any:
    if not array.size:
        return cupy.empty(array.shape, array.dtype)
    source = _device_of(array)
    if not _is_dense(array):
        # Made dense on its own device, so that only its own elements travel. CuPy does that on the
        # source's current stream, which has to wait for the array, like the copy.
        move = current_move()
        move.order(source, on_source=True)
        with source:
            array = cupy.array(array, order="K", copy=True)
        move.order_copy_after(source)
        move.keep(array)
    memory = cupy.cuda.alloc(array.nbytes)
    moved = cupy.ndarray(array.shape, array.dtype, memory, array.strides)
    stream = cupy_stream(device.device_id)
    copy_bytes(memory.ptr, device, array.data.ptr, source, array.nbytes, stream)
    return moved


def _to_host(array: Any) -> Any:
    return array.get(order="A")  # keeps Fortran's order


def _is_dense(array: Any) -> bool:
    """Return whether its elements fill a stretch of memory in some order of the axes, forwards."""
    expected = array.itemsize
    for stride, length in sorted(zip(array.strides, array.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True


def _memory_of(array: Any) -> Memory | None:
    if not array.nbytes:
        return None
    memory = array.data.mem
    return Memory(Device(array.data.device_id), int(memory.ptr), int(memory.size))


def register() -> None:
    """Make CuPy's arrays known."""
    device_of.register(cupy.ndarray, _device_of)
    nbytes_by_device.register(cupy.ndarray, _bytes)
    nbytes_by_device.register_many(cupy.ndarray, _bytes_of_many)
    to_device.register(cupy.ndarray, _to_device)
    to_host.register(cupy.ndarray, _to_host)
    memory_of.register(cupy.ndarray, _memory_of)
