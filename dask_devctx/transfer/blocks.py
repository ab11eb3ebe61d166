"""The device memory under a value: the allocations that its arrays are views of.

Two arrays may be views of one allocation. It is freed with the last of them, so it counts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from dask_devctx.cuda.device import Device
from dask_devctx.transfer import walk
from dask_devctx.transfer.location import nbytes_by_device
from dask_devctx.transfer.registry import Registry


class Memory(NamedTuple):
    """One allocation.

    Parameters
    ----------
    device
        Its device.
    base
        Its address; 0 where it is not known. Then nothing is known to share it.
    nbytes
        Its size.
    """

    device: Device
    base: int
    nbytes: int


def _unknown(value: object) -> None:
    return None


# Functions that return the ``Memory`` under an array, or None for an array without any.
memory_of = Registry("memory_of", _unknown)


def memories(value: object, at_most: int | None = None) -> set[Memory] | None:
    """Return the allocations under a value; None if some are not known.

    Parameters
    ----------
    value
        The value, which is known to hold arrays on devices.
    at_most
        How many objects that may hold arrays to look at: the allocations of a value with more count
        as not known. None for all.
    """
    found: set[Memory] = set()
    try:
        for leaf in _leaves(value, at_most):
            function = memory_of.find(type(leaf))
            if function is None:
                if nbytes_by_device(leaf):
                    return None
                continue
            memory = function(leaf)
            if memory is not None:
                found.add(memory)
    except walk.TooManyError:
        return None
    return found


def _leaves(value: object, at_most: int | None) -> Iterator[Any]:
    if walk.find(type(value)) is walk.LEAF:
        yield value
        return
    for _, protocol, leaves in walk.walk(value, at_most):
        if protocol is None:
            yield from leaves
