"""A worker's tasks: the call that replaces a task, and the executor that runs it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Final

from dask._task_spec import DataNode, GraphNode, Task
from distributed import Worker

from dask_devctx.dask_internals.threads import Submits, send_next_task_to

# A node of dask's graph: a task, a value, or a container of further nodes.
Node: Final[Any] = GraphNode
# The attributes of a node that hold values or further nodes. All others hold only names.
NODE_PARTS: Final = ("args", "func", "kwargs", "value")


def node_parts(node: Any) -> tuple[Any, ...]:
    """Return the function, values and nodes that a node holds; nothing for any other object."""
    if isinstance(node, Task):
        return (node.func, *node.args, *node.kwargs.values())
    return (node.value,) if isinstance(node, DataNode) else ()


class TaskStandIn:
    """A stand-in that a worker calls in the place of a task.

    dask reads ``is_coro`` right before it submits the task, in the same context. The executor is
    set at that moment. The annotation ``executor`` is not used: it belongs to the user, and
    everybody sees it.

    In another process, such as that of a process pool, it is the task itself.
    """

    __slots__ = ("executor", "priority", "task")

    def __init__(
        self,
        task: Callable[[Any], Any],
        executor: Submits | None = None,
        priority: tuple[Any, ...] | None = None,
    ) -> None:
        self.task = task
        self.executor = executor
        self.priority = priority

    @property
    def is_coro(self) -> bool:
        """Whether the task calls a coroutine function, which dask runs on its event loop."""
        is_coro = bool(self.task.is_coro)  # type: ignore[attr-defined]
        if self.executor is not None and not is_coro:
            send_next_task_to(self.executor, self.priority)
        return is_coro

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.task, name)

    def __repr__(self) -> str:
        return repr(self.task)

    def __reduce__(self) -> Any:
        return _itself, (self.task,)


def _itself(task: Any) -> Any:
    return task


def replace(ts: Any, run_spec: Any) -> None:
    """Let a worker call ``run_spec`` in the place of a task."""
    ts.run_spec = run_spec


def restore(ts: Any) -> None:
    """Let a worker call a task itself again, if a stand-in has its place, or several."""
    while isinstance(ts.run_spec, TaskStandIn):
        ts.run_spec = ts.run_spec.task


def about_to_begin(worker: Worker) -> Iterator[Any]:
    """Yield the states of the tasks that a worker executes next, in this turn of its event loop."""
    for ts in worker.state.tasks.values():
        if ts.state == "executing" and ts.key not in worker.active_keys:
            yield ts


def add_metadata(ts: Any, name: str, value: str) -> None:
    """Add an entry to the metadata of a task, which its worker sends to the scheduler."""
    ts.metadata[name] = value


def is_cancelled(worker: Worker, key: Hashable) -> bool:
    """Return whether a task was cancelled; on any thread.

    dask counts a task as running as soon as its device's threads have it. It may wait there for a
    long time, and may not be needed any more when it begins.
    """
    ts = worker.state.tasks.get(key)
    return ts is not None and ts.state == "cancelled"


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
