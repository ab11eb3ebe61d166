"""A worker's connections, its requests for data, serializers, and tasks that are unpickled late."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, ClassVar, Final
from weakref import WeakKeyDictionary

from distributed import Status, Worker
from distributed import worker as worker_module
from distributed.core import Server, error_message
from distributed.protocol import core, pickle
from distributed.worker import get_data_from_worker
from distributed.worker_state_machine import (
    GatherDepFailureEvent,
    GatherDepSuccessEvent,
    WorkerState,
)

from dask_devctx.dask_internals.worker import ignored, patched, replaced

# While a worker gathers the inputs of tasks: the errors of the values that cannot be read.
UNREAD: Final[ContextVar[dict[Hashable, Exception] | None]] = ContextVar(
    "devctx-unread", default=None
)
_asking: WeakKeyDictionary[Any, Callable[..., Awaitable[Any]]] = WeakKeyDictionary()


def asking_by(worker: Worker, ask: Callable[..., Awaitable[Any]]) -> AbstractContextManager[None]:
    """While it is open, a function asks other workers for a worker's values in dask's place."""
    part = worker_module, "get_data_from_worker", _ask, get_data_from_worker
    return patched(_asking, worker.rpc, ask, part)


def _ask(rpc: Any, *args: Any, **kwargs: Any) -> Any:
    return _asking.get(rpc, get_data_from_worker)(rpc, *args, **kwargs)


@contextmanager
def answering(
    server: Server, handlers: Mapping[str, Callable[..., Any]], *, to_the_end: bool = False
) -> Iterator[None]:
    """While it is open, a worker or a scheduler answers messages that dask does not know.

    One that closes still gives these answers with ``to_the_end``. Otherwise, it answers None
    then: others do not know yet that it leaves, and dask would log each question as a mistake.
    """
    server.handlers.update(handlers)
    try:
        yield
    finally:
        leaving = server.status is Status.closing
        for op, handler in handlers.items():
            if server.handlers.get(op) != handler or (leaving and to_the_end):
                continue
            if leaving:
                server.handlers[op] = ignored
            else:
                del server.handlers[op]


async def data_of(
    worker: Worker, address: str, keys: Sequence[Hashable], who: str | None
) -> Mapping[Hashable, Any]:
    """Return values of another worker, without those that it cannot send or does not have."""
    answer = await _ask(worker.rpc, keys=keys, worker=address, who=who)
    found: Mapping[Hashable, Any] = answer.get("data", {})
    return found


def tasks_fail_with_unread_inputs(worker: Worker) -> AbstractContextManager[None]:
    """While it is open, tasks fail with the errors that :data:`UNREAD` has of their inputs.

    With dask alone, such a task waits without end (distributed's issue 6705).
    """
    _register()

    def wrap(gather_dep: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def gather(address: str, *args: Any, **kwargs: Any) -> Any:
            unread: dict[Hashable, Exception] = {}
            token = UNREAD.set(unread)
            try:
                event = await gather_dep(address, *args, **kwargs)
            finally:
                UNREAD.reset(token)
            if unread and isinstance(event, GatherDepSuccessEvent):
                return _PartlyRead.of(event, unread)
            return event

        return gather

    return replaced(vars(worker), "gather_dep", wrap(worker.gather_dep))


# The fields of an error in dask's events.
_MESSAGE: Final = itemgetter("exception", "traceback", "exception_text", "traceback_text")


@dataclass
class _PartlyRead(GatherDepFailureEvent):  # type: ignore[misc]
    """The answer of another worker, some of whose values could not be read."""

    __slots__: ClassVar = ("data", "errors")

    data: dict[Hashable, Any]
    errors: dict[Hashable, tuple[Any, ...]]

    @classmethod
    def of(cls, event: Any, unread: Mapping[Hashable, Exception]) -> _PartlyRead:
        errors = {key: _MESSAGE(error_message(error)) for key, error in unread.items()}
        first = next(iter(errors.values()))
        return cls(event.stimulus_id, event.worker, event.total_nbytes, *first, event.data, errors)

    def to_loggable(self, *, handled: float) -> Any:
        found = copy(self)
        found.handled, found.data = handled, dict.fromkeys(self.data)
        return found


@functools.cache
def _register() -> None:
    """Let the states of workers handle the event; this lasts as long as the process."""
    vars(WorkerState)["_handle_event"].register(_PartlyRead, _handle_partly_read)
    WorkerState._TRANSITIONS_TABLE.setdefault(("waiting", "error"), _waiting_error)


def _handle_partly_read(state: WorkerState, event: _PartlyRead) -> Any:
    data = {**event.data, **event.errors}
    read = GatherDepSuccessEvent(event.stimulus_id, event.worker, event.total_nbytes, data)
    recommendations, instructions = state._handle_event(read)
    for key, error in event.errors.items():
        ts = state.tasks[key]
        recommendations[ts] = ("error", *error, ts.run_id)
        for waiter in ts.waiters:
            if waiter.state == "waiting":
                recommendations[waiter] = ("error", *error, waiter.run_id)
    return recommendations, instructions


def _waiting_error(state: WorkerState, ts: Any, *error: Any, stimulus_id: str) -> Any:
    # Through "released", dask would also release the input, which it keeps as long as the task.
    state.waiting.discard(ts)
    ts.waiting_for_data.clear()
    for dependency in ts.dependencies:
        dependency.waiters.discard(ts)
    return state._transition_generic_error(ts, *error, stimulus_id=stimulus_id)


# -- serializers, and tasks that are unpickled on their own thread


# The module of a task's class is the first name in its pickle.
_OF_A_TASK: Final = b"dask._task_spec"
_users: dict[object, Callable[[BaseException], bool]] = {}


class LateTask:
    """A pickled task in the place of the task: each call unpickles it first."""

    __slots__ = ("buffers", "pickled")

    is_coro = False
    func = None

    def __init__(self, pickled: Any, buffers: Any) -> None:
        self.pickled = bytes(pickled)
        self.buffers = [bytes(buffer) for buffer in buffers]

    def __call__(self, data: Any = ()) -> Any:
        task = _unpickled(self.pickled, self.buffers)
        return asyncio.run(task(data)) if task.is_coro else task(data)

    def __reduce__(self) -> Any:
        return _unpickled, (self.pickled, self.buffers)


def _unpickled(pickled: bytes, buffers: list[bytes]) -> Any:
    return pickle.loads(pickled, buffers=buffers)


def unpickled_later(
    is_out_of_memory: Callable[[BaseException], bool],
) -> AbstractContextManager[None]:
    """While it is open, a task whose arguments find no memory arrives as a :class:`LateTask`."""
    ours = SimpleNamespace(dumps=pickle.dumps, loads=_loads)
    return patched(_users, object(), is_out_of_memory, (core, "pickle", ours, pickle))


def _loads(pickled: Any, *, buffers: Any = ()) -> Any:
    try:
        return pickle.loads(pickled, buffers=buffers)
    except Exception as error:
        if _OF_A_TASK in bytes(pickled[:100]) and any(ours(error) for ours in [*_users.values()]):
            return LateTask(pickled, buffers)
        raise
