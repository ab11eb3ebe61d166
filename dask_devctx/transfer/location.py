"""Where a value lives, and in which allocations.

Two arrays may be views of one allocation. It is freed with the last of them, so it counts once.
"""

from __future__ import annotations

import gc
import logging
from typing import Any, NamedTuple

from dask_devctx.cuda.device import Device
from dask_devctx.transfer import walk
from dask_devctx.transfer.walk import Registry

logger = logging.getLogger(__name__)

_CUT_SHORT = (
    "a %s has more than the %d objects that a search for arrays looks at. None was found, so the "
    "value counts as host data and does not move. If it holds arrays, keep them nearer to its top, "
    "or in an object of a type that you register with device_of.register and to_device.register"
)

_told: set[type] = set()


class DeviceOf(Registry):
    """Return the device that a value lives on, or None if it is on no device.

    Parameters
    ----------
    value
        Anything. The search includes the contents of containers and of objects of Python
        classes.

    Returns
    -------
    Device or None
        If the value is spread over several devices, the device with most of its bytes; if two
        have the same number of bytes, the one with the lower ordinal.

    Notes
    -----
    ``device_of.register(T)`` makes a type known. The registered function takes the value, and
    returns anything that :class:`~dask_devctx.Device` accepts, or None. The whole value then
    counts as living on that device. Its size is its attribute ``nbytes``; without one, the
    size of the arrays in it there. This imports no library and creates no context.

    Examples
    --------
    >>> from dask_devctx.simulated_array import SimulatedArray
    >>> with Device(1):
    ...     x = SimulatedArray((2, 2))
    >>> device_of({"x": x, "y": 1}) is Device(1)
    True
    >>> device_of("host") is None
    True
    """

    def __init__(self) -> None:
        super().__init__("device_of", lambda value: None)

    def __call__(self, value: object) -> Device | None:
        found = nbytes_by_device(value)
        return max(found, key=lambda device: (found[device], -device.device_id), default=None)


class BytesByDevice(Registry):
    """Return the number of bytes that a value has on each device; empty for host data.

    An object that is in the value twice counts once. If the search finds an array, all of the value
    is counted. If it finds none in a thousand objects, the value counts as host data; the log says
    so once for its type.
    """

    def __init__(self) -> None:
        super().__init__("nbytes_by_device", lambda value: {})

    def __call__(self, value: object) -> dict[Device, int]:
        total, complete = self.found_in(value)
        if not complete and not total and type(value) not in _told:
            _told.add(type(value))
            logger.warning(_CUT_SHORT, type(value).__qualname__, walk.AT_MOST)
        return total

    def found_in(
        self, value: object, at_most: int | None = walk.AT_MOST
    ) -> tuple[dict[Device, int], bool]:
        """Return the same as a call, and whether the search of so many objects was enough."""
        total: dict[Device, int] = {}
        try:
            for leaf in walk.leaves(value, at_most):
                count = self.find(type(leaf))
                for device, nbytes in count(leaf).items() if count else ():
                    total[device] = total.get(device, 0) + nbytes
        except walk.TooManyError:
            return self.found_in(value, None) if total else (total, False)
        return total, True

    def _look_up(self, kind: type) -> Any:
        # A function that is registered with ``device_of`` is enough.
        count = super()._look_up(kind)
        if count is None and device_of.find(kind) is not None:
            return _on_one_device
        return count


def _on_one_device(value: Any) -> dict[Device, int]:
    which = device_of.dispatch(type(value))(value)
    if which is None:
        return {}
    device, nbytes = Device(which), getattr(value, "nbytes", None)
    if nbytes is None:
        nbytes = nbytes_by_device.found_in(gc.get_referents(value))[0].get(device, 0)
    return {device: int(nbytes)}


device_of = DeviceOf()
nbytes_by_device = BytesByDevice()


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
    try:
        for leaf in walk.leaves(value, at_most):
            function = memory_of.find(type(leaf))
            if function is None and nbytes_by_device(leaf):
                return None
            if function is not None and (memory := function(leaf)) is not None:
                found.add(memory)
    except walk.TooManyError:
        return None
    return found
