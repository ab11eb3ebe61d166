"""Where dask keeps what a task is given by value: in the nodes of its graph."""

from __future__ import annotations

from typing import Any, Final

from dask._task_spec import GraphNode, Task

from dask_devctx.transfer import walk
from dask_devctx.transfer.protocols import ObjectLike

# The attributes of dask's nodes that hold values, or further nodes. All else only names things.
_HOLDERS: Final = ("args", "func", "kwargs", "value")


class NodeLike(ObjectLike):
    """dask's nodes: a task that is not done yet, its arguments, and lists of those."""

    def __init__(self, kind: type) -> None:
        super().__init__(kind)
        self.by_reduce = False
        self._every_slot = self._slots
        self._slots = [slot for slot in self._slots if slot.__name__ in _HOLDERS]

    def begin(self, value: Any, parts: list[Any]) -> Any:
        made = super().begin(value, parts)
        for slot in self._every_slot:
            try:
                slot.__set__(made, slot.__get__(value))
            except AttributeError:  # not set
                continue
        return made


def may_hold_arrays(task: Any) -> bool:
    """Return whether a task may keep arrays itself; quick where it is given plain values only."""
    if isinstance(task, Task):
        find = walk.find
        for part in task.args:
            if find(type(part)) is not None:
                return True
        return find(type(task.func)) is not None or any(
            find(type(part)) is not None for part in task.kwargs.values()
        )
    return isinstance(task, GraphNode)


def register() -> None:
    """Have arrays found in dask's nodes."""
    walk.register_protocol(GraphNode, NodeLike)
