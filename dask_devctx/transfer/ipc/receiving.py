"""The receiving side: open memory of other processes, and transfers from there."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevctxError
from dask_devctx.transfer.events import is_captured
from dask_devctx.transfer.ipc import lanes
from dask_devctx.transfer.ipc.lanes import Lane
from dask_devctx.transfer.ipc.parcel import Header, Place, allocate
from dask_devctx.transfer.ipc.ranges import in_a_row


@dataclass(eq=False)
class Opened:
    """A buffer of another process that is open here on a device, or is just being opened."""

    device: Device
    pointer: int | None = None
    nbytes: int | None = None  # None if the driver does not tell it
    readers: int = 0
    closing: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def address(self, place: Place, nbytes: int) -> int:
        """Return the address of a place; raise if not all of its bytes are in the buffer."""
        if self.nbytes is not None and place.offset + nbytes > self.nbytes:
            raise ValueError(
                f"a piece of {nbytes} bytes at {place.offset} is not in a buffer of "
                f"{self.nbytes} bytes"
            )
        assert self.pointer is not None
        return self.pointer + place.offset


class OpenedBuffers:
    """The buffers of other processes that are open here; thread-safe.

    Opening takes milliseconds, so a buffer stays open until :meth:`close`. If it is being read
    then, its last reader closes it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: dict[tuple[Hashable, int, Device], Opened] = {}

    def has(self, memory: Hashable, number: int, device: Device) -> bool:
        """Return whether a buffer is open on a device."""
        found = self._opened.get((memory, number, device))
        return found is not None and found.pointer is not None

    def begin(self, memory: Hashable, place: Place, device: Device) -> Opened:
        """Return another process's buffer, open on the current device until :meth:`end`.

        Raise `DriverError` if it cannot be opened here.
        """
        name = (memory, place.number, device)
        with self._lock:
            found = self._opened.setdefault(name, Opened(device))
            found.readers += 1
        try:
            with found.lock:  # others read buffers that are open meanwhile
                if found.pointer is None:
                    work = device._backend.calls.work
                    pointer = work.ipc_open(place.handle)
                    with suppress(DevctxError):
                        _, found.nbytes = work.address_range(pointer)
                    found.pointer = pointer
        except BaseException:
            with self._lock:
                found.closing = True
                if self._opened.get(name) is found:
                    del self._opened[name]
            self.end(found)
            raise
        return found

    def end(self, opened: Opened) -> None:
        """End one read of a buffer."""
        with self._lock:
            opened.readers -= 1
            last = opened.closing and not opened.readers
        if last:
            _close(opened)

    def close(self, memory: Hashable = None, numbers: Collection[int] | None = None) -> bool:
        """Close buffers of another process's memory; return whether nobody reads them any more.

        None stands for the memory of all processes, and for all buffers.
        """
        with self._lock:
            names = [
                (of, number, device)
                for of, number, device in self._opened
                if memory in (None, of) and (numbers is None or number in numbers)
            ]
            found = [self._opened.pop(name) for name in names]
            for opened in found:
                opened.closing = True
            idle = [opened for opened in found if not opened.readers]
        for opened in idle:
            _close(opened)
        return len(idle) == len(found)


def _close(opened: Opened) -> None:
    # If the process's CUDA is broken, its open buffers end with it.
    if opened.pointer is not None:
        with suppress(DevctxError), opened.device:
            opened.device._backend.calls.work.ipc_close(opened.pointer)


class Receiving:
    """Parts on their way from another process's memory to a device."""

    def __init__(self, header: Header, device: Device, opened: OpenedBuffers) -> None:
        self.device = device
        self.parts: list[Any] = []  # the object of its library that holds each part
        self._header = header
        self._opened = opened
        self._pointers: list[int] = []
        self._offsets, self.nbytes = in_a_row(part.nbytes for part in header.parts)

    def allocate(self) -> None:
        """Allocate memory for all parts; each library raises its own class without enough."""
        self.parts, self._pointers = [], []
        with self.device:
            for part in self._header.parts:
                memory, pointer = allocate(*part, self.device)
                self.parts.append(memory)
                self._pointers.append(pointer)

    def start(self) -> tuple[Lane, Opened]:
        """Start the copy, for :meth:`finish`.

        Raise `DriverError` if the memory cannot be opened or the device has failed, and
        `ValueError` if the parts are not in the buffer.
        """
        memory, _, parts, place = self._header
        with self.device:
            opened = self._opened.begin(memory, place, self.device)
            try:
                base = opened.address(place, self.nbytes)
                lane = lanes.take(self.device)
                try:
                    # The libraries reuse memory that earlier work in their streams still reads.
                    lane.after_current_streams()
                    lane.keep_lock(len(parts), self.nbytes)
                    for part, pointer, offset in zip(
                        parts, self._pointers, self._offsets, strict=True
                    ):
                        if part.nbytes:
                            lane.copy(pointer, base + offset, part.nbytes)
                    lane.mark()
                except BaseException:
                    lanes.drop(lane)
                    raise
            except BaseException:
                self._opened.end(opened)
                raise
        return lane, opened

    def finish(self, lane: Lane, opened: Opened, *, is_done: bool = False) -> None:
        """Wait until the parts have arrived, unless they have."""
        try:
            lanes.finish(lane, is_done=is_done)
        finally:
            self._opened.end(opened)

    def is_quick(self) -> bool:
        """Return whether :meth:`start` needs no call that may take milliseconds."""
        if is_captured(self.device):  # no reader waits for the end of a capture there
            return False
        memory, _, _, place = self._header
        return self._opened.has(memory, place.number, self.device)
