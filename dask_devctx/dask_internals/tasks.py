"""A worker's tasks: what executes them, what is called in their place, and the pools they go to."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from typing import Any, Final
from weakref import WeakKeyDictionary

from dask._task_spec import DataNode, GraphNode, Task
from distributed import Reschedule, Worker
from distributed.threadpoolexecutor import ThreadPoolExecutor as ThreadPoolExecutor
from distributed.threadpoolexecutor import rejoin, secede, thread_state
from distributed.worker_state_machine import ExecuteFailureEvent, ExecuteSuccessEvent

from dask_devctx.dask_internals.worker import replaced

logger = logging.getLogger(__name__)

FAILED: Final = ExecuteFailureEvent
# The state that a task gets from its event, by the event's type; "released" for all others, which
# have no start and no stop.
STATES: Final[dict[Any, str]] = {ExecuteSuccessEvent: "memory", FAILED: "error"}
# By type: a function that returns what a node holds.
NODE_PARTS: Final[dict[Any, Callable[[Any], Any]]] = {
    Task: attrgetter("func", "args", "kwargs"),
    DataNode: lambda node: (node.value,),
    GraphNode: lambda node: (),
}


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


def ended_here(worker: Worker, which: Callable[[Mapping[str, Any] | None], bool]) -> set[Hashable]:
    """Return the tasks that ended well on a worker, among those with such annotations."""
    return {
        key
        for key, ts in worker.state.tasks.items()
        if ts.state == "memory" and which(ts.annotations)
    }


# -- dask's thread pools: their queues, and tasks that go to another pool


def rescheduled() -> dict[str, Any]:
    """Return the outcome of a task that did not run, and that the scheduler shall send again."""
    return {"op": "task-erred", "thread": None, "actual_exception": Reschedule()}


def error_in(outcome: Any) -> BaseException | None:
    """Return the exception in the outcome of a task; None if it has none."""
    found = outcome.get("actual_exception") if outcome.__class__ is dict else None
    return found if isinstance(found, BaseException) else None


def has_seceded() -> bool:
    """Return whether this thread of a pool has seceded from it."""
    return not getattr(thread_state, "proceed", True)


def rejoin_if_seceded() -> None:
    """Let this thread back into its pool if it seceded: its task begins again."""
    if has_seceded():
        rejoin()


class TaskThreadPoolExecutor(ThreadPoolExecutor):  # type: ignore[misc]
    """dask's thread pool, with a queue that its subclass gives it, of objects to ``run``."""

    # dask recognizes a thread pool by the name of its class, which must contain
    # "ThreadPoolExecutor". The base class is distributed's, so that `secede` and `rejoin` work.

    def __init__(self, name: str, threads: int, work: Any) -> None:
        super().__init__(threads, thread_name_prefix=name)
        self._work_queue = work

    def submit_task(
        self, claim: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> asyncio.Future[Any]:
        """Run a task of dask's as soon as its claim is granted."""
        raise NotImplementedError

    def give(self, queue: Callable[[Any], object], work: Any) -> bool:
        """Queue work by a function; return False if the pool is shut down."""
        with self._shutdown_lock:
            if self._shutdown:
                return False
            queue(work)
            if len(self._threads) < self._max_workers:
                self._adjust_thread_count()
            return True

    def grow_to(self, threads: int) -> None:
        """Let the pool have so many threads, and start one if it has fewer."""
        self._max_workers: int = max(self._max_workers, threads)
        if len(self._threads) < threads:
            self._adjust_thread_count()

    def seceding(self) -> None:
        """Called on a thread that secedes, before another takes its place."""

    def started(self, thread: threading.Thread) -> None:
        """Called for each new thread."""

    def _adjust_thread_count(self) -> None:
        if has_seceded():  # dask calls this on the thread that secedes
            self.seceding()
        before = set(self._threads)
        super()._adjust_thread_count()
        for thread in self._threads - before:
            self.started(thread)

    def let_back_in(self) -> bool:
        """Let the threads that wait to rejoin continue; return whether there were any."""
        with self._rejoin_lock:
            waiting: list[tuple[threading.Thread, threading.Event]] = self._rejoin_list[:]
            self._rejoin_list.clear()
            for thread, event in waiting:
                self._threads.add(thread)
                event.set()
        return bool(waiting)


# The executor and the claim of the next task of this context. A reader takes the entry out of
# the list, since the task itself runs in a copy of this context.
_next_task: ContextVar[list[tuple[TaskThreadPoolExecutor, Any]] | None] = ContextVar(
    "next_task", default=None
)


def send_next_task_to(executor: TaskThreadPoolExecutor, claim: Any) -> None:
    """Send the next task that this context submits to another executor.

    This works for executors for which :func:`sending_tasks_on` is open.
    """
    _next_task.set([(executor, claim)])


_opened: WeakKeyDictionary[Executor, int] = WeakKeyDictionary()
_opening = threading.Lock()


@contextmanager
def sending_tasks_on(executor: Executor) -> Iterator[None]:
    """While it is open, an executor passes on the tasks that are meant for another executor.

    Several workers may share the executor. The last one to leave restores it.
    """
    with _opening:
        if executor not in _opened:
            setattr(executor, "submit", partial(_submit, executor.submit))  # noqa: B010
        _opened[executor] = _opened.get(executor, 0) + 1
    try:
        yield
    finally:
        with _opening:
            _opened[executor] -= 1
            if not _opened[executor]:
                del _opened[executor], executor.submit


def _submit(
    here: Callable[..., Future[Any]], fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Future[Any] | asyncio.Future[Any]:
    found = _next_task.get()
    if not found:
        return here(fn, *args, **kwargs)
    executor, claim = found.pop()
    return executor.submit_task(claim, fn, *args, **kwargs)


# -- the number of a pool's threads


def set_most_threads(executor: ThreadPoolExecutor, count: int) -> None:
    """Let a pool have so many threads, and start those that waiting calls need."""
    executor._max_workers = count
    for _ in range(min(executor._work_queue.qsize(), count)):
        executor._adjust_thread_count()  # does nothing where there are enough


def end_idle_threads(executor: ThreadPoolExecutor, least: int) -> None:
    """End the threads of a pool beyond a number, each when it is idle."""
    for _ in range(len(executor._threads) - least):
        executor.submit(secede, adjust=False)
