"""The threads of tasks without a device: as many as there are CPUs, and more while they wait.

A worker with devices has a generous ``nthreads``, so that dask sends it tasks ahead. Tasks that
compute on the host would run in as many threads, and slow each other and the devices down.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import psutil
from dask.system import CPU_COUNT
from distributed import Worker, get_worker
from tornado.ioloop import PeriodicCallback

from dask_devctx.cuda.on_device import tasks_told
from dask_devctx.dask_internals.threads import (
    ThreadPoolExecutor,
    end_idle_threads,
    set_most_threads,
    threads_of,
    waiting_calls,
)

_LOOK_INTERVAL_S = 0.5
# A thread that used less of a CPU than this, as a fraction, waits.
_WAITING = 0.1


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
    least = count or max(round(CPU_COUNT * part), 1)
    if not isinstance(executor, ThreadPoolExecutor) or least >= nthreads:
        yield
        return
    looking = PeriodicCallback(_Growth(executor, least, nthreads).look, _LOOK_INTERVAL_S * 1000)
    set_most_threads(executor, least)
    end_idle_threads(executor, least)
    if count is None:
        looking.start()
    try:
        yield
    finally:
        looking.stop()
        set_most_threads(executor, nthreads)


class _Growth:
    """Gives an executor more threads while all its threads wait and calls are queued."""

    def __init__(self, executor: ThreadPoolExecutor, least: int, most: int) -> None:
        self._executor = executor
        self._least = least
        self._most = most
        self._now = least
        self._used_s: dict[int, float] = {}

    def look(self) -> None:
        if not waiting_calls(self._executor):
            self._used_s = {}
            if self._now > self._least:
                self._now = self._least
                set_most_threads(self._executor, self._least)
                end_idle_threads(self._executor, self._least)
            return
        before, self._used_s = self._used_s, _cpu_seconds(self._executor)
        waits = [
            used - before[thread] < _WAITING * _LOOK_INTERVAL_S
            for thread, used in self._used_s.items()
            if thread in before
        ]
        if len(waits) == len(self._used_s) >= self._now and all(waits) and self._now < self._most:
            self._now = min(2 * self._now, self._most)
            set_most_threads(self._executor, self._now)


def _cpu_seconds(executor: ThreadPoolExecutor) -> dict[int, float]:
    """Return the CPU time of each thread of an executor, by its native id."""
    mine = {thread.native_id for thread in threads_of(executor)}
    threads = psutil.Process().threads()
    return {one.id: one.user_time + one.system_time for one in threads if one.id in mine}
