"""CuPy's arrays, whose bytes the destination's current stream copies."""

from __future__ import annotations

from typing import Any

import cupy

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.events import Stamp, cupy_stream
from dask_devctx.transfer.libraries import Library, known
from dask_devctx.transfer.location import Memory
from dask_devctx.transfer.traffic import copy_bytes, is_dense, thread


def _bytes(array: Any) -> dict[Device, int]:
    return {Device(array.data.device_id): array.nbytes}


def _to_device(array: Any, device: Device) -> Any:
    if not array.size:
        return cupy.empty(array.shape, array.dtype)
    source = Device(array.data.device_id)
    if not is_dense(array.strides, array.shape, array.itemsize):
        # Made dense on its own device, so that only its own elements travel. CuPy does that on the
        # source's current stream, which has to wait for the array, like the copy.
        thread.move.order(source, on_source=True)
        with source:
            array = cupy.array(array, order="K", copy=True)
        Stamp.of_devices([source], blocking=False).hold_back(device)
        thread.move.keep(array)
    memory = cupy.cuda.alloc(array.nbytes)
    stream = cupy_stream(device.device_id)
    copy_bytes(memory.ptr, device, array.data.ptr, source, array.nbytes, stream)
    return cupy.ndarray(array.shape, array.dtype, memory, array.strides)


def _to_host(array: Any) -> Any:
    return array.get(order="A")  # keeps Fortran's order


def _memory_of(array: Any) -> Memory | None:
    if not array.nbytes:
        return None
    memory = array.data.mem
    return Memory(Device(array.data.device_id), int(memory.ptr), int(memory.size))


LIBRARY = Library(
    cupy.ndarray,
    lambda array: int(array.data.ptr),
    lambda shape, dtype, device: cupy.empty(shape, cupy.uint8 if dtype is None else dtype),
    cupy.ascontiguousarray,
)
known(cupy.ndarray, nbytes=_bytes, move=_to_device, host=_to_host, memory=_memory_of)
