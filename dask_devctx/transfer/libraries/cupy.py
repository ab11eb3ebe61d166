"""CuPy's arrays, whose bytes the destination's current stream copies, and its sparse matrices."""

from __future__ import annotations

from typing import Any

import cupy

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.events import Stamp, cupy_stream
from dask_devctx.transfer.libraries import known
from dask_devctx.transfer.location import Memory, nbytes_by_device
from dask_devctx.transfer.move import current_move, to_device
from dask_devctx.transfer.traffic import copy_bytes, is_dense


def _bytes(array: Any) -> dict[Device, int]:
    return {Device(array.data.device_id): array.nbytes}


def _to_device(array: Any, device: Device) -> Any:
    if not array.size:
        return cupy.empty(array.shape, array.dtype)
    source = Device(array.data.device_id)
    if not is_dense(array.strides, array.shape, array.itemsize):
        # Made dense on its own device, so that only its own elements travel. CuPy does that on the
        # source's current stream, which has to wait for the array, like the copy.
        move = current_move()
        move.order(source, on_source=True)
        with source:
            array = cupy.array(array, order="K", copy=True)
        Stamp.of_streams([source]).hold_back(device)
        move.keep(array)
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


def register() -> None:
    known(cupy.ndarray, nbytes=_bytes, move=_to_device, host=_to_host, memory=_memory_of)


# -- sparse matrices: the arrays inside move, and a new matrix is made around them


def _arrays(matrix: Any) -> tuple[Any, ...]:
    if matrix.format == "coo":
        return matrix.data, matrix.row, matrix.col
    if matrix.format == "dia":
        return matrix.data, matrix.offsets
    return matrix.data, matrix.indices, matrix.indptr  # CSR and CSC


def _matrix_bytes(matrix: Any) -> dict[Device, int]:
    return nbytes_by_device(_arrays(matrix))


def _matrix_to_device(matrix: Any, device: Device) -> Any:
    arrays = to_device(_arrays(matrix), device)
    if matrix.format == "coo":
        arrays = arrays[0], arrays[1:]
    moved = type(matrix)(arrays, shape=matrix.shape)
    # The matrix has cached these facts. To find them again, the CPU would wait for the device.
    for name in ("has_canonical_format", "_has_canonical_format", "_has_sorted_indices"):
        if name in vars(matrix):
            setattr(moved, name, getattr(matrix, name))
    return moved


def register_sparse() -> None:
    from cupyx.scipy import sparse

    for form in ("csr", "csc", "coo", "dia"):
        for name in (f"{form}_matrix", f"{form}_array"):  # the arrays are new in CuPy 14
            if kind := getattr(sparse, name, None):
                known(kind, nbytes=_matrix_bytes, move=_matrix_to_device, host=kind.get)
