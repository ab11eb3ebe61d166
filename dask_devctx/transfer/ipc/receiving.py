"""The receiving side: open memory of other processes, and transfers from there."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevctxError
from dask_devctx.transfer import copy_streams
from dask_devctx.transfer.events import is_captured
from dask_devctx.transfer.parcel import Header, allocate
from dask_devctx.transfer.pieces import in_a_row, in_piece


class Opened:
    """A buffer of another process that is open here on a device, for as long as this object is."""

    def __init__(self, device: Device, handle: bytes) -> None:
        self.pointer = device._backend.calls.work.ipc_open(handle)
        weakref.finalize(self, _close, device, self.pointer).atexit = False


def _close(device: Device, pointer: int) -> None:
    # If the process's CUDA is broken, its open buffers end with it.
    with suppress(DevctxError), device:
        device._backend.calls.work.ipc_close(pointer)


class OpenedBuffers:
    """The buffers of other processes that are open here, by owner and handle; thread-safe.

    Opening takes milliseconds, so a buffer stays open until :meth:`close`. If it is being read
    then, its last reader closes it.
    """

    def __init__(self) -> None:
        self._opening = threading.Lock()  # others read buffers that are open meanwhile
        self.opened: dict[tuple[str, bytes, Device], Opened] = {}

    def get(self, owner: str, handle: bytes, device: Device) -> Opened:
        """Return another process's buffer, open on the current device while its reader has it.

        Raise `DriverError` if it cannot be opened here.
        """
        name = owner, handle, device
        if (found := self.opened.get(name)) is not None:
            return found
        with self._opening:
            if (found := self.opened.get(name)) is None:
                found = self.opened[name] = Opened(device, handle)
        return found

    def close(self, owner: str | None = None, handles: Collection[bytes] | None = None) -> bool:
        """Close buffers of another process; return whether nobody reads them any more.

        None stands for all processes, and for all buffers.
        """
        with self._opening:
            closed = [
                weakref.ref(self.opened.pop(name))
                for name in tuple(self.opened)
                if owner in (None, name[0]) and (handles is None or name[1] in handles)
            ]
        return all(opened() is None for opened in closed)


class Receiving:
    """Parts on their way from another process's memory to a device."""

    def __init__(self, owner: str, header: Header, device: Device, opened: OpenedBuffers) -> None:
        self.device = device
        self.parts: list[Any] = []  # the object of its library that holds each part
        self._owner = owner
        self._header = header
        self._buffers = opened
        self._offsets, self.nbytes = in_a_row(part.nbytes for part in header.parts)

    def allocate(self) -> None:
        """Allocate memory for all parts; each library raises its own class without enough."""
        with self.device:
            self.parts, self._pointers = allocate(self._header.parts, self.device)

    def start(self) -> None:
        """Start the copy of the first piece, for :meth:`finish`.

        Raise `DriverError` if the memory cannot be opened or the device has failed.
        """
        with self.device:
            opened = self._buffers.get(self._owner, self._header.handle, self.device)
            self._opened: Opened | None = opened  # until the copy is done
            with copy_streams.taken(self.device) as self.stream:
                # The libraries reuse memory that earlier work in their streams still reads.
                self.stream.after_current_streams()
                self.stream.keep_lock(len(self._pointers), self.nbytes)
                self.copy_piece(0)
                self.stream.mark()

    def copy_piece(self, begin: int) -> None:
        """Start the copy of a piece that is staged, after those before."""
        assert self._opened is not None
        base = self._opened.pointer + self._header.offset
        with self.device:
            for part, to, at in zip(self._header.parts, self._pointers, self._offsets, strict=True):
                skip, nbytes = in_piece(begin, at, part.nbytes)
                self.stream.copy(to + skip, base + at + skip, nbytes)

    def finish(self, *, is_done: bool = False) -> None:
        """Wait until all pieces have arrived, unless they have."""
        try:
            copy_streams.finish(self.stream, is_done=is_done)
        finally:
            self._opened = None

    def is_quick(self) -> bool:
        """Return whether :meth:`start` needs no call that may take milliseconds."""
        # No reader waits for the end of a capture there.
        name = self._owner, self._header.handle, self.device
        return not is_captured(self.device) and name in self._buffers.opened
