"""The device memory under a value: the allocations that its arrays are views of.

Two arrays may be views of one allocation. It is freed with the last of them, so it counts once.
"""

from __future__ import annotations

from typing import NamedTuple

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
    leaves = [value]
    if walk.find(type(value)) is not walk.LEAF:
        try:
            walked = list(walk.walk(value, at_most))
        except walk.TooManyError:
            return None
        leaves = [leaf for _, protocol, some in walked if protocol is None for leaf in some]
    found: set[Memory] = set()
    for leaf in leaves:
        function = memory_of.find(type(leaf))
        if function is None and nbytes_by_device(leaf):
            return None
        if function is not None and (memory := function(leaf)) is not None:
            found.add(memory)
    return found
