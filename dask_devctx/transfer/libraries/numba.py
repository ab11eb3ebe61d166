"""Numba's device arrays. Numba has no current stream, only a default for launches without one."""

from __future__ import annotations

from typing import Any

import numpy
from numba import cuda
from numba.cuda.cudadrv.devicearray import DeviceNDArray

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.events import numba_stream
from dask_devctx.transfer.libraries import Library, known
from dask_devctx.transfer.traffic import copy_bytes


def _device_of(array: Any) -> Device:
    return Device(array.gpu_data.context.device.id)


def _bytes(array: Any) -> dict[Device, int]:
    return {_device_of(array): int(array.size * array.dtype.itemsize)}


def _address(array: Any) -> int:
    return int(array.__cuda_array_interface__["data"][0] or 0)


def _extent(array: Any) -> int:
    """Return the bytes from an array's first element to the end of its last."""
    if not array.size:
        return 0
    steps = zip(array.shape, array.strides, strict=True)
    return int(sum((n - 1) * stride for n, stride in steps) + array.dtype.itemsize)


def with_gaps(array: Any) -> tuple[int, int, Any] | None:
    """Return the address, the bytes and how to view them of an array with gaps, if it has some."""
    if array.flags["C_CONTIGUOUS"] or array.flags["F_CONTIGUOUS"] or min(array.strides) < 0:
        return None
    return _address(array), _extent(array), (array.shape, array.strides, array.dtype)


def view(memory: Any, shape: Any, strides: Any, dtype: Any) -> Any:
    return DeviceNDArray(shape, strides, dtype, gpu_data=memory.gpu_data)


def _empty(shape: tuple[int, ...], dtype: Any, device: Device, strides: Any = None) -> Any:
    with cuda.gpus[device.device_id]:  # Numba keeps its own record of the device of a thread
        return cuda.device_array(shape, numpy.uint8 if dtype is None else dtype, strides=strides)


def _dense(array: Any) -> Any:
    if array.flags["C_CONTIGUOUS"]:
        return array
    made = _empty(array.shape, array.dtype, _device_of(array))
    with cuda.gpus[_device_of(array).device_id]:
        made[(slice(None),) * array.ndim] = array
    return made


def _to_device(array: Any, device: Device) -> Any:
    source = _device_of(array)
    if min(array.strides, default=0) < 0:
        raise TypeError("a reversed view of a Numba array does not move: copy it in its task first")
    # A strided array keeps its strides, so its gaps travel, too: another copy takes a kernel.
    moved, nbytes = _empty(array.shape, array.dtype, device, array.strides), _extent(array)
    stream = numba_stream(device.device_id)
    copy_bytes(_address(moved), device, _address(array), source, nbytes, stream)
    return moved


def _to_host(array: Any) -> Any:
    with cuda.gpus[_device_of(array).device_id]:
        return array.copy_to_host()


LIBRARY = Library(DeviceNDArray, _address, _empty, _dense)
known(DeviceNDArray, nbytes=_bytes, move=_to_device, host=_to_host)
