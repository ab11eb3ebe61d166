"""Memory of other processes that this process has open: opened once, read many times."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable
from contextlib import suppress
from dataclasses import dataclass

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevctxError
from dask_devctx.transfer.ipc.headers import MalformedHeaderError


@dataclass(eq=False)
class Opened:
    """A buffer of another process that is open here.

    Parameters
    ----------
    device
        The device on which it is open.
    pointer
        Its address on that device.
    nbytes
        Its size; None if the driver does not tell it.
    """

    device: Device
    pointer: int
    nbytes: int | None = None
    readers: int = 0
    closing: bool = False

    def place(self, offset: int, nbytes: int) -> int:
        """Return the address of some bytes in it.

        Raises
        ------
        MalformedHeaderError
            They are not all in it. A copy would break the device for the whole process.
        """
        if self.nbytes is not None and offset + nbytes > self.nbytes:
            raise MalformedHeaderError(
                f"a piece of {nbytes} bytes at {offset} is not in a buffer of {self.nbytes} bytes"
            )
        return self.pointer + offset


class OpenedBuffers:
    """The staging buffers of other processes that are open here.

    Notes
    -----
    Thread-safe. Opening takes milliseconds, so a buffer stays open until :meth:`close`. If it is
    being read then, its last reader closes it.

    References
    ----------
    ``cuIpcOpenMemHandle``, ``cuIpcCloseMemHandle``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: dict[tuple[Hashable, int, Device], Opened] = {}

    def has(self, peer: Hashable, number: int, device: Device) -> bool:
        """Return whether a buffer is open on a device."""
        return (peer, number, device) in self._opened

    def begin(self, peer: Hashable, number: int, handle: bytes, device: Device) -> Opened:
        """Return another process's buffer, open on the current device.

        Parameters
        ----------
        peer, number
            The other process, and its number for the buffer.
        handle
            The handle that the other process exported.

        Raises
        ------
        DriverError
            The buffer cannot be opened here.

        Notes
        -----
        The buffer stays open at least until the matching :meth:`end`.
        """
        name = (peer, number, device)
        with self._lock:
            found = self._opened.get(name)
            if found is None:
                calls = device._backend.calls.work
                pointer = calls.ipc_open(handle)
                try:
                    _, nbytes = calls.address_range(pointer)
                except DevctxError:
                    nbytes = None
                found = self._opened[name] = Opened(device, pointer, nbytes)
            found.readers += 1
        return found

    def end(self, opened: Opened) -> None:
        """End one read of a buffer."""
        with self._lock:
            opened.readers -= 1
            last = opened.closing and not opened.readers
        if last:
            _close(opened)

    def close(self, peer: Hashable = None, numbers: Collection[int] | None = None) -> bool:
        """Close buffers; return whether none of them is still being read.

        Parameters
        ----------
        peer
            The process that owns them; None for all processes.
        numbers
            Their numbers; None for all.
        """
        with self._lock:
            names = [
                (whose, number, device)
                for whose, number, device in self._opened
                if peer in (None, whose) and (numbers is None or number in numbers)
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
    with suppress(DevctxError), opened.device:
        opened.device._backend.calls.work.ipc_close(opened.pointer)
