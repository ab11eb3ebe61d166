"""CuPy's sparse matrices: the arrays inside move, and a new matrix is made around them."""

from __future__ import annotations

from typing import Any

from cupyx.scipy import sparse

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.host import to_host
from dask_devctx.transfer.location import device_of, nbytes_by_device
from dask_devctx.transfer.move import to_device


def _arrays(matrix: Any) -> tuple[Any, ...]:
    if matrix.format == "coo":
        return matrix.data, matrix.row, matrix.col
    if matrix.format == "dia":
        return matrix.data, matrix.offsets
    return matrix.data, matrix.indices, matrix.indptr  # CSR and CSC


def _device_of(matrix: Any) -> Device | None:
    return device_of(_arrays(matrix))


def _bytes(matrix: Any) -> dict[Device, int]:
    return nbytes_by_device(_arrays(matrix))


def _to_device(matrix: Any, device: Device) -> Any:
    arrays = to_device(_arrays(matrix), device)
    if matrix.format == "coo":
        moved = type(matrix)((arrays[0], arrays[1:]), shape=matrix.shape)
    else:
        moved = type(matrix)(arrays, shape=matrix.shape)
    # The matrix has cached these facts. To find them again, the CPU would wait for the device.
    for name in ("has_canonical_format", "_has_canonical_format", "_has_sorted_indices"):
        if name in vars(matrix):
            setattr(moved, name, getattr(matrix, name))
    return moved


_KINDS = ("matrix", "array")  # the arrays are new in CuPy 14


def register() -> None:
    """Make the matrices of ``cupyx.scipy.sparse`` known."""
    names = [f"{form}_{kind}" for form in ("csr", "csc", "coo", "dia") for kind in _KINDS]
    for kind in [getattr(sparse, name) for name in names if hasattr(sparse, name)]:
        device_of.register(kind, _device_of)
        nbytes_by_device.register(kind, _bytes)
        to_device.register(kind, _to_device)
        to_host.register(kind, kind.get)
