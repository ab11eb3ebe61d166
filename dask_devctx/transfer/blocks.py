"""The device memory under a value: the allocations that its arrays are views of.

Two arrays may be views of one allocation. It is freed with the last of them, so it counts once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dask_devctx.cuda.device import Device
from dask_devctx.transfer import walk
from dask_devctx.transfer.location import nbytes_by_device
from dask_devctx.transfer.registry import Registry


class Memory(NamedTuple):
    """One allocation; its address ``base`` is 0 where nothing is known to share it."""

    device: Device
    base: int
    nbytes: int


# Functions that return the ``Memory`` under an array, or None for an array without any.
memory_of = Registry("memory_of", lambda value: None)


def memories(value: object, at_most: int | None = None) -> set[Memory] | None:
    """Return the allocations under a value that holds arrays; None if some are not known.

    They count as not known if the value has more than ``at_most`` objects that may hold arrays.
    """
    found: set[Memory] = set()
    is_leaf = walk.find(type(value)) is walk.LEAF
    groups: Any = [(None, None, [value])] if is_leaf else walk.walk(value, at_most)
    try:
        for leaf in (leaf for _, protocol, leaves in groups if protocol is None for leaf in leaves):
            function = memory_of.find(type(leaf))
            if function is None and nbytes_by_device(leaf):
                return None
            if function is not None and (memory := function(leaf)) is not None:
                found.add(memory)
    except walk.TooManyError:
        return None
    return found
