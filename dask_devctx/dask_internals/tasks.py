"""A worker's tasks: another call in a task's place, and the executor that it goes to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final

from dask._task_spec import DataNode, GraphNode, Task
from distributed import Worker

from dask_devctx.dask_internals.threads import TaskThreadPoolExecutor, send_next_task_to

# A node of dask's graph: a task, a value, or a container of further nodes.
Node: Final[Any] = GraphNode
# Those attributes of a node that hold values or further nodes. All others only name things.
NODE_PARTS: Final = ("args", "func", "kwargs", "value")


def node_parts(node: Any) -> tuple[Any, ...]:
    """Return the function, the values and the nodes that a node holds; none of any other object."""
    if isinstance(node, Task):
        return (node.func, *node.args, *node.kwargs.values())
    return (node.value,) if isinstance(node, DataNode) else ()


class TaskStandIn:
    """A task's place in a worker, taken by something else that is called as the task was.

    Parameters
    ----------
    task
        The task, dask's ``GraphNode``. All that this class lacks is asked of it.
    executor
        The threads that the task goes to; None leaves it on those that dask chose.
    priority
        The task's place among those that wait for these threads; the least goes first.

    Notes
    -----
    dask reads ``is_coro`` right before it submits the task, in the same context. The threads are
    named at that moment, and not in the annotation ``executor``: that one is the user's, and
    everybody sees it.
    """

    __slots__ = ("executor", "priority", "task")

    def __init__(
        self,
        task: Callable[[Any], Any],
        executor: TaskThreadPoolExecutor | None = None,
        priority: tuple[int, ...] | None = None,
    ) -> None:
        self.task = task
        self.executor = executor
        self.priority = priority

    @property
    def is_coro(self) -> bool:
        """Whether the task is a coroutine function's, which dask runs on its event loop."""
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


def replace(ts: Any, run_spec: Any) -> None:
    """Let a worker call something else in the place of a task."""
    ts.run_spec = run_spec


def restore(ts: Any) -> None:
    """Let a worker call a task itself again, where something else has its place."""
    if isinstance(ts.run_spec, TaskStandIn):
        ts.run_spec = ts.run_spec.task


def about_to_begin(worker: Worker) -> Iterator[Any]:
    """Yield the states of the tasks that a worker executes next, in this turn of its event loop."""
    for ts in worker.state.tasks.values():
        if ts.state == "executing" and ts.key not in worker.active_keys:
            yield ts


def add_metadata(ts: Any, name: str, value: str) -> None:
    """Add to what a worker tells the scheduler about a task."""
    ts.metadata[name] = value


def makes_an_actor(worker: Worker, key: Hashable) -> bool:
    """Return whether a task's result is an actor."""
    return key in worker.state.actors
