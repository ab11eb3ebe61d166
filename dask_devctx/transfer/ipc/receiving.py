"""The receiving side: open memory of other processes, and transfers from there."""

from __future__ import annotations

import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevctxError
from dask_devctx.transfer.events import is_captured
from dask_devctx.transfer.ipc import lanes
from dask_devctx.transfer.ipc.parcel import Header, Place, allocate
from dask_devctx.transfer.ipc.ranges import in_a_row


@dataclass(eq=False)
class Opened:
    """A buffer of another process that is open here on a device."""

    device: Device
    pointer: int
    nbytes: int | None = None  # None if the driver does not tell it
    readers: int = 0
    closing: bool = False

    def address(self, place: Place, nbytes: int) -> int:
        """Return the address of a place; raise if not all of its bytes are in the buffer."""
        if self.nbytes is not None and place.offset + nbytes > self.nbytes:
            raise ValueError(
                f"a piece of {nbytes} bytes at {place.offset} is not in a buffer of "
                f"{self.nbytes} bytes"
            )
        return self.pointer + place.offset

    def close(self) -> None:
        # If the process's CUDA is broken, its open buffers end with it.
        with suppress(DevctxError), self.device:
            self.device._backend.calls.work.ipc_close(self.pointer)


_Name = tuple[str, bytes, Device]


class OpenedBuffers:
    """The buffers of other processes that are open here, by owner and handle; thread-safe.

    Opening takes milliseconds, so a buffer stays open until :meth:`close`. If it is being read
    then, its last reader closes it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opening = threading.Lock()  # taken before the other
        self._opened: dict[_Name, Opened] = {}

    def has(self, owner: str, handle: bytes, device: Device) -> bool:
        """Return whether a buffer is open on a device."""
        return (owner, handle, device) in self._opened

    def begin(self, owner: str, handle: bytes, device: Device) -> Opened:
        """Return another process's buffer, open on the current device until :meth:`end`.

        Raise `DriverError` if it cannot be opened here.
        """
        name = owner, handle, device
        if (found := self._read(name)) is not None:
            return found
        with self._opening:  # others read buffers that are open meanwhile
            if (found := self._read(name)) is None:
                work = device._backend.calls.work
                found = Opened(device, work.ipc_open(handle), readers=1)
                with suppress(DevctxError):
                    _, found.nbytes = work.address_range(found.pointer)
                with self._lock:
                    self._opened[name] = found
        return found

    def _read(self, name: _Name) -> Opened | None:
        with self._lock:
            found = self._opened.get(name)
            if found is not None:
                found.readers += 1
        return found

    def end(self, opened: Opened) -> None:
        """End one read of a buffer."""
        with self._lock:
            opened.readers -= 1
            last = opened.closing and not opened.readers
        if last:
            opened.close()

    def close(self, owner: str | None = None, handles: Collection[bytes] | None = None) -> bool:
        """Close buffers of another process; return whether nobody reads them any more.

        None stands for all processes, and for all buffers.
        """
        with self._opening, self._lock:
            found = [
                self._opened.pop(name)
                for name in tuple(self._opened)
                if owner in (None, name[0]) and (handles is None or name[1] in handles)
            ]
            for opened in found:
                opened.closing = True
            idle = [opened for opened in found if not opened.readers]
        for opened in idle:
            opened.close()
        return len(idle) == len(found)


class Receiving:
    """Parts on their way from another process's memory to a device."""

    def __init__(self, owner: str, header: Header, device: Device, opened: OpenedBuffers) -> None:
        self.device = device
        self.parts: list[Any] = []  # the object of its library that holds each part
        self._owner = owner
        self._header = header
        self._buffers = opened
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

    def start(self) -> None:
        """Start the copy, for :meth:`finish`.

        Raise `DriverError` if the memory cannot be opened or the device has failed, and
        `ValueError` if the parts are not in the buffer.
        """
        place, parts = self._header.place, self._header.parts
        with self.device:
            self._opened = self._buffers.begin(self._owner, place.handle, self.device)
            try:
                base = self._opened.address(place, self.nbytes)
                with lanes.taken(self.device) as self.lane:
                    # The libraries reuse memory that earlier work in their streams still reads.
                    self.lane.after_current_streams()
                    self.lane.keep_lock(len(parts), self.nbytes)
                    for part, to, at in zip(parts, self._pointers, self._offsets, strict=True):
                        if part.nbytes:
                            self.lane.copy(to, base + at, part.nbytes)
                    self.lane.mark()
            except BaseException:
                self._buffers.end(self._opened)
                raise

    def finish(self, *, is_done: bool = False) -> None:
        """Wait until the parts have arrived, unless they have."""
        try:
            lanes.finish(self.lane, is_done=is_done)
        finally:
            self._buffers.end(self._opened)

    def is_quick(self) -> bool:
        """Return whether :meth:`start` needs no call that may take milliseconds."""
        # No reader waits for the end of a capture there.
        handle = self._header.place.handle
        return not is_captured(self.device) and self._buffers.has(self._owner, handle, self.device)
