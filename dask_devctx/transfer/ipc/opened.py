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
        self._opening = threading.Lock()  # taken before the other
        self._opened: dict[tuple[Hashable, int, Device], Opened] = {}
        # The buffer that is being opened, unless it is to be closed after the read.
        self._coming: tuple[Hashable, int, Device] | None = None

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
        found = self._reading(name)
        if found is None:
            with self._opening:  # others read buffers that are open meanwhile
                found = self._reading(name)  # another thread may have just opened it
                if found is None:
                    found = self._open(name, handle)
        return found

    def _open(self, name: tuple[Hashable, int, Device], handle: bytes) -> Opened:
        _, _, device = self._coming = name
        calls = device._backend.calls.work
        pointer, nbytes = calls.ipc_open(handle), None
        with suppress(DevctxError):
            _, nbytes = calls.address_range(pointer)
        with self._lock:
            closing = self._coming is None  # :meth:`close` was called meanwhile
            opened = Opened(device, pointer, nbytes, 1, closing)
            if not closing:
                self._opened[name] = opened
            self._coming = None
        return opened

    def _reading(self, name: tuple[Hashable, int, Device]) -> Opened | None:
        """Return an open buffer that is read once more from now on; None if it is not open."""
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

        def is_meant(name: tuple[Hashable, int, Device]) -> bool:
            return peer in (None, name[0]) and (numbers is None or name[1] in numbers)

        with self._lock:
            coming = self._coming is not None and is_meant(self._coming)
            if coming:
                self._coming = None
            names = [name for name in self._opened if is_meant(name)]
            found = [self._opened.pop(name) for name in names]
            for opened in found:
                opened.closing = True
            idle = [opened for opened in found if not opened.readers]
        for opened in idle:
            _close(opened)
        return len(idle) == len(found) and not coming


def _close(opened: Opened) -> None:
    # If the process's CUDA is broken, its open buffers end with it.
    with suppress(DevctxError), opened.device:
        opened.device._backend.calls.work.ipc_close(opened.pointer)
