"""Streams for copies alone, each used by one transfer at a time."""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import suppress

from dask_devctx.cuda.device import Device
from dask_devctx.driver.backends import Backend
from dask_devctx.errors import DevctxError
from dask_devctx.transfer.events import Event, Stamp
from dask_devctx.transfer.streams import current_streams


class Lane:
    """A stream of one device, of which nobody else waits for the work.

    Parameters
    ----------
    device
        Its device, which is current on the thread that makes it.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._calls = device._backend.calls
        self._context = self._calls.context_id(device.primary_context.handle)
        self._stream = self._calls.work.stream_create()
        self._reached = Event(device)

    @property
    def usable(self) -> bool:
        """Whether its context is still the device's: a primary context can die and come again."""
        return self._calls.context_id(self.device.primary_context.handle) == self._context

    def after(self, stamp: Stamp | None) -> None:
        """Let what is copied from now on wait for some work."""
        if stamp is not None:
            stamp.hold_back_stream(self._stream)

    def after_current_streams(self) -> None:
        """Let what is copied from now on wait for what this thread's streams were given."""
        for stream in current_streams(self.device):
            Event(self.device).record(stream).holds_back(self._stream)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Enqueue a copy between two addresses."""
        self._calls.work.copy(target, source, nbytes, self._stream)

    def mark(self) -> None:
        """Note that all copies were given, so that :meth:`done` can tell."""
        self._reached.record(self._stream)

    def done(self) -> bool:
        """Return whether what was given until the mark is done; does not wait."""
        return self._reached.done()

    def done_soon(self, within_s: float) -> bool:
        """Return whether it is done, after a moment in which it may be."""
        until = time.perf_counter() + within_s
        while not (done := self.done()) and time.perf_counter() < until:
            pass
        return done

    def wait(self) -> None:
        """Wait until all that it was given is done."""
        self._calls.work.stream_synchronize(self._stream)


_free: weakref.WeakKeyDictionary[Backend, dict[Device, list[Lane]]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def take(device: Device) -> Lane:
    """Return a lane of a device, which is current; :func:`give` it back when its work is done."""
    with _lock:
        lanes = _free.setdefault(device._backend, {}).setdefault(device, [])
        lane = lanes.pop() if lanes else None
    return lane if lane is not None and lane.usable else Lane(device)


def give(lane: Lane) -> None:
    """Let others use a lane of which all work is done."""
    with _lock:
        _free[lane.device._backend][lane.device].append(lane)


def drop(lane: Lane) -> None:
    """Wait for a lane whose work is not wanted: it may write to memory that is let go now."""
    with suppress(DevctxError), lane.device:  # one that failed writes nothing any more
        lane.wait()
        give(lane)
