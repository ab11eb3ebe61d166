"""Arrays on devices in dask's P2P rechunk, which sends and stores the bytes of host arrays."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from dask_devctx.dask_internals.shuffles import rechunked_arrays


def through_host_memory() -> AbstractContextManager[None]:
    """While it is open, P2P rechunks take arrays on devices, and return them on devices."""
    return rechunked_arrays(_to_host, _to_current_device)


def _to_host(array: Any) -> Any:
    from dask_devctx.worker.comms.marked import to_host  # which needs NumPy, as dask's arrays do

    return to_host(array)


def _to_current_device(array: Any) -> Any:
    from dask_devctx.worker.comms.marked import to_current_device

    return to_current_device(array)
