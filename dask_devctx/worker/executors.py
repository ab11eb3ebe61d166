"""The threads of a device: a pool that starts the most urgent task first.

A GPU's tasks run on the GPU's own threads, near it, so that what libraries keep per thread and GPU
(handles, workspaces) is made once.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

from distributed.threadpoolexecutor import ThreadPoolExecutor

# The priority of the task that is about to be submitted in this context: dask's executors are
# given a function, and not the task it is of.
submitting: ContextVar[tuple[int, ...] | None] = ContextVar("submitting", default=None)

_FIRST: tuple[float, ...] = (float("-inf"),)
_LAST: tuple[float, ...] = (float("inf"),)


class DeviceThreadPoolExecutor(ThreadPoolExecutor):  # type: ignore[misc]
    """The threads that run a device's tasks.

    Parameters
    ----------
    name
        What the threads are called.
    threads
        How many tasks run at a time.
    cpus
        The CPUs that the threads keep to; None for any that the process may use.

    Notes
    -----
    dask takes an executor for one of threads by its class's name, which has to say
    ``ThreadPoolExecutor``. It is a distributed one, so that ``secede`` and ``rejoin`` work in it.
    What was submitted before it was shut down still runs, and who has left it can still come back.

    A task that an event loop submits gives it a future of its own, and not one for threads that has
    to be watched by another: half the work, and one wakeup for all that end until the loop looks.
    """

    def __init__(self, name: str, threads: int, cpus: frozenset[int] | None) -> None:
        super().__init__(threads, thread_name_prefix=name)
        self._work_queue = _ByPriority()
        self._cpus = cpus
        self._pinned = threading.local()
        self._outcomes = _Outcomes()

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any] | asyncio.Future[Any]:
        priority = submitting.get()

        def near() -> Any:
            self._keep_to_cpus()
            return fn(*args, **kwargs)

        near.priority = priority or _FIRST  # type: ignore[attr-defined]
        loop = asyncio._get_running_loop() if priority else None
        if loop is not None and self._outcomes.go_to(loop):
            with self._shutdown_lock:
                if not self._shutdown:
                    task = _Task(near, loop.create_future(), self._outcomes)
                    self._work_queue.put(task)
                    self._adjust_thread_count()
                    return task.future
        try:
            future: Future[Any] = super().submit(near)
        except RuntimeError:  # it was shut down
            if not self._let_back_in():
                raise
            future = Future()
            future.set_result(None)
        return future

    def _let_back_in(self) -> bool:
        """Let the threads that wait to rejoin go on: no task waits any more for their place."""
        with self._rejoin_lock:
            waiting: list[tuple[threading.Thread, threading.Event]] = self._rejoin_list[:]
            self._rejoin_list.clear()
            for thread, event in waiting:
                self._threads.add(thread)
                event.set()
        return bool(waiting)

    def _keep_to_cpus(self) -> None:
        if self._cpus and not getattr(self._pinned, "done", False):
            self._pinned.done = True
            os.sched_setaffinity(0, self._cpus)  # of the calling thread


def near_cpus(cpus: frozenset[int] | None) -> frozenset[int] | None:
    """Return those of a device's CPUs that this process may use; None where that says nothing."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return None
    usable = frozenset(os.sched_getaffinity(0))
    near = cpus & usable
    return near if near and near != usable else None


class _Outcomes:
    """The way of tasks' outcomes from their threads to the event loop that submitted them."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._woken = False

    def go_to(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether this is the loop that they go to; the first one is."""
        if self._loop is None:
            self._loop = loop
        return self._loop is loop

    def put(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        """Called by a thread."""
        self._waiting.append((future, result, error))
        if not self._woken:
            self._woken = True
            assert self._loop is not None
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: what is put from now on wakes the loop again
        while self._waiting:
            future, result, error = self._waiting.popleft()
            if future.done():  # cancelled
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


class _Task(NamedTuple):
    """A task of an event loop, in the place of a work item."""

    fn: Callable[[], Any]
    future: asyncio.Future[Any]
    outcomes: _Outcomes

    def run(self) -> None:
        if self.future.cancelled():
            return
        result, error = None, None
        try:
            result = self.fn()
        except BaseException as raised:
            error = raised
        self.outcomes.put(self.future, result, error)


class _ByPriority(queue.Queue[Any]):
    """A queue of work items; the least priority first, then the earliest."""

    def _init(self, maxsize: int) -> None:
        self.queue: Any = []
        self._counter = itertools.count()

    def _put(self, item: Any) -> None:
        priority = _LAST if item is None else item.fn.priority
        heapq.heappush(self.queue, (priority, next(self._counter), item))

    def _get(self) -> Any:
        return heapq.heappop(self.queue)[-1]
