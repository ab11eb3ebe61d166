"""Numba's device arrays. Numba has no current stream, only a default for launches without one."""

from __future__ import annotations

from typing import Any

import numpy
from numba import cuda
from numba.cuda.cudadrv.devicearray import DeviceNDArray

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.events import numba_stream
from dask_devctx.transfer.libraries import Library, known
from dask_devctx.transfer.move import current_move
from dask_devctx.transfer.traffic import copy_bytes


def _device_of(array: Any) -> Device:
    return Device(array.gpu_data.context.device.id)


def _bytes(array: Any) -> dict[Device, int]:
    return {_device_of(array): int(array.size * array.dtype.itemsize)}


def _address(array: Any) -> int:
    return int(array.__cuda_array_interface__["data"][0] or 0)


def _empty(shape: tuple[int, ...], dtype: Any, device: Device, order: str = "C") -> Any:
    with cuda.gpus[device.device_id]:  # Numba keeps its own record of the device of a thread
        return cuda.device_array(shape, numpy.uint8 if dtype is None else dtype, order=order)


def _dense(array: Any) -> Any:
    if array.flags["C_CONTIGUOUS"]:
        return array
    made = _empty(array.shape, array.dtype, _device_of(array))
    with cuda.gpus[_device_of(array).device_id]:
        made[(slice(None),) * array.ndim] = array
    return made


def _to_device(array: Any, device: Device) -> Any:
    source, flags = _device_of(array), array.flags
    if not (flags["C_CONTIGUOUS"] or flags["F_CONTIGUOUS"]):
        array = current_move().made_there(source, lambda: _dense(array))
    order = "C" if array.flags["C_CONTIGUOUS"] else "F"
    moved, (nbytes,) = _empty(array.shape, array.dtype, device, order), _bytes(array).values()
    copy_bytes(_address(moved), device, _address(array), source, nbytes, numba_stream())
    return moved


def _to_host(array: Any) -> Any:
    with cuda.gpus[_device_of(array).device_id]:
        return array.copy_to_host()


LIBRARY = Library(DeviceNDArray, _address, _empty, _dense)
known(DeviceNDArray, nbytes=_bytes, move=_to_device, host=_to_host)
