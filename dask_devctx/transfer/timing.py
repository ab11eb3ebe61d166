"""The time that devices take for copies, measured on the devices; nobody waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevctxError
from dask_devctx.transfer.events import Event

# The most copies whose durations are waited for.
_WAITING_AT_MOST: Final = 1024
# Smaller copies are not timed: the two events would cost as much as the copy.
LEAST_NBYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TimedCopy:
    """A copy that a device was ordered to make.

    Parameters
    ----------
    source
        The device that it comes from.
    nbytes
        Its bytes.
    begin, end
        The events around it.
    """

    source: Device
    nbytes: int
    begin: Event
    end: Event

    def seconds(self) -> float | None:
        """Return how long the copy took; None if it is not complete yet.

        Raises
        ------
        DriverError
            The copy failed, or its stream was captured into a graph.
        """
        return self.end.seconds_since(self.begin) if self.end.done() else None


class _Thread(threading.local):
    copies: list[TimedCopy] | None = None


_thread = _Thread()


@contextmanager
def timing() -> Iterator[list[TimedCopy]]:
    """While it is open, the large copies that this thread orders are timed; yield them."""
    before, _thread.copies = _thread.copies, []
    try:
        yield _thread.copies
    finally:
        _thread.copies = before


@contextmanager
def timed(device: Device, source: Device, nbytes: int, stream: int) -> Iterator[None]:
    """Time the copy that is ordered inside, if this thread's copies are timed.

    Parameters
    ----------
    device, source
        The devices; the context of ``device`` is current.
    nbytes
        The bytes of the copy.
    stream
        The stream of ``device`` that makes the copy.
    """
    copies = _thread.copies
    if copies is None or nbytes < LEAST_NBYTES:
        yield
        return
    begin = Event(device, timed=True).record(stream)
    yield
    copies.append(TimedCopy(source, nbytes, begin, Event(device, timed=True).record(stream)))


class OrderedCopy(NamedTuple):
    """A value's copy from one device to another, whose large parts are timed.

    Parameters
    ----------
    source, device
        The devices.
    nbytes
        The bytes.
    begun
        When the copy was ordered, as :func:`time.time` tells it.
    parts
        The parts that are timed.
    """

    source: Device
    device: Device
    nbytes: int
    begun: float
    parts: list[TimedCopy]


class TimedCopies:
    """Copies whose durations are not known yet; threads may add some."""

    def __init__(self) -> None:
        self._copies: deque[OrderedCopy] = deque()

    def add(self, copy: OrderedCopy) -> None:
        """Add a copy."""
        self._copies.append(copy)

    def complete(self, at_most: int | None = None) -> Iterator[tuple[OrderedCopy, int, float]]:
        """Yield the copies that are complete, with the bytes and the seconds of the timed parts.

        Parameters
        ----------
        at_most
            How many copies to look at, the first ones first; all by default.

        Notes
        -----
        If there are too many copies, the first ones count as complete, without any seconds. So do
        the copies of a device that failed.
        """
        for _ in range(len(self._copies) if at_most is None else at_most):
            try:
                copy = self._copies.popleft()
            except IndexError:  # there are no more
                return
            try:
                seconds = [part.seconds() for part in copy.parts]
            except DevctxError:  # the device failed, or a graph was captured
                seconds = []
            known = [one for one in seconds if one is not None]
            if len(known) == len(seconds):
                yield copy, sum(part.nbytes for part in copy.parts), sum(known)
            elif len(self._copies) < _WAITING_AT_MOST:
                self._copies.append(copy)
            else:
                yield copy, 0, 0.0
