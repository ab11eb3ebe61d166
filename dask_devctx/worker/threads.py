"""The threads of each device, a pool that starts the most urgent task first; and all others.

A GPU's tasks run on the GPU's own threads, on CPUs near it. So libraries make the handles and
workspaces that they keep for each thread and GPU only once.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from dask.system import CPU_COUNT
from distributed import Status, Worker

from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.tasks import (
    DeviceThreadPoolExecutor,
    ThreadPoolExecutor,
    many_wait,
    sending_tasks_on,
    set_most_threads,
)
from dask_devctx.worker.placement.admission import Admission

logger = logging.getLogger(__name__)


@contextmanager
def device_threads(
    worker: Worker, admission: Admission
) -> Iterator[dict[Device, DeviceThreadPoolExecutor]]:
    """While it is open, a worker has an executor for each device, and runs its tasks there."""
    pools: dict[Device, DeviceThreadPoolExecutor] = {}
    for device, queue in admission.states.items():
        started = partial(keep_near, device.info.cpu_affinity)
        name, threads = f"devctx-{device}", admission.tasks_per_device
        pools[device] = DeviceThreadPoolExecutor(
            name, threads, queue, started, partial(many_wait, worker)
        )
    named = {f"devctx:{device}": pool for device, pool in pools.items()}
    worker.executors.update(named)
    try:
        with sending_tasks_on(worker.executors["default"]) if pools else nullcontext():
            yield pools
    finally:
        # A worker that closes shuts its executors down itself, and waits for them.
        for name, pool in named.items() if worker.status is not Status.closing else ():
            worker.executors.pop(name, None)
            pool.shutdown(wait=False)


def keep_near(cpus: frozenset[int] | None, thread: threading.Thread) -> None:
    """Let a thread run only on those CPUs near its device that this process may use."""
    if not cpus or not thread.native_id or not hasattr(os, "sched_setaffinity"):
        return  # one that has not begun is another thread's to bind: 0 would be this thread
    usable = os.sched_getaffinity(0)
    if usable & cpus and not usable <= cpus:
        try:
            os.sched_setaffinity(thread.native_id, usable & cpus)
        except OSError as error:  # EINVAL: a batch system has taken these CPUs away meanwhile
            logger.info("a device's thread is not bound to the CPUs %s: %s", sorted(cpus), error)


@contextmanager
def threads_without_a_device(worker: Worker, count: int | None, part: float) -> Iterator[None]:
    """While it is open, a worker runs fewer tasks without a device at a time than ``nthreads``.

    A worker with devices has a generous ``nthreads``, so that dask sends it tasks ahead. Tasks that
    compute on the host would run in as many threads, and slow each other and the devices down.
    """
    executor, nthreads = worker.executors["default"], worker.state.nthreads
    most = count or max(round(CPU_COUNT * part), 1)
    fewer = isinstance(executor, ThreadPoolExecutor) and most < nthreads
    if fewer:
        set_most_threads(executor, most)
    try:
        yield
    finally:
        if fewer:
            set_most_threads(executor, nthreads)
