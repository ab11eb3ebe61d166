"""Numba's device arrays. Numba has no current stream, only a default for launches without one."""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda.cudadrv.devicearray import DeviceNDArray

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.events import numba_stream
from dask_devctx.transfer.libraries import known
from dask_devctx.transfer.move import current_move
from dask_devctx.transfer.peers import copy_bytes


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


def dense(array: Any) -> Any:
    """Return an array without gaps: itself, or a copy that a kernel makes on its device."""
    if array.flags["C_CONTIGUOUS"] or array.flags["F_CONTIGUOUS"]:
        return array
    source = _device_of(array)
    with source, cuda.gpus[source.device_id]:
        copy = cuda.device_array(array.shape, array.dtype)
        copy[(slice(None),) * array.ndim] = array  # Numba takes no ellipsis here
    return copy


def _to_device(array: Any, device: Device) -> Any:
    source = _device_of(array)
    if min(array.strides, default=0) < 0:
        move = current_move()
        move.order(source, on_source=True)
        array = dense(array)
        move.order_copy_after(source)
        move.keep(array)
    # Numba keeps its own record of the device that a thread uses: set that, too. A strided array
    # keeps its strides, so its gaps travel, too.
    with cuda.gpus[device.device_id]:
        moved = cuda.device_array(array.shape, array.dtype, strides=array.strides)
    nbytes = _extent(array)
    copy_bytes(_address(moved), device, _address(array), source, nbytes, numba_stream())
    return moved


def _to_host(array: Any) -> Any:
    with cuda.gpus[_device_of(array).device_id]:
        return array.copy_to_host()


def register() -> None:
    known(DeviceNDArray, nbytes=_bytes, move=_to_device, host=_to_host)
