"""The part of the host's memory that belongs to a number of its devices."""

from __future__ import annotations

import psutil
from distributed.system import MEMORY_LIMIT

from dask_devctx import driver
from dask_devctx.cuda import discovery


def fair_memory(n_devices: int) -> int:
    """Return the bytes of host memory for workers that use so many of the machine's devices."""
    found = discovery.inventory(driver.backend())
    total = len(found.devices)
    if psutil.virtual_memory().total <= MEMORY_LIMIT:
        total += len(found.hidden)
    return int(MEMORY_LIMIT * n_devices) // max(total, n_devices, 1)
