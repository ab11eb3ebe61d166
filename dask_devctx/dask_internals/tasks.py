"""A worker's tasks: what executes them, what is called in their place, and the pools they go to."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

from dask._task_spec import DataNode, GraphNode, Task
from distributed import Worker
from distributed.threadpoolexecutor import ThreadPoolExecutor as ThreadPoolExecutor
from distributed.threadpoolexecutor import rejoin, secede, thread_state
from distributed.worker_state_machine import (
    ExecuteFailureEvent,
    ExecuteSuccessEvent,
    RescheduleEvent,
)

from dask_devctx.dask_internals.scheduler import LOOK_AHEAD
from dask_devctx.dask_internals.worker import replaced

logger = logging.getLogger(__name__)

# The state that a task gets from its event, by the event's type; "released" for all others, which
# have no start and no stop.
STATES: Final[dict[Any, str]] = {ExecuteSuccessEvent: "memory", ExecuteFailureEvent: "error"}
# By type: a function that returns what a node holds.
NODE_PARTS: Final[dict[Any, Callable[[Any], Any]]] = {
    Task: attrgetter("func", "args", "kwargs"),
    DataNode: lambda node: (node.value,),
    GraphNode: lambda node: (),
}
# How long a device's thread gathers outcomes while many tasks wait, as the scheduler gathers the
# tasks for a worker. If the event loop wakes for each, it and the thread hand the GIL to and fro
# within each task, and nearly each outcome has a message of its own.
_BATCH_S: Final = 0.005


class TaskStandIn:
    """What a worker calls in the place of a task; a subclass has the attributes of its own.

    Those are ``task``, dask's node, from which all others come, and ``is_coro``: whether the task
    calls a coroutine function, which dask runs on its event loop.
    """

    __slots__ = ()

    task: Any
    is_coro: bool

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.task, name)

    def __repr__(self) -> str:
        return repr(self.task)


@contextmanager
def executed_by(
    worker: Worker,
    begin: Callable[[Any], TaskStandIn | None],
    end: Callable[[Any, Any, Any], object],
) -> Iterator[None]:
    """While it is open, a worker calls the stand-in that ``begin`` makes in the place of a task.

    ``begin`` gets the worker's state of the task and must not raise; ``end`` gets it too, with the
    stand-in and dask's event of the outcome, None without one.
    """
    execute, states = worker.execute, worker.state.tasks
    ended, passed_on = False, set()

    async def executed(key: Hashable, *, stimulus_id: str) -> Any:
        if ended and key not in passed_on:  # it did not begin before the end of this
            passed_on.add(key)
            try:
                return await worker.execute(key, stimulus_id=stimulus_id)
            finally:
                passed_on.discard(key)
        if ended:  # by a wrapper of others, which is still around this
            return await execute(key, stimulus_id=stimulus_id)
        ts = states[key]
        task = ts.run_spec
        stand_in = begin(ts)
        if stand_in is not None:
            ts.run_spec = stand_in
        event = None
        try:
            event = await execute(key, stimulus_id=stimulus_id)
        except asyncio.CancelledError:  # before it began: it was given back, or the worker closes
            if getattr(stand_in, "thread", 0) is not None:
                raise
            event = RescheduleEvent(key=key, stimulus_id=stimulus_id)
        finally:
            if ts.run_spec is stand_in:  # else the task was requested again meanwhile
                ts.run_spec = task
            try:
                end(ts, stand_in, event)
            except Exception:  # without its event, the task would stay in "executing"
                logger.exception("The end of %r was not counted", key)
        return event

    try:
        with replaced(vars(worker), "execute", executed):
            yield
    finally:
        ended = True
    for ts in states.values():
        if isinstance(ts.run_spec, TaskStandIn):
            ts.run_spec = ts.run_spec.task


def last_told_at_once(worker: Worker) -> AbstractContextManager[None]:
    """While it is open, the scheduler hears of the last task that a worker has without delay."""
    stream, running, ready = worker.batched_stream, worker.state.executing, worker.state.ready
    send = stream.send

    def tell(*messages: Any) -> None:
        if not running and not ready:
            stream.next_deadline = None  # dask would hold this back for others, which do not come
        send(*messages)

    return replaced(vars(stream), "send", tell)


def many_wait(worker: Worker) -> bool:
    """Return whether many tasks wait on a worker, beyond those that dask runs at a time."""
    return bool(2 * len(worker.state.ready) >= max(worker.state.nthreads, LOOK_AHEAD))


def ended_here(worker: Worker, which: Callable[[Mapping[str, Any] | None], bool]) -> set[Hashable]:
    """Return the tasks that ended well on a worker, among those with such annotations."""
    return {
        key
        for key, ts in worker.state.tasks.items()
        if ts.state == "memory" and which(ts.annotations)
    }


# -- dask's thread pools: their queues, and tasks that go to another pool


def has_seceded() -> bool:
    """Return whether this thread of a pool has seceded from it."""
    return not getattr(thread_state, "proceed", True)


def rejoin_if_seceded() -> None:
    """Let this thread back into its pool if it seceded: its task begins again."""
    if has_seceded():
        rejoin()


class DeviceThreadPoolExecutor(ThreadPoolExecutor):  # type: ignore[misc]
    """The threads that run a device's tasks, as the device's queue grants them.

    Calls that were submitted before the shutdown still run, and threads that seceded can still
    rejoin. An event loop that submits a task gets an asyncio future directly, not a thread's future
    that a second one wraps: this halves the work, and one wakeup of the loop serves all tasks that
    ended.
    """

    # dask recognizes a thread pool by the name of its class, which must contain
    # "ThreadPoolExecutor". The base class is distributed's, so that `secede` and `rejoin` work.

    def __init__(
        self,
        name: str,
        threads: int,
        queue: Any,
        started: Callable[[threading.Thread], object],
        many_wait: Callable[[], bool],
    ) -> None:
        super().__init__(threads, thread_name_prefix=name)
        self._work_queue = self.queue = queue
        self._started = started  # called for each new thread
        self._many_wait = many_wait
        self._outcomes: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._woken = False
        self._batch: asyncio.TimerHandle | None = None  # ends the gathering of outcomes
        queue.threads, queue.grow = threads, self.grow_to

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call before all waiting tasks."""
        try:
            future: Future[Any] = super().submit(fn, *args, **kwargs)
        except RuntimeError:  # the pool is shut down. A thread that rejoins calls this too
            with self._rejoin_lock:
                rejoining = self._rejoin_list[:]
                self._rejoin_list.clear()
                for thread, event in rejoining:
                    self._threads.add(thread)
                    event.set()
            if not rejoining:
                raise
            future = Future()
            future.set_result(None)
        if has_seceded():  # it rejoins
            self.queue.rejoined()
        return future

    def submit_task(
        self, claim: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> asyncio.Future[Any]:
        """Run a task of the running event loop's as soon as its claim is granted."""
        future = asyncio.get_running_loop().create_future()
        claim.call = _Call(partial(fn, *args, **kwargs), claim, self, future)
        with self._shutdown_lock:
            if self._shutdown:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self.queue.admission.submit(claim)
            if len(self._threads) < self._max_workers:
                self._adjust_thread_count()
        return future

    def grow_to(self, threads: int) -> None:
        """Let the pool have so many threads, and start one if it has fewer."""
        self._max_workers: int = max(self._max_workers, threads)
        self.queue.threads = self._max_workers
        if len(self._threads) < threads:
            self._adjust_thread_count()

    def _adjust_thread_count(self) -> None:
        if has_seceded():  # dask calls this on the thread that secedes
            self.queue.left()
        before = set(self._threads)
        super()._adjust_thread_count()
        for thread in self._threads - before:
            self._started(thread)

    # -- the outcomes of tasks, from their threads to the event loop that submitted them

    def put_outcome(
        self, future: asyncio.Future[Any], result: Any, error: BaseException | None, *, urgent: bool
    ) -> None:
        """Add an outcome; called on a device's thread, which lets the loop sleep in a batch."""
        self._outcomes.append((future, result, error))
        queue = self.queue
        # In a batch, too, the loop needs time to hand over others before these have run.
        gathers = self._batch is not None and not urgent
        if gathers and len(queue.ready) + len(queue.waiting) > LOOK_AHEAD // 2 * queue.threads:
            return
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed, so no caller waits
                future.get_loop().call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: an outcome that is added from now on wakes the loop again
        if self._outcomes and self._batch is None and self._many_wait():
            self._batch = asyncio.get_running_loop().call_later(_BATCH_S, self._end_batch)
        while self._outcomes:
            future, result, error = self._outcomes.popleft()
            if future.done():  # cancelled
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _end_batch(self) -> None:
        self._batch = None  # first, for the same reason
        self._deliver()


class _Call(NamedTuple):
    """The call of a task, for which an event loop waits."""

    fn: Callable[[], Any]
    claim: Any
    pool: DeviceThreadPoolExecutor
    future: asyncio.Future[Any]

    def run(self) -> None:
        claim, pool, result, error = self.claim, self.pool, None, None
        if not self.future.cancelled():  # by a worker that closes: others run it
            try:
                result = self.fn()
            except BaseException as raised:
                error = raised
        # First: a task that waits for this slot starts before the loop wakes.
        pool.queue.running.pop(threading.get_ident(), None)
        if claim.held:
            pool.queue.admission.release(claim)
        claim.call = None  # it has the task's inputs
        urgent = claim.priority[0] < 0  # by the user: a priority above 0
        pool.put_outcome(self.future, result, error, urgent=urgent)
        del self, claim, result, error  # the error's frames know this one


# The executor to which the next task of this context goes, and its claim: for executors for which
# :func:`sending_tasks_on` is open. A reader takes the entry out of the list, since the task itself
# runs in a copy of this context.
NEXT_TASK: ContextVar[list[tuple[DeviceThreadPoolExecutor, Any]] | None] = ContextVar(
    "next_task", default=None
)


def sending_tasks_on(executor: Executor) -> AbstractContextManager[None]:
    """While it is open, an executor passes on the tasks that are meant for another executor."""
    return replaced(vars(executor), "submit", partial(_submit, executor.submit))


def _submit(
    here: Callable[..., Future[Any]], fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Future[Any] | asyncio.Future[Any]:
    found = NEXT_TASK.get()
    if not found:
        return here(fn, *args, **kwargs)
    executor, claim = found.pop()
    return executor.submit_task(claim, fn, *args, **kwargs)


# -- the number of a pool's threads

_leaving: Final = threading.Lock()


def set_most_threads(executor: ThreadPoolExecutor, count: int) -> None:
    """Let a pool have so many threads: waiting calls start further ones, idle ones beyond end."""
    executor._max_workers = count
    for _ in range(min(executor._work_queue.qsize(), count)):
        executor._adjust_thread_count()  # does nothing where there are enough
    for _ in range(len(executor._threads) - count):
        executor.submit(_leave, executor)


def _leave(executor: ThreadPoolExecutor) -> None:
    with _leaving:  # it may have been queued for a number of before
        if len(executor._threads) > executor._max_workers:
            secede(adjust=False)
