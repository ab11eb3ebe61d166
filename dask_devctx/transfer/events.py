"""Order of the devices' work, and values that must live until a point in it.

A :class:`Stamp` stands for the work that a thread gave to some devices. Streams wait for it, and
memory that the work still reads is held until the work is done.

Nothing here spoils a graph that another thread captures. An event of a whole context would, and so
would work for the legacy default stream while a stream that it waits for is captured. Therefore
streams are recorded one by one, and the legacy stream only when no capture forbids it; an event of
a context is recorded by a worker that knows that no other call uses the device.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, Self

from dask_devctx.cuda.device import Device
from dask_devctx.driver.backends import ProcessLock
from dask_devctx.driver.relaxed import LEGACY_STREAM, PER_THREAD_STREAM, RelaxedCapture
from dask_devctx.errors import DevctxError, DeviceMemoryError
from dask_devctx.transfer.location import nbytes_by_device

# A capture that lasts longer than this is not waited for: the driver's error says what is wrong.
LONGEST_CAPTURE_S: Final = 60
_POLL_S: Final = 0.001


# -- the streams that a thread gives its work to: the current stream of each loaded library


def current_streams(device: Device) -> tuple[int, ...]:
    """Return the handles of the current streams of this thread and device, which is current.

    There is one for each different stream of the loaded libraries, the legacy default stream if no
    library names one. No library is imported or initialised.
    """
    # The libraries do not know simulated devices: their device of this number is another one.
    # JAX does not reveal its streams and orders its own work.
    if device._backend.simulated:
        return (LEGACY_STREAM,)
    number = device.device_id
    asked = {ask(number) for name, ask in _STREAMS.items() if name in sys.modules} - {0}
    return tuple(asked) or (LEGACY_STREAM,)


def cupy_stream(ordinal: int) -> int:
    """Return CuPy's current stream of a device; 0 if CuPy is not loaded."""
    cuda = getattr(sys.modules.get("cupy"), "cuda", None)
    current = getattr(cuda, "get_current_stream", None)  # None while it is being imported
    return 0 if current is None else current(ordinal).ptr or LEGACY_STREAM


def torch_stream(ordinal: int) -> int:
    """Return torch's current stream of a device; 0 if torch does not use CUDA yet."""
    torch: Any = sys.modules.get("torch")
    initialised = getattr(getattr(torch, "cuda", None), "is_initialized", None)
    if initialised is None or not initialised():
        return 0
    # As torch's own compiled code asks: `torch.cuda.current_stream` makes objects.
    return torch._C._cuda_getCurrentRawStream(ordinal) or LEGACY_STREAM


def numba_stream(ordinal: int) -> int:
    """Return the stream of Numba's launches that name none."""
    config = getattr(sys.modules.get("numba"), "config", None)
    per_thread = getattr(config, "CUDA_PER_THREAD_DEFAULT_STREAM", 0)
    return PER_THREAD_STREAM if per_thread else LEGACY_STREAM


_STREAMS: Final = {"cupy": cupy_stream, "torch": torch_stream, "numba.cuda": numba_stream}


# -- points in the work


class Event:
    """A point in the work of one device; its primary context is current where it is recorded."""

    __slots__ = ("_calls", "_free", "_handle", "stream")  # the one it was recorded in last

    def __init__(self, device: Device, like: Event | None = None, *, timed: bool = False) -> None:
        self._handle = 0
        calls = device._backend.calls
        work = self._calls = calls.work
        # The context's events end with it. A later one with its handle has another number.
        if like is None:
            self._free = work.free_events[calls.context_id(device._handle), timed]
        else:
            self._free = like._free
        try:
            self._handle = self._free.pop()
        except IndexError:
            with device, RelaxedCapture(self._calls):  # a task may have left another current
                self._handle = self._calls.event_create(timed=timed)

    def __del__(self) -> None:
        # No call, which could wait: this may run on any thread, at any moment. The next one that
        # needs an event uses it; there are never more than were used at a time.
        if self._handle:
            self._free.append(self._handle)

    def record(self, stream: int, *, at_once: bool = False) -> Self:
        """Record the event in a stream; waits while a capture forbids the legacy stream."""
        if stream == LEGACY_STREAM and self._calls.is_capturing(LEGACY_STREAM):
            wait_for_captures()
        self._calls.event_record(self._handle, stream, at_once=at_once)
        self.stream = stream
        return self

    def record_unless_captured(self, stream: int) -> bool:
        """Record the event unless that would spoil or join a capture; return whether it did."""
        self.stream, calls = stream, self._calls
        if stream == LEGACY_STREAM:
            return calls.look.record_legacy(self._handle)
        return calls.event_record_unless_captured(self._handle, stream)

    def holds_back(self, stream: int, *, own: bool = False) -> None:
        """Make a stream wait, as :meth:`record` uses one; for its ``own`` event it need not."""
        if stream == LEGACY_STREAM and self._calls.is_capturing(LEGACY_STREAM):
            wait_for_captures()
        if not own:
            self._calls.stream_wait(stream, self._handle)

    def done(self) -> bool:
        """Return whether the device has reached the event."""
        return self._calls.look.reached(self._handle)

    def seconds_since(self, other: Event) -> float:
        """Return the device's time between two timed events that it has reached."""
        return self._calls.event_seconds(other._handle, self._handle)


class Stamp:
    """Work of some devices, until one moment; any thread of the process may wait for it.

    While another thread captures a graph in a blocking stream, the legacy stream cannot be
    recorded. The stamp's first reader does so when the capture is over, and covers more work then.
    That reader waits.
    """

    __slots__ = ("__weakref__", "_asked", "_done", "_events", "_unrecorded")

    def __init__(self, events: Mapping[Device, tuple[Event, ...]]) -> None:
        self._events = dict(events)
        self._unrecorded: set[Device] = set()
        self._done = False
        self._asked = 0.0  # when a capture first kept an event loop from reading

    @classmethod
    def of_devices(cls, devices: Iterable[Device], *, blocking: bool = True) -> Self:
        """Return a stamp of this thread's work, and if ``blocking``, of all in blocking streams."""
        stamp, more = cls({}), (LEGACY_STREAM,) if blocking else ()
        for device in devices:
            with device:
                events = []
                for stream in {*more, *current_streams(device)}:
                    event = Event(device)
                    if event.record_unless_captured(stream):
                        events.append(event)
                    elif stream == LEGACY_STREAM:
                        stamp._unrecorded.add(device)
            stamp._events[device] = tuple(events)
        return stamp

    @classmethod
    def until(cls, event: Event | None, device: Device) -> Self:
        """Return a stamp of all work of a device until an event; if None, of this thread's work."""
        if event is None:
            return cls.of_devices((device,))
        event.stream = LEGACY_STREAM if current_streams(device) == (LEGACY_STREAM,) else 0
        return cls({device: (event,)})

    def _record_rest(self, *, wait: bool) -> bool:
        """Record what a capture forbade; return whether nothing remains."""
        for device in tuple(self._unrecorded):
            with device:
                event = Event(device)
                if wait:
                    event.record(LEGACY_STREAM)
                elif not event.record_unless_captured(LEGACY_STREAM):
                    return False
            self._events[device] += (event,)  # before the set tells other threads
            self._unrecorded.discard(device)
        return True

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that do the work."""
        return tuple(self._events)

    def hold_back(self, device: Device, *streams: int) -> None:
        """Make streams of ``device``, or this thread's current ones, wait for the work."""
        if self.done():  # to ask costs less than a wait
            return
        if self._unrecorded:
            self._record_rest(wait=True)
        events = [(event, on is device) for on, some in self._events.items() for event in some]
        with device:
            for stream in streams or current_streams(device):
                for event, here in events:
                    # A stream keeps the order of its work. Others may have had its handle.
                    own = here and stream == event.stream == LEGACY_STREAM
                    event.holds_back(stream, own=own)

    def hold_back_readers(self) -> None:
        """Make this thread's current streams of all these devices wait: for a read, not a move."""
        with suppress(DevctxError):  # the device failed: the read of the value raises it
            for device in self.devices:
                self.hold_back(device)

    def may_be_read(self) -> bool:
        """Return whether :meth:`hold_back_readers` waits for no capture; event loops ask first."""
        with suppress(DevctxError):
            for device in () if self.done() else self.devices:
                if is_captured(device):
                    self._asked = self._asked or time.monotonic()
                    return time.monotonic() - self._asked > LONGEST_CAPTURE_S
        return True

    def done(self) -> bool:
        """Return whether the work is done, without a wait; ``DriverError`` if it failed."""
        if self._done:
            return True
        if self._unrecorded and not self._record_rest(wait=False):
            return False
        for events in self._events.values():
            for event in events:
                if not event.done():
                    return False
        self._events = dict.fromkeys(self._events, ())  # they can be used again
        self._done = True
        return True


def stamp(*values: object) -> Stamp | None:
    """Return a stamp of the work that makes ``values``; None if they are on no device.

    Call it on the thread that gave this work to the devices, such as at the end of a task. It does
    not wait.

    Notes
    -----
    The stamp covers the work in the streams that are current on this thread, one for each loaded
    library, and in the legacy default stream. This stream waits for all others but those that were
    made non-blocking, as torch's are: work in such a stream is covered if the stream is current
    now, or if a covered stream waits for it.

    It spoils no graph that another thread captures. If a blocking stream is captured, readers of
    the values wait until the capture is over.

    References
    ----------
    ``cuEventRecord``, ``cuStreamIsCapturing``.
    """
    devices = dict.fromkeys(device for value in values for device in nbytes_by_device(value))
    return Stamp.of_devices(devices) if devices else None


def is_captured(device: Device) -> bool:
    """Return whether work for a device's legacy stream would spoil a graph under capture."""
    with device:
        return device._backend.calls.work.is_capturing(LEGACY_STREAM)


def wait_for_captures() -> None:
    """Wait until no other thread's capture forbids the current device's legacy stream."""
    device = Device.current()
    if device is None:
        return
    captured = device._backend.calls.work.is_capturing
    if any(captured(stream) for stream in current_streams(device) if stream != LEGACY_STREAM):
        return  # this thread's own capture would never end: the driver says what is wrong
    until = time.monotonic() + LONGEST_CAPTURE_S
    while captured(LEGACY_STREAM) and time.monotonic() < until:
        time.sleep(_POLL_S)


# -- values that must live until some work is done

_held: deque[tuple[Stamp, tuple[Any, ...]]] = deque()
_lock = ProcessLock()  # a ``__del__`` may copy, too


def hold(stamp: Stamp, *values: Any) -> None:
    """Keep values alive until some work is done and :func:`release_held` is called."""
    if not _finished(stamp):
        with _lock:
            _held.append((stamp, values))


def release_held(at_most: int | None = None) -> int:
    """Let go of held values whose work is done, of some holds or all; return how many remain."""
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
    except DeviceMemoryError:
        return False  # the point in the work could not be recorded: the next look tries again
    except DevctxError:
        return True  # the context is broken: nothing reads from it, and its next use raises
