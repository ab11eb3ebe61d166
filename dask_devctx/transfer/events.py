"""Order of the devices' work, and values that must live until a point in it.

The CPU never waits here. A :class:`Stamp` means "all work that these devices were given until now".
Streams wait for it, and memory that the work still reads is held until the work is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Self

from dask_devctx.cuda.device import Device
from dask_devctx.driver.process_lock import ProcessLock
from dask_devctx.driver.relaxed import RelaxedCapture
from dask_devctx.errors import DevctxError, DriverError
from dask_devctx.transfer.location import nbytes_by_device
from dask_devctx.transfer.streams import current_streams


class Event:
    """A point in the work of one device, whose primary context is current on this thread."""

    __slots__ = ("_calls", "_free", "_handle")

    def __init__(self, device: Device, *, timed: bool = False) -> None:
        self._handle = 0
        calls = device._backend.calls
        self._calls = calls.work
        context = device._handle
        self._free = self._calls.free_events(context, calls.context_id(context), timed=timed)
        try:
            self._handle = self._free.pop()
        except IndexError:
            self._handle = self._calls.event_create(timed=timed)

    def __del__(self) -> None:
        # No call, which could wait: this may run on any thread, at any moment. The next one that
        # needs an event uses it; there are never more than were used at a time.
        if self._handle:
            self._free.append(self._handle)

    def record(self, stream: int, *, at_once: bool = False) -> Self:
        self._calls.event_record(self._handle, stream, at_once=at_once)
        return self

    def record_context(self, context: int) -> bool:
        return self._calls.event_record_context(self._handle, context)

    def holds_back(self, stream: int) -> None:
        self._calls.stream_wait(stream, self._handle)

    def done(self) -> bool:
        with RelaxedCapture(self._calls):
            return self._calls.event_done(self._handle)

    def seconds_since(self, other: Event) -> float:
        return self._calls.event_seconds(other._handle, self._handle)


class Stamp:
    """All the work that some devices had been given at one moment.

    :func:`~dask_devctx.transfer.stamp` returns one; ``to_device`` takes it as ``after``.

    Attributes
    ----------
    places
        The bytes per device of the stamped values; None for a stamp without values.

    Notes
    -----
    Usable from any thread of the process, any number of times. It cannot be pickled: it means
    nothing in another process.
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
        """Return a stamp of all work of the devices, from every stream and thread."""
        return cls({device: _everything(device) for device in devices}, places)

    @classmethod
    def of_streams(cls, devices: Iterable[Device]) -> Self:
        """Return a stamp of the work in the streams that are current on this thread only."""
        return cls({device: _current(device) for device in devices})

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that do the work."""
        return tuple(self._events)

    def hold_back(self, device: Device, *, of: Device | None = None) -> None:
        """Make this thread's current streams of ``device`` wait for the work, from now on.

        Parameters
        ----------
        of
            The device whose work to wait for; None for all devices of the stamp.
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

    def hold_back_stream_unless_done(self, stream: int) -> None:
        """Make a stream wait for the work unless it is done; the stream's device is current."""
        if self._succeeded():
            return
        for events in self._events.values():
            for event in events:
                event.holds_back(stream)

    def hold_back_unless_done(self, device: Device, *, of: Device | None = None) -> None:
        """Do as :meth:`hold_back`, unless the work is done already: to ask costs less."""
        if not self._succeeded():
            self.hold_back(device, of=of)

    def _succeeded(self) -> bool:
        """Return whether the work is done; False if it failed: a wait raises the error."""
        with suppress(DriverError):
            return self.done()
        return False

    def hold_back_readers(self) -> None:
        """Make this thread's current streams of all these devices wait for unfinished work.

        For values that are read without a move. This ignores the error of a failed device: the read
        of the value raises it.
        """
        with suppress(DevctxError):
            for device in self.devices:
                self.hold_back_unless_done(device)

    def done(self) -> bool:
        """Return whether the work is done; does not wait.

        Raises
        ------
        DriverError
            The work failed.
        """
        if not self._done and all(e.done() for events in self._events.values() for e in events):
            self._done = True  # this never changes back, so the events can be destroyed
            self._events = dict.fromkeys(self._events, ())
        return self._done

    def __repr__(self) -> str:
        return f"<Stamp of {', '.join(map(str, self._events)) or 'nothing'}>"


def _everything(device: Device) -> tuple[Event, ...]:
    with device:
        event = Event(device)
        # This thread cannot name a stream that is no longer current when the task ends, or another
        # thread's default stream. The event of the context covers all streams.
        if event.record_context(device._handle):
            return (event,)
        return _recorded(device)


def _current(device: Device) -> tuple[Event, ...]:
    with device:
        return _recorded(device)


def _recorded(device: Device) -> tuple[Event, ...]:
    return tuple(Event(device).record(stream) for stream in current_streams(device))


def stamp(*values: object) -> Stamp | None:
    """Return a stamp of the work that makes ``values``; None if they are on no device.

    Call it on the thread that gave this work to the devices, such as at the end of a task. It does
    not wait.

    Notes
    -----
    The stamp covers all work that the values' devices have been given so far, from every stream and
    thread: a task may leave work in a stream that it made itself. If the driver cannot do that
    (before CUDA 12.5, or while a graph is being captured), the stamp covers the streams that are
    current on this thread.

    References
    ----------
    ``cuCtxRecordEvent``, ``cuEventRecord``.
    """
    places: dict[Device, int] = {}
    for value in values:
        for device, nbytes in nbytes_by_device(value).items():
            places[device] = places.get(device, 0) + nbytes
    return Stamp.of_devices(places, places) if places else None


# -- values that must live until some work is done

_held: deque[tuple[Stamp, tuple[Any, ...]]] = deque()
_lock = ProcessLock()  # a ``__del__`` may copy, too


def hold(stamp: Stamp, *values: Any) -> None:
    """Keep ``values`` alive until the work of ``stamp`` is done; does not wait.

    Notes
    -----
    A later call of :func:`release_held` lets them go. Every move makes such a call.
    """
    if not _finished(stamp):
        with _lock:
            _held.append((stamp, values))


def release_held(at_most: int | None = None) -> int:
    """Let go of held values whose work is done; return how many holds remain.

    The call is cheap: a worker may make it with each heartbeat, and when a device's memory runs
    short.

    Parameters
    ----------
    at_most
        How many holds to check, the ones not checked for longest first; all by default.
    """
    if not _held:
        return 0
    gone: list[tuple[Stamp, tuple[Any, ...]]] = []
    with _lock:
        for _ in range(len(_held) if at_most is None else min(at_most, len(_held))):
            if not _held:  # a call within this one has let them go
                break
            entry = _held.popleft()
            (gone if _finished(entry[0]) else _held).append(entry)
        remaining = len(_held)
    gone.clear()  # outside the lock: the end of a value may run any code
    return remaining


def _finished(stamp: Stamp) -> bool:
    try:
        return stamp.done()
    except DevctxError:
        return True  # the context is broken: nothing reads from it, and its next use raises
