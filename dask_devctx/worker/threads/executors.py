"""The threads of each device, a pool that starts the most urgent task first; and all others.

A GPU's tasks run on the GPU's own threads, on CPUs near it. So libraries make the handles and
workspaces that they keep for each thread and GPU only once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from dask.system import CPU_COUNT
from distributed import Status, Worker, get_worker

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.on_device import tasks_told
from dask_devctx.cuda.out_of_memory import clear_frames
from dask_devctx.dask_internals.tasks import (
    TaskThreadPoolExecutor,
    ThreadPoolExecutor,
    end_idle_threads,
    error_in,
    rescheduled,
    sending_tasks_on,
    set_most_threads,
)
from dask_devctx.worker.placement.admission import Admission, Claim, DeviceState

logger = logging.getLogger(__name__)


class DeviceThreadPoolExecutor(TaskThreadPoolExecutor):
    """The threads that run a device's tasks, as its queue grants them.

    Calls that were submitted before the shutdown still run, and threads that seceded can still
    rejoin. An event loop that submits a task gets an asyncio future directly, not a thread's future
    that a second one wraps: this halves the work, and one wakeup of the loop serves all tasks that
    ended.
    """

    def __init__(
        self, name: str, threads: int, queue: DeviceState, cpus: frozenset[int] | None = None
    ) -> None:
        super().__init__(name, threads, queue)
        self._queue = queue
        self._cpus = cpus
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outcomes: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._woken = False
        queue.threads, queue.grow = threads, self.grow_to

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call before all waiting tasks."""
        future: Future[Any]
        try:
            future = super().submit(fn, *args, **kwargs)
        except RuntimeError:  # the pool is shut down. A thread that rejoins calls this too
            if not self.let_back_in():
                raise
            future = Future()
            future.set_result(None)
        return future

    def submit_task(
        self, claim: Claim, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> asyncio.Future[Any]:
        """Run a task of the running event loop's as soon as its claim is granted."""
        self._loop = loop = asyncio.get_running_loop()
        future = _Outcome(loop=loop)
        future.take = threading.Lock().acquire
        claim.call = _Call(partial(fn, *args, **kwargs), claim, self, future)
        if not self.give(self._queue.admission.submit, claim):
            raise RuntimeError("cannot schedule new futures after shutdown")
        return future

    def grow_to(self, threads: int) -> None:
        """Let the pool have so many threads, and start one if it has fewer."""
        super().grow_to(threads)
        self._queue.threads = max(self._queue.threads, threads)

    def seceding(self) -> None:
        self._queue.left()

    def started(self, thread: threading.Thread) -> None:
        """Let a new thread run on the device's CPUs only, if the system allows that."""
        if self._cpus:
            try:
                os.sched_setaffinity(thread.native_id or 0, self._cpus)
            except OSError as error:  # EINVAL: a batch system has taken these CPUs away meanwhile
                cpus = sorted(self._cpus)
                logger.info("a device's thread is not bound to the CPUs %s: %s", cpus, error)

    # -- the outcomes of tasks, from their threads to the event loop that submitted them

    def put_outcome(
        self, future: asyncio.Future[Any], result: Any, error: BaseException | None
    ) -> None:
        """Add an outcome; called on a device's thread."""
        self._outcomes.append((future, result, error))
        if not self._woken:
            self._woken = True
            assert self._loop is not None
            with suppress(RuntimeError):  # the loop is closed, so no caller waits
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: an outcome that is added from now on wakes the loop again
        while self._outcomes:
            future, result, error = self._outcomes.popleft()
            if future.done():  # cancelled
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


@contextmanager
def device_threads(
    worker: Worker, admission: Admission, threads: int
) -> Iterator[dict[Device, DeviceThreadPoolExecutor]]:
    """While it is open, a worker has an executor for each device, and runs its tasks there."""
    pools = {
        device: DeviceThreadPoolExecutor(
            f"devctx-{device}", threads, queue, near_cpus(device.info.cpu_affinity)
        )
        for device, queue in admission.states.items()
    }

    def end(name: str, pool: DeviceThreadPoolExecutor) -> None:
        # A worker that closes shuts its executors down itself, and waits for them.
        if worker.status is not Status.closing:
            worker.executors.pop(name, None)
            pool.shutdown(wait=False)

    with ExitStack() as steps:
        if pools:
            steps.enter_context(sending_tasks_on(worker.executors["default"]))
        for device, pool in pools.items():
            steps.callback(end, f"devctx:{device}", pool)
            worker.executors[f"devctx:{device}"] = pool
        yield pools


def near_cpus(cpus: frozenset[int] | None) -> frozenset[int] | None:
    """Return the CPUs near a device that this process may use; None for no restriction."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return None
    usable = frozenset(os.sched_getaffinity(0))
    near = cpus & usable
    return near if near and near != usable else None


@contextmanager
def threads_without_a_device(worker: Worker, count: int | None, part: float) -> Iterator[None]:
    """While it is open, a worker runs fewer tasks without a device at a time than ``nthreads``.

    A worker with devices has a generous ``nthreads``, so that dask sends it tasks ahead. Tasks that
    compute on the host would run in as many threads, and slow each other and the devices down. In
    these tasks, ``task_devices()`` is empty.
    """
    executor, nthreads = worker.executors["default"], worker.state.nthreads
    most = count or max(round(CPU_COUNT * part), 1)
    fewer = isinstance(executor, ThreadPoolExecutor) and most < nthreads
    with tasks_told(partial(_is_task_of, worker)):
        if fewer:
            set_most_threads(executor, most)
            end_idle_threads(executor, most)
        try:
            yield
        finally:
            if fewer:
                set_most_threads(executor, nthreads)


def _is_task_of(worker: Worker) -> bool:
    try:
        return get_worker() is worker
    except ValueError:  # no task runs here
        return False


class _Outcome(asyncio.Future[Any]):
    """The outcome of a task; of one that has not begun when it is cancelled, that it shall move.

    A worker that closes cancels all its tasks, and dask logs a line for each. Many tasks may wait
    for a slot on a device. They have not run, so other workers run them, and there is no line.
    """

    # The first to take it decides: the thread that begins the task, or a cancellation.
    take: Callable[[bool], bool]

    def cancel(self, msg: Any = None) -> bool:
        if self.done() or not self.take(False):
            return super().cancel(msg)
        self.set_result(rescheduled())
        return True


class _Call:
    """The call of a task, for which an event loop waits."""

    __slots__ = ("claim", "fn", "future", "pool")

    def __init__(
        self,
        fn: Callable[[], Any],
        claim: Claim,
        pool: DeviceThreadPoolExecutor,
        future: _Outcome,
    ) -> None:
        self.fn = fn
        self.claim = claim
        self.pool = pool
        self.future = future

    def run(self) -> None:
        claim, pool, result, error = self.claim, self.pool, None, None
        if runs := self.future.take(False):
            try:
                result = self.fn()
            except BaseException as raised:
                error = raised
            failed = error_in(result)
            if failed is not None:  # dask's frames make a cycle, which would keep the task's arrays
                clear_frames(failed)
            del failed
        # First: a task that waits for this slot starts before the loop wakes.
        pool._queue.running.pop(threading.get_ident(), None)
        if claim.held:
            pool._queue.admission.release(claim)
        claim.call = None  # it has the task's inputs
        if runs:
            pool.put_outcome(self.future, result, error)
        del self, claim, result, error  # the error's frames know this one
