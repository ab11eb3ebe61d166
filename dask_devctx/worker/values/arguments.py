"""The arguments that a task is given by value: dask keeps them in the nodes of its graph."""

from __future__ import annotations

from typing import Any, Final

from dask_devctx.dask_internals.tasks import NODE_PARTS, Node, node_parts
from dask_devctx.transfer import walk
from dask_devctx.transfer.parts import ObjectLike

# The number of objects of a task to look at here; the walk takes a sample of more.
_AT_MOST: Final = 1000


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
    """Return whether a task may hold arrays itself; fast if it holds containers of plain values."""
    find = walk.find
    todo = [task]
    for each in todo:
        kind = type(each)
        if kind is tuple or kind is list:
            parts = each
        elif kind is dict:
            parts = (*each, *each.values())
        elif issubclass(kind, Node):
            parts = node_parts(each)
        elif (protocol := find(kind)) is walk.LEAF:
            return True
        elif protocol is None or (protocol.holds is not None and not protocol.holds(each)):
            continue
        else:
            try:
                parts = protocol.parts(each)
            except Exception:  # the walk meets it again, and knows what to do
                return True
        if len(todo) + len(parts) > _AT_MOST:  # large values, and values that hold themselves
            return True
        for part in parts:
            if find(type(part)) is not None:
                todo.append(part)
    return False


def register() -> None:
    """Register dask's nodes, so that arrays in them are found."""
    walk.register_protocol(Node, NodeLike)
