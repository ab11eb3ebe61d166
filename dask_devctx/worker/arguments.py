"""Where dask keeps what a task is given by value: in the nodes of its graph."""

from __future__ import annotations

from typing import Any, Final

from dask._task_spec import DataNode, GraphNode, Task

from dask_devctx.transfer import walk
from dask_devctx.transfer.objects import ObjectLike

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
    find = walk.find
    nodes = [task]
    for node in nodes:
        if isinstance(node, Task):
            parts = (*node.args, *node.kwargs.values()) if node.kwargs else node.args
            if find(type(node.func)) is not None:
                return True
        elif isinstance(node, DataNode):
            parts = (node.value,)
        else:
            continue
        for kind in set(map(type, parts)):
            if find(kind) is not None:
                if not issubclass(kind, GraphNode):
                    return True
                nodes += [part for part in parts if type(part) is kind]
    return False


def register() -> None:
    """Have arrays found in dask's nodes."""
    walk.register_protocol(GraphNode, NodeLike)
