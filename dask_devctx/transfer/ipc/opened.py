"""Other processes' memory that this process has open: opened once, and read many times."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevctxError


@dataclass(eq=False)
class _Opened:
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
        self._opened: dict[tuple[Hashable, int, Device], _Opened] = {}

    def has(self, peer: Hashable, number: int, device: Device) -> bool:
        """Return whether a buffer is open on a device."""
        return (peer, number, device) in self._opened

    @contextmanager
    def reading(self, peer: Hashable, number: int, handle: bytes, device: Device) -> Iterator[int]:
        """The address of another process' buffer on a device, which is current.

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
        """
        name = (peer, number, device)
        with self._lock:
            entry = self._opened.get(name)
            if entry is None or entry.closing:
                pointer = device._backend.calls.ipc_open(handle)
                entry = self._opened[name] = _Opened(device, pointer)
            entry.readers += 1
        try:
            yield entry.pointer
        finally:
            with self._lock:
                entry.readers -= 1
                last = entry.closing and not entry.readers
            if last:
                _close(entry)

    def close(self, peer: Hashable, numbers: Collection[int] | None = None) -> bool:
        """Close buffers of a peer, all by default; return whether none is being read."""
        return self._close(lambda whose, number: whose == peer and _is_in(number, numbers))

    def close_all(self) -> bool:
        """Close everything; return whether nothing is being read."""
        return self._close(lambda whose, number: True)

    def _close(self, wanted: Callable[[Hashable, int], bool]) -> bool:
        with self._lock:
            found = [name for name in self._opened if wanted(name[0], name[1])]
            entries = [self._opened.pop(name) for name in found]
            for entry in entries:
                entry.closing = True
            idle = [entry for entry in entries if not entry.readers]
        for entry in idle:
            _close(entry)
        return len(idle) == len(entries)


def _is_in(number: int, numbers: Collection[int] | None) -> bool:
    return numbers is None or number in numbers


def _close(entry: _Opened) -> None:
    # Where the process' CUDA is broken, what it has open goes with it.
    with suppress(DevctxError), entry.device:
        entry.device._backend.calls.ipc_close(entry.pointer)
