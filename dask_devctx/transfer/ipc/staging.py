"""Device memory for values on their way to other processes: its limit, and its pieces' size."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.errors import DriverError
from dask_devctx.transfer.ipc.ranges import Ranges, aligned

# The smallest allocation, and the smallest limit of a device.
_LEAST = 2 * 2**20


@dataclass(eq=False)
class Buffer:
    """One allocation that other processes may open.

    Parameters
    ----------
    number
        Identifies it among the buffers of this process.
    pointer, nbytes
        Its address and size.
    handle
        The driver's handle, with which another process opens it.
    """

    number: int
    pointer: int
    nbytes: int
    handle: bytes
    ranges: Ranges = field(init=False)

    def __post_init__(self) -> None:
        self.ranges = Ranges(self.nbytes)


@dataclass(eq=False, slots=True)
class Staged:
    """A piece of staging memory.

    Parameters
    ----------
    buffer
        The buffer that it is a piece of.
    offset, nbytes
        Its offset in the buffer, and the number of bytes used.
    """

    buffer: Buffer
    offset: int
    nbytes: int

    @property
    def pointer(self) -> int:
        return self.buffer.pointer + self.offset

    @property
    def description(self) -> tuple[int, bytes, int, int]:
        """The data that another process needs to read it."""
        return self.buffer.number, self.buffer.handle, self.offset, self.nbytes


class Staging:
    """The staging memory of one device.

    Parameters
    ----------
    device
        The device.
    limit
        The most bytes to use.

    Notes
    -----
    Thread-safe. The memory comes from the driver and not from a library's allocator, for two
    reasons. A handle shows another process a whole allocation. And an allocation that another
    process has open must not be freed: :meth:`retire` only takes buffers out of use, and the caller
    calls :meth:`free` when no process has them open.

    References
    ----------
    ``cuMemAlloc``, ``cuIpcGetMemHandle``.
    """

    def __init__(self, device: Device, limit: int) -> None:
        self.device = device
        self.limit = max(limit, _LEAST)
        self.used_at = time.monotonic()
        self._calls = device._backend.calls
        self._buffers: list[Buffer] = []
        self._nbytes = 0  # of all allocated buffers, the retired ones included
        self._lock = threading.Lock()
        self._growing = threading.Lock()  # taken before the other; an allocation takes its time

    @property
    def nbytes(self) -> int:
        """The bytes of all its buffers."""
        return self._nbytes

    @property
    def in_use(self) -> int:
        """The bytes that transfers use now."""
        with self._lock:
            return sum(buffer.ranges.taken for buffer in self._buffers)

    @property
    def piece(self) -> int:
        """The bytes of a piece of a large transfer, which has two pieces here at a time."""
        return max(self.limit // 5 // 256 * 256, 256)

    @property
    def one_piece(self) -> int:
        """The most bytes that pass in one piece and leave room for other transfers."""
        return max(self.limit // 4, _LEAST // 2)

    def take(self, nbytes: int) -> Staged | None:
        """Return a piece of staging memory; None if there is no room now.

        Raises
        ------
        DriverError
            The device cannot export memory, or has failed.
        """
        self.used_at = time.monotonic()
        staged = self._piece(nbytes)
        if staged is None:
            with self._growing:  # others take pieces of the buffers that are there meanwhile
                staged = self._piece(nbytes)  # another thread may have just grown it
                if staged is None and (grown := self._grow(nbytes)) is not None:
                    with self._lock:
                        staged = _taken([grown], nbytes)
                        self._buffers.append(grown)
        return staged

    def has_room(self, nbytes: int) -> bool:
        """Return whether there is room for a piece now, without a new allocation."""
        with self._lock:
            staged = _taken(self._buffers, nbytes)
            if staged is not None:
                staged.buffer.ranges.give(staged.offset)
        return staged is not None

    def _piece(self, nbytes: int) -> Staged | None:
        with self._lock:
            return _taken(self._buffers, nbytes)

    def give(self, pieces: Iterable[Staged]) -> None:
        """Take back pieces that no process reads any more."""
        with self._lock:
            for piece in pieces:
                piece.buffer.ranges.give(piece.offset)

    def retire(self) -> list[Buffer]:
        """Return the buffers that have no piece in use, after taking them out of use."""
        with self._lock:
            retired = [buffer for buffer in self._buffers if buffer.ranges.unused]
            self._buffers = [buffer for buffer in self._buffers if not buffer.ranges.unused]
        return retired

    def use_again(self, buffers: Iterable[Buffer]) -> None:
        """Take retired buffers back into use, which some process may have open still."""
        with self._lock:
            self._buffers += buffers

    def free(self, buffers: Iterable[Buffer]) -> None:
        """Give retired buffers back to the device; no process may have them open."""
        for buffer in buffers:
            with self.device:
                self._calls.work.free(buffer.pointer)
            with self._lock:
                self._nbytes -= buffer.nbytes

    def _grow(self, nbytes: int) -> Buffer | None:
        # Powers of two give few buffers: each peer opens each buffer once.
        wanted = max(_LEAST, 1 << (aligned(nbytes) - 1).bit_length())
        wanted = min(wanted, self.limit - self._nbytes)
        if wanted < aligned(nbytes):
            return None
        with self.device:
            try:
                pointer = self._calls.work.allocate(wanted)
            except DriverError as error:
                if error.code == statuses.OUT_OF_MEMORY:
                    return None
                raise
            try:
                handle = self._calls.work.ipc_export(pointer)
            except BaseException:
                self._calls.work.free(pointer)
                raise
        with self._lock:
            self._nbytes += wanted
        return Buffer(next(_numbers), pointer, wanted, handle)


def _taken(buffers: Iterable[Buffer], nbytes: int) -> Staged | None:
    """Take a piece of the first buffer that has room for it."""
    for buffer in buffers:
        offset = buffer.ranges.take(nbytes)
        if offset is not None:
            return Staged(buffer, offset, nbytes)
    return None


_numbers = itertools.count(1)
