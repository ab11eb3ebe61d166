"""Streams of devices that only do copies, each used by one transfer at a time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dask_devctx.cuda.device import Device
from dask_devctx.driver.backends import ProcessLock
from dask_devctx.errors import DevctxError
from dask_devctx.transfer.events import Event, Stamp, current_streams

# As many copies as one transfer may start while it keeps the GIL, some 5 µs each.
FEW: Final = 16
# The most bytes of them: there may be memory that the driver copies itself.
FEW_NBYTES: Final = 2**20
# As many copies as an idle stream takes without a wait, some in a launch, with many to spare.
_MANY: Final = 4096


class CopyStream:
    """A stream of a device, which is current on this thread; only its user waits for its work."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._calls = device._backend.calls
        self._context = self._calls.context_id(device.primary_context.handle)
        self._stream = self._calls.work.stream_create()
        self._reached = Event(device)
        self._at_once = False

    @property
    def usable(self) -> bool:
        """Whether its context is still the device's: a primary context can end and start again."""
        return self._calls.context_id(self.device.primary_context.handle) == self._context

    def after(self, stamp: Stamp) -> None:
        """Make all later copies wait for the work of a stamp."""
        stamp.hold_back(self.device, self._stream)

    def after_current_streams(self) -> None:
        """Make all later copies wait for the work in this thread's current streams."""
        for stream in current_streams(self.device):
            Event(self.device).record(stream).holds_back(self._stream)

    def keep_lock(self, copies: int, nbytes: int) -> bool:
        """Keep the GIL in the copies that come now, if they are few and none can wait."""
        # To get the GIL back takes a thread up to a millisecond where others are busy. The copies
        # are between addresses of the stream's device, or of memory that another process shows.
        few = copies <= FEW and nbytes <= FEW_NBYTES
        self._at_once = few and self._calls.work.look.is_legacy_idle()
        return self._at_once

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Enqueue a copy between two addresses."""
        if nbytes:
            self._calls.work.copy(target, source, nbytes, self._stream, at_once=self._at_once)

    def copy_out(self, host: int, source: int, nbytes: int) -> None:
        """Enqueue a copy from the device to a host address."""
        if nbytes:
            self._calls.work.copy_out(host, source, nbytes, self._stream)

    def copy_in(self, target: int, host: int, nbytes: int) -> None:
        """Enqueue a copy from a host address to the device."""
        if nbytes:
            self._calls.work.copy_in(target, host, nbytes, self._stream)

    def copy_boxes(self, boxes: int, count: int) -> None:
        """Enqueue copies of rows at a pitch: each a ``CUDA_MEMCPY3D``, from an address on."""
        self._calls.work.copy_boxes(boxes, count, self._stream)

    def copy_boxes_here(self, boxes: int, count: int, extent: tuple[int, int]) -> None:
        """Do so within the device's memory; ``extent``: the most bytes of a row, the most rows."""
        work = self._calls.work
        at_once = count <= _MANY and work.look.is_legacy_idle()
        work.copy_boxes_here(boxes, count, extent, self._stream, at_once=at_once)

    def reached(self) -> Event:
        """Return an event for all work of the stream until now."""
        return Event(self.device).record(self._stream)

    def mark(self) -> None:
        """Mark the end of the copies: :meth:`done` asks about this point."""
        self._reached.record(self._stream, at_once=self._at_once)
        self._at_once = False

    def done(self) -> bool:
        """Return whether all work before the mark is done; does not wait."""
        return self._reached.done()

    def done_soon(self, within_s: float) -> bool:
        """Return whether all work before the mark is known to be done within a short time."""
        until, done = time.perf_counter() + within_s, False
        with suppress(DevctxError):  # whoever waits for the stream meets it
            while not (done := self.done()) and time.perf_counter() < until:
                pass
        return done

    def wait(self) -> None:
        """Wait until all work in the stream is done."""
        self._calls.work.stream_synchronize(self._stream)


_free: defaultdict[Device, list[CopyStream]] = defaultdict(list)
_shared: dict[tuple[Device, str], CopyStream] = {}
_lock = ProcessLock()  # a ``__del__`` may copy, too
_sharing = ProcessLock()  # another one: while a stream is made, the driver may wait for the device


def take(device: Device) -> CopyStream:
    """Return a stream of the current device; :func:`finish` or :func:`drop` it in the end."""
    with _lock:
        stream = _free[device].pop() if _free[device] else None
    return stream if stream is not None and stream.usable else CopyStream(device)


@contextmanager
def taken(device: Device) -> Iterator[CopyStream]:
    """Give a stream for copies that begin inside; :func:`finish` it, unless they fail."""
    stream = take(device)
    try:
        yield stream
    except BaseException:
        drop(stream)
        raise


def shared(device: Device, name: str) -> CopyStream:
    """Return the current device's stream of this name, which several threads may use at a time.

    Its users wait for their copies by events, and may so wait for the copies of others, too.
    """
    with _sharing:
        stream = _shared.get((device, name))
        if stream is None or not stream.usable:
            stream = _shared[device, name] = CopyStream(device)
    return stream


def give(stream: CopyStream) -> None:
    """Make a stream available again; all its work is done."""
    stream._at_once = False  # if an error came before its mark
    with _lock:
        _free[stream.device].append(stream)


def finish(stream: CopyStream, *, is_done: bool = False) -> None:
    """Wait until all work of a stream is done, unless it is, and make it available again."""
    with stream.device:
        try:
            if not is_done:
                stream.wait()
        except BaseException:
            drop(stream)
            raise
        give(stream)


def drop(stream: CopyStream) -> None:
    """Wait for a stream whose result is not needed: it may write to memory that is freed next."""
    with suppress(DevctxError), stream.device:  # a stream that failed does not write any more
        stream.wait()
        give(stream)
