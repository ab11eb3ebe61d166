"""A worker's tasks: what executes them, and what is called in their place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final

from dask._task_spec import DataNode, GraphNode, Task
from distributed import Worker
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
    end: Callable[[Any, Any, Any], Any],
) -> Iterator[None]:
    """While it is open, a worker calls the stand-in that ``begin`` makes in the place of a task.

    ``begin`` gets the worker's state of the task and must not raise; ``end`` gets it too, with the
    stand-in and dask's event of the outcome, None without one, and returns the event.
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
                event = end(ts, stand_in, event)
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


def add_to_times(ts: Any, event: Any, name: str, value: str) -> Any:
    """Return the event of a task that failed, whose times now have a further entry.

    The scheduler gets no metadata of such a task.
    """
    if event.start is None or event.stop is None:
        return event
    times = {"action": "compute", "start": event.start, "stop": event.stop, name: value}
    ts.startstops.append(times)
    return replace(event, start=None, stop=None)


def makes_an_actor(worker: Worker, key: Hashable) -> bool:
    """Return whether a task's result is an actor."""
    return key in worker.state.actors


def ended_here(worker: Worker, which: Callable[[Mapping[str, Any] | None], bool]) -> set[Hashable]:
    """Return the tasks that ended well on a worker, among those with such annotations."""
    return {
        key
        for key, ts in worker.state.tasks.items()
        if ts.state == "memory" and which(ts.annotations)
    }
