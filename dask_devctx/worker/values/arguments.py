"""The arguments that a task is given by value: dask keeps them in the nodes of its graph."""

from __future__ import annotations

from typing import Any, Final

from dask_devctx.dask_internals.tasks import Node, node_parts
from dask_devctx.transfer import walk
from dask_devctx.transfer.rebuild import register_copy

# The number of objects of a task to look at here; the walk takes a sample of more.
_AT_MOST: Final = 1000


def may_hold_arrays(task: Any) -> bool:
    """Return whether a task may hold arrays itself; fast if it holds containers of plain values."""
    find = walk.find
    todo = [task]
    for each in todo:
        found = find(type(each))
        if found is walk.LEAF:
            return True
        if found is None or walk.is_plain(each):
            continue
        try:
            parts = found(each)
        except Exception:  # the walk meets it again, and knows what to do
            return True
        if len(todo) + len(parts) > _AT_MOST:  # large values, and values that hold themselves
            return True
        todo += [part for part in parts if find(type(part)) is not None]
    return False


def register() -> None:
    """Register dask's nodes, so that arrays in them are found."""
    register_copy(Node, node_parts)
