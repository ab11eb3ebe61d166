"""CuPy's sparse matrices: the arrays inside move, and what they have cached stays known."""

from __future__ import annotations

from typing import Any

from cupyx.scipy import sparse

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.libraries import known
from dask_devctx.transfer.location import nbytes_by_device
from dask_devctx.transfer.move import to_device


def _bytes(matrix: Any) -> dict[Device, int]:
    return nbytes_by_device(vars(matrix))


def _to_device(matrix: Any, device: Device) -> Any:
    moved = object.__new__(type(matrix))
    vars(moved).update(to_device(vars(matrix), device))
    return moved


for _form in ("csr", "csc", "coo", "dia"):
    for _name in (f"{_form}_matrix", f"{_form}_array"):  # the arrays are new in CuPy 14
        if _kind := getattr(sparse, _name, None):
            known(_kind, nbytes=_bytes, move=_to_device, host=_kind.get)
