"""Loaded by each worker: signals break its devices while no task is guilty of it."""

from __future__ import annotations

import signal

from cuda.bindings.driver import CUresult

from tests.soak import tasks

# How a signal breaks the devices. With the first one dask-devctx knows that the hardware failed;
# the second one looks like the work of a task.
BREAKS = {
    signal.SIGUSR1: CUresult.CUDA_ERROR_ECC_UNCORRECTABLE,
    signal.SIGUSR2: CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,
}


def dask_setup(worker: object) -> None:
    for number, status in BREAKS.items():
        signal.signal(number, lambda *_, status=status: tasks.faults().poison(status))
