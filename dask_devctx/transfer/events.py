"""Order and lifetime of what devices do: points in their work, and what must live until then.

The CPU never waits here. A :class:`Stamp` says "all that these devices had been given by now";
streams wait for it, and memory that is still being read is held until it is done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Self

from dask_devctx.cuda.device import Device
from dask_devctx.driver.work import RelaxedCapture
from dask_devctx.errors import DevctxError, DriverError
from dask_devctx.transfer.location import nbytes_by_device
from dask_devctx.transfer.streams import current_streams


class Event:
    """A point in the work of one device."""

    __slots__ = ("_calls", "_handle")

    def __init__(self, device: Device) -> None:
        self._handle = 0
        self._calls = device._backend.calls.work
        self._handle = self._calls.event_create()

    def __del__(self) -> None:
        if self._handle:
            # Where the process ends or its CUDA is broken there is nobody to tell.
            with suppress(Exception):
                self._calls.event_destroy(self._handle)

    def record(self, stream: int) -> Self:
        self._calls.event_record(self._handle, stream)
        return self

    def record_context(self, context: int) -> bool:
        return self._calls.event_record_context(self._handle, context)

    def holds_back(self, stream: int) -> None:
        self._calls.stream_wait(stream, self._handle)

    def done(self) -> bool:
        with RelaxedCapture(self._calls):
            return self._calls.event_done(self._handle)


class Stamp:
    """All the work that some devices had been given at one moment.

    Got from :func:`~dask_devctx.transfer.stamp`; handed to ``to_device`` as ``after``.

    Attributes
    ----------
    places
        The bytes on which devices of the values that it was taken for, None where of none.

    Notes
    -----
    Usable from any thread of the process, any number of times. Not pickled: it means nothing in
    another process.
    """

    __slots__ = ("__weakref__", "_done", "_events", "places")

    def __init__(
        self,
        events: Mapping[Device, tuple[Event, ...]],
        places: Mapping[Device, int] | None = None,
    ) -> None:
        self._events = dict(events)
        self._done = False
        self.places = places

    @classmethod
    def of_devices(
        cls, devices: Iterable[Device], places: Mapping[Device, int] | None = None
    ) -> Self:
        """All work of the devices, whichever stream and thread it was given by."""
        return cls({device: _everything(device) for device in devices}, places)

    @classmethod
    def of_streams(cls, devices: Iterable[Device]) -> Self:
        """The work in the streams that are current on this thread, and no other."""
        return cls({device: _current(device) for device in devices})

    @property
    def devices(self) -> tuple[Device, ...]:
        """Whose work it is."""
        return tuple(self._events)

    def hold_back(self, device: Device, *, of: Device | None = None) -> None:
        """Let this thread's current streams of ``device`` wait for it, from now on.

        Parameters
        ----------
        of
            Wait for this device's work only.
        """
        events = [
            event
            for source, found in self._events.items()
            if of is None or source is of
            for event in found
        ]
        if events:
            with device:
                for stream in current_streams(device):
                    for event in events:
                        event.holds_back(stream)

    def hold_back_stream(self, stream: int) -> None:
        """Let a stream, of a device that is current, wait for it."""
        for events in self._events.values():
            for event in events:
                event.holds_back(stream)

    def hold_back_unless_done(self, device: Device, *, of: Device | None = None) -> None:
        """As :meth:`hold_back`, which costs more than to ask whether it is done."""
        with suppress(DriverError):  # whether it may be waited for is for the wait to say
            if self.done():
                return
        self.hold_back(device, of=of)

    def hold_back_readers(self) -> None:
        """Let this thread's current streams of all these devices wait for it, if it is not done.

        For values that are read where nothing brings them. That a device failed is not told here,
        but to whoever reads the value.
        """
        with suppress(DevctxError):
            for device in self.devices:
                self.hold_back_unless_done(device)

    def done(self) -> bool:
        """Return whether that work is done; does not wait.

        Raises
        ------
        DriverError
            It failed.
        """
        if not self._done and all(e.done() for events in self._events.values() for e in events):
            self._done = True  # for ever, so that the driver may have its events back
            self._events = dict.fromkeys(self._events, ())
        return self._done

    def __repr__(self) -> str:
        return f"<Stamp of {', '.join(map(str, self._events)) or 'nothing'}>"


def _everything(device: Device) -> tuple[Event, ...]:
    with device:
        event = Event(device)
        # A stream that is not current any more when the task ends, or a thread's own default
        # stream, can be named by nobody else. The context's event has them all.
        if event.record_context(device._handle):
            return (event,)
        return _recorded(device)


def _current(device: Device) -> tuple[Event, ...]:
    with device:
        return _recorded(device)


def _recorded(device: Device) -> tuple[Event, ...]:
    return tuple(Event(device).record(stream) for stream in current_streams(device))


def stamp(*values: object) -> Stamp | None:
    """Return a stamp of the work that makes ``values``; None where they are on no device.

    To be called where that work was given, such as at the end of a task and on its thread. It
    does not wait.

    Notes
    -----
    It means all that the values' devices have been given so far, by any stream and thread: what a
    task leaves behind in a stream that it made itself has no other name. Where the driver does
    not have that (before CUDA 12.5, or while a graph is being captured), it means the streams that
    are current on this thread.

    References
    ----------
    ``cuCtxRecordEvent``, ``cuEventRecord``.
    """
    places: dict[Device, int] = {}
    for value in values:
        for device, nbytes in nbytes_by_device(value).items():
            places[device] = places.get(device, 0) + nbytes
    return Stamp.of_devices(places, places) if places else None


# -- what must live until some work is done

_held: deque[tuple[Stamp, tuple[Any, ...]]] = deque()
_lock = threading.Lock()


def hold(stamp: Stamp, *values: Any) -> None:
    """Keep ``values`` alive until the work of ``stamp`` is done; does not wait.

    Notes
    -----
    They are let go by a call of :func:`release_held` after that, which every move makes.
    """
    if not _finished(stamp):
        with _lock:
            _held.append((stamp, values))


def release_held(at_most: int | None = None) -> int:
    """Let go of what was held and is not read any more; return how many holds remain.

    Cheap; a worker may call it with each heartbeat, and when a device's memory runs short.

    Parameters
    ----------
    at_most
        How many holds to look at, those not looked at for longest; all by default.
    """
    if not _held:
        return 0
    gone: list[tuple[Stamp, tuple[Any, ...]]] = []
    with _lock:
        for _ in range(len(_held) if at_most is None else min(at_most, len(_held))):
            entry = _held.popleft()
            (gone if _finished(entry[0]) else _held).append(entry)
        remaining = len(_held)
    gone.clear()  # outside the lock: what dies here may run anybody's code
    return remaining


def _finished(stamp: Stamp) -> bool:
    try:
        return stamp.done()
    except DevctxError:
        return True  # the context is broken, nothing of it will be read; whoever uses it is told
