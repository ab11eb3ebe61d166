"""CuPy's sparse matrices: the arrays inside move, and a new matrix is made around them."""

from __future__ import annotations

from typing import Any

from cupyx.scipy import sparse

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.libraries import known
from dask_devctx.transfer.location import nbytes_by_device
from dask_devctx.transfer.move import to_device


def _arrays(matrix: Any) -> tuple[Any, ...]:
    if matrix.format == "coo":
        return matrix.data, matrix.row, matrix.col
    if matrix.format == "dia":
        return matrix.data, matrix.offsets
    return matrix.data, matrix.indices, matrix.indptr  # CSR and CSC


def _bytes(matrix: Any) -> dict[Device, int]:
    return nbytes_by_device(_arrays(matrix))


def _to_device(matrix: Any, device: Device) -> Any:
    arrays = to_device(_arrays(matrix), device)
    if matrix.format == "coo":
        arrays = arrays[0], arrays[1:]
    moved = type(matrix)(arrays, shape=matrix.shape)
    # The matrix has cached these facts. To find them again, the CPU would wait for the device.
    for name in ("has_canonical_format", "_has_canonical_format", "_has_sorted_indices"):
        if name in vars(matrix):
            setattr(moved, name, getattr(matrix, name))
    return moved


def register() -> None:
    for form in ("csr", "csc", "coo", "dia"):
        for name in (f"{form}_matrix", f"{form}_array"):  # the arrays are new in CuPy 14
            if kind := getattr(sparse, name, None):
                known(kind, nbytes=_bytes, move=_to_device, host=kind.get)
