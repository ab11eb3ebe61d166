"""The arguments that a task is given by value: dask keeps them in the nodes of its graph."""

from __future__ import annotations

from typing import Any

from dask_devctx.dask_internals.tasks import NODE_PARTS, Node, node_parts
from dask_devctx.transfer import walk
from dask_devctx.transfer.objects import ObjectLike


class NodeLike(ObjectLike):
    """dask's nodes: a task that is not done yet, its arguments, and lists of them."""

    def __init__(self, kind: type) -> None:
        super().__init__(kind)
        self.by_reduce = False
        self._every_slot = self._slots
        self._slots = [slot for slot in self._slots if slot.__name__ in NODE_PARTS]

    def begin(self, value: Any, parts: list[Any]) -> Any:
        made = super().begin(value, parts)
        for slot in self._every_slot:
            try:
                slot.__set__(made, slot.__get__(value))
            except AttributeError:  # not set
                continue
        return made


def may_hold_arrays(task: Any) -> bool:
    """Return whether a task may hold arrays itself; fast if all its arguments are plain values."""
    find = walk.find
    nodes = [task]
    for node in nodes:
        parts = node_parts(node)
        for kind in set(map(type, parts)):
            if find(kind) is not None:
                if not issubclass(kind, Node):
                    return True
                nodes += [part for part in parts if type(part) is kind]
    return False


def register() -> None:
    """Register dask's nodes, so that arrays in them are found."""
    walk.register_protocol(Node, NodeLike)
