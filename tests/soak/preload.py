"""Loaded by each worker: signals break its devices while no task is guilty of it."""

from __future__ import annotations

import signal
from typing import Any

from cuda.bindings.driver import CUresult

from tests.soak import tasks

# How a signal breaks the devices. With the first one dask-devctx knows that the hardware failed;
# the second one looks like the work of a task.
BREAKS = {
    signal.SIGUSR1: CUresult.CUDA_ERROR_ECC_UNCORRECTABLE,
    signal.SIGUSR2: CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,
}
_AGAIN_S = 0.01


def dask_setup(worker: Any) -> None:
    loop = worker.loop.asyncio_loop

    def soon(status: CUresult) -> None:
        if status is CUresult.CUDA_ERROR_ILLEGAL_ADDRESS and _has_one_suspect(worker):
            loop.call_later(_AGAIN_S, soon, status)
        else:
            tasks.faults().poison(status)

    for number, status in BREAKS.items():
        signal.signal(number, lambda *_, status=status: loop.call_soon_threadsafe(soon, status))


def _has_one_suspect(worker: Any) -> bool:
    """Return whether one task alone could have broken a device: nobody can tell that it did not."""
    plugin = worker.plugins.get("devctx")
    if plugin is None or plugin.extension is None:
        return False
    return len({one.key for one in plugin.extension.monitor.suspects.named()}) == 1
