"""The threads of tasks without a device: as many as there are CPUs.

A worker with devices has a generous ``nthreads``, so that dask sends it tasks ahead. Tasks that
compute on the host would run in as many threads, and slow each other and the devices down.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from dask.system import CPU_COUNT
from distributed import Worker, get_worker

from dask_devctx.cuda.on_device import tasks_told
from dask_devctx.dask_internals.tasks import (
    ThreadPoolExecutor,
    end_idle_threads,
    set_most_threads,
)


@contextmanager
def threads_without_a_device(worker: Worker, count: int | None, part: float) -> Iterator[None]:
    """While it is open, a worker runs fewer tasks without a device at a time than ``nthreads``.

    In these tasks, ``task_devices()`` is empty.
    """
    with tasks_told(partial(_is_task_of, worker)), _fewer_threads(worker, count, part):
        yield


def _is_task_of(worker: Worker) -> bool:
    try:
        return get_worker() is worker
    except ValueError:  # no task runs here
        return False


@contextmanager
def _fewer_threads(worker: Worker, count: int | None, part: float) -> Iterator[None]:
    executor = worker.executors["default"]
    nthreads = worker.state.nthreads
    most = count or max(round(CPU_COUNT * part), 1)
    if not isinstance(executor, ThreadPoolExecutor) or most >= nthreads:
        yield
        return
    set_most_threads(executor, most)
    end_idle_threads(executor, most)
    try:
        yield
    finally:
        set_most_threads(executor, nthreads)
