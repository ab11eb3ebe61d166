"""The threads of a device: a pool that starts the most urgent task first.

A GPU's tasks run on the GPU's own threads, on CPUs near it. So libraries make the handles and
workspaces that they keep for each thread and GPU only once. A task with a claim starts when it is
granted, on a thread of its first device.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from distributed import Status, Worker

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import clear_frames
from dask_devctx.dask_internals.threads import (
    Priority,
    TaskThreadPoolExecutor,
    error_in,
    key_of_this_thread,
    rescheduled,
    sending_tasks_on,
)
from dask_devctx.worker.placement.admission import Admission, Claim
from dask_devctx.worker.threads.queues import FIRST, DeviceQueue

logger = logging.getLogger(__name__)


class DeviceThreadPoolExecutor(TaskThreadPoolExecutor):
    """The threads that run a device's tasks.

    Parameters
    ----------
    name
        The prefix of the threads' names.
    threads
        How many tasks run at a time.
    cpus
        The CPUs on which the threads run; None for any that the process may use.
    calls
        The queue of calls; its admission decides which of them may start.
    on_secede
        Called with a task's key on the thread that secedes.

    Notes
    -----
    Calls that were submitted before the shutdown still run, and threads that seceded can still
    rejoin.

    An event loop that submits a task gets an asyncio future directly, not a thread's future that a
    second one wraps. This halves the work, and one wakeup of the loop serves all tasks that ended.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        cpus: frozenset[int] | None,
        calls: DeviceQueue | None = None,
        on_secede: Callable[[Hashable], object] = lambda key: None,
    ) -> None:
        self._on_secede = on_secede
        self._max_workers: int
        self._calls = calls or DeviceQueue()
        super().__init__(name, threads, self._calls)
        self._cpus = cpus
        self._near = threading.local()
        self._outcomes = _Outcomes()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call before all waiting tasks."""
        call = _Call(FIRST, self._nearby(fn, args, kwargs), Future())
        if not self.give(call):
            # The pool is shut down. A thread that rejoins calls this too: it continues at once.
            if not self.let_back_in():
                raise _shut_down()
            call.future.set_result(None)
        return call.future

    def submit_task(
        self, priority: Priority | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any] | asyncio.Future[Any]:
        """Run a task of dask's; the task with the smallest priority runs first."""
        work = self._work(priority or FIRST, fn, args, kwargs)
        if not self.give(work):
            raise _shut_down()
        return work.future

    def submit_claimed(
        self, claim: Claim, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any] | asyncio.Future[Any]:
        """Run a task of dask's as soon as its claim is granted."""
        work = self._work(claim.urgency, fn, args, kwargs)
        if self.is_shut_down:
            raise _shut_down()
        claim.submit(lambda: self._start_claimed(work, claim))
        return work.future

    def _start_claimed(self, work: Any, claim: Claim) -> None:
        needed, busy = self._calls.put_claimed(work, claim)
        self.grow_to(busy, needed)

    def seceding(self) -> None:
        self._calls.left()
        # A task that seceded, rejoined and secedes again makes no transition.
        if (key := key_of_this_thread()) is not None:
            self._on_secede(key)

    def _work(
        self,
        urgency: tuple[Any, ...],
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> _Call | _LoopCall:
        near = self._nearby(fn, args, kwargs)
        loop = asyncio._get_running_loop()
        if loop is not None and self._outcomes.go_to(loop):
            return _LoopCall(urgency, near, _Outcome(loop=loop), self._outcomes, self._calls)
        return _Call(urgency, near, Future())

    def _nearby(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any]:
        cpus = self._cpus
        if not cpus:
            return partial(fn, *args, **kwargs)

        def near() -> Any:
            if not getattr(self._near, "done", False):
                self._near.done = True
                _keep_to(cpus)
            return fn(*args, **kwargs)

        return near


class Claimed:
    """Takes the place of a device's executor for a task with a claim."""

    def __init__(self, executor: DeviceThreadPoolExecutor, claim: Claim) -> None:
        self._executor = executor
        self._claim = claim

    def submit_task(
        self, priority: Priority | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any] | asyncio.Future[Any]:
        """Run a task of dask's as soon as its claim is granted."""
        return self._executor.submit_claimed(self._claim, fn, *args, **kwargs)


@contextmanager
def device_threads(
    worker: Worker,
    devices: Sequence[Device],
    threads: int,
    admission: Admission,
    on_secede: Callable[[Hashable], object],
) -> Iterator[dict[Device, DeviceThreadPoolExecutor]]:
    """While it is open, a worker has threads for each device, and runs the device's tasks there.

    Parameters
    ----------
    worker
        The worker.
    devices
        Its devices.
    threads
        How many tasks that say nothing run on a device at a time.
    admission
        Decides which tasks may start.

    Yields
    ------
    dict
        The executor of each device.
    """
    pools = {
        device: DeviceThreadPoolExecutor(
            f"devctx-{device}",
            threads,
            near_cpus(device.info.cpu_affinity),
            DeviceQueue(admission, device),
            on_secede,
        )
        for device in devices
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


def _shut_down() -> RuntimeError:
    return RuntimeError("cannot schedule new futures after shutdown")


def near_cpus(cpus: frozenset[int] | None) -> frozenset[int] | None:
    """Return the CPUs near a device that this process may use; None for no restriction."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return None
    usable = frozenset(os.sched_getaffinity(0))
    near = cpus & usable
    return near if near and near != usable else None


def _keep_to(cpus: frozenset[int]) -> None:
    """Let the calling thread run on these CPUs only, if the system allows that."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:  # EINVAL: a batch system has taken these CPUs away meanwhile
        logger.info("a device's thread is not bound to the CPUs %s: %s", sorted(cpus), error)


class _Outcomes:
    """Brings the outcomes of tasks from their threads to the event loop that submitted them."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._woken = False

    def go_to(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether outcomes go to this loop; they go to the first loop that asks."""
        if self._loop is None:
            self._loop = loop
        return self._loop is loop

    def put(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        """Add an outcome; called on a device's thread."""
        self._waiting.append((future, result, error))
        if not self._woken:
            self._woken = True
            assert self._loop is not None
            with suppress(RuntimeError):  # the loop is closed, so no caller waits
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: an outcome that is added from now on wakes the loop again
        while self._waiting:
            future, result, error = self._waiting.popleft()
            if future.done():  # cancelled
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


class _Call(NamedTuple):
    """A call with a future for which any thread may wait."""

    priority: tuple[float, ...]
    fn: Callable[[], Any]
    future: Future[Any]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.fn()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def give_back(self) -> bool:
        """Let the scheduler send the task again, if it has not begun."""
        if not self.future.set_running_or_notify_cancel():
            return False
        self.future.set_result(rescheduled())
        return True


class _Outcome(asyncio.Future[Any]):
    """The outcome of a task; of one that has not begun when it is cancelled, that it shall move.

    A worker that closes cancels all its tasks, and dask logs a line for each. Many tasks may wait
    for a place on a device. They have not run, so other workers run them, and there is no line.
    """

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        # Who takes it first decides: the thread that begins the task, or a cancellation.
        self.take = partial(threading.Lock().acquire, blocking=False)

    def cancel(self, msg: Any = None) -> bool:
        if self.done() or not self.take():
            return super().cancel(msg)
        self.set_result(rescheduled())
        return True


class _LoopCall(NamedTuple):
    """A call with a future for which an event loop waits."""

    priority: tuple[float, ...]
    fn: Callable[[], Any]
    future: _Outcome
    outcomes: _Outcomes
    calls: DeviceQueue

    def give_back(self) -> bool:
        """Let the scheduler send the task again, if it has not begun; on its event loop."""
        if not self.future.take():
            return False
        self.future.set_result(rescheduled())
        return True

    def run(self) -> None:
        if not self.future.take():
            return
        result, error = None, None
        try:
            result = self.fn()
        except BaseException as raised:
            error = raised
        failed = error_in(result)
        if failed is not None:  # dask's frames make a cycle, which would keep the task's arrays
            clear_frames(failed)
        self.calls.left()  # first: a task that waits for this place starts before the loop wakes
        self.outcomes.put(self.future, result, error)
        del self, result, error, failed  # the error's frames know this one
