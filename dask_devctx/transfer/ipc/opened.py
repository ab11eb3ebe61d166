"""Other processes' memory that this process has open: opened once, and read many times."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable
from contextlib import suppress
from dataclasses import dataclass

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevctxError


@dataclass(eq=False)
class Opened:
    """A buffer of another process that is open here.

    Parameters
    ----------
    device
        Where it was opened.
    pointer
        Its address there.
    """

    device: Device
    pointer: int
    readers: int = 0
    closing: bool = False


class OpenedBuffers:
    """What is open of the staging memory of others.

    Notes
    -----
    Thread-safe. Opening takes milliseconds, so that what is open stays so until it is told
    otherwise. What is being read is closed by its last reader.

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
        """Return another process' buffer, opened on a device, which is current.

        Parameters
        ----------
        peer, number
            Whose buffer, and which.
        handle
            What that process exported.

        Raises
        ------
        DriverError
            It cannot be opened here.

        Notes
        -----
        It stays open until :meth:`end` is called with it, at least.
        """
        name = (peer, number, device)
        with self._lock:
            found = self._opened.get(name)
            if found is None:
                pointer = device._backend.calls.work.ipc_open(handle)
                found = self._opened[name] = Opened(device, pointer)
            found.readers += 1
        return found

    def end(self, opened: Opened) -> None:
        """Note that a reader is done with a buffer."""
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
            Whose; None for everybody's.
        numbers
            Which; None for all.
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
    # Where the process' CUDA is broken, what it has open goes with it.
    with suppress(DevctxError), opened.device:
        opened.device._backend.calls.work.ipc_close(opened.pointer)
