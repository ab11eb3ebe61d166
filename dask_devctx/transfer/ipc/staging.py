"""Memory of a device that other processes may open: few buffers, exported once and used often."""

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

# The least that is allocated at a time, and the least that a device's limit is.
_LEAST = 2 * 2**20


@dataclass(eq=False)
class Buffer:
    """One allocation that other processes may open.

    Parameters
    ----------
    number
        Names it among those of this process.
    pointer, nbytes
        Where it is, and how long.
    handle
        What another process opens it with.
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
        What it is a piece of.
    offset, nbytes
        Where in it, and how much of it is used.
    """

    buffer: Buffer
    offset: int
    nbytes: int

    @property
    def pointer(self) -> int:
        return self.buffer.pointer + self.offset

    @property
    def description(self) -> tuple[int, bytes, int, int]:
        """What another process needs to read it."""
        return self.buffer.number, self.buffer.handle, self.offset, self.nbytes


class Staging:
    """The staging memory of one device.

    Parameters
    ----------
    device
        Whose memory.
    limit
        How many bytes of it may be used.

    Notes
    -----
    Thread-safe. The memory comes from the driver and from no library's allocator: a handle shows
    another process a whole allocation, and one that is open elsewhere must not be freed. So
    :meth:`retire` only takes buffers out of use, and :meth:`free` is called when no process has
    them open.

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
        self._nbytes = 0  # of all that is allocated, what was retired included
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """How much memory it holds."""
        return self._nbytes

    @property
    def in_use(self) -> int:
        """How much of it holds something that is on its way."""
        with self._lock:
            return sum(buffer.ranges.taken for buffer in self._buffers)

    @property
    def piece(self) -> int:
        """How long a piece is of what does not pass at once; two of one transfer are there."""
        return max(self.limit // 8 // 256 * 256, 256)

    def fits(self, nbytes: int) -> bool:
        """Return whether so much passes at once; the rest is left to others."""
        return nbytes <= max(self.limit // 4, _LEAST // 2)

    def take(self, nbytes: int) -> Staged | None:
        """Return a piece of staging memory; None where there is no room now.

        Raises
        ------
        DriverError
            The device cannot export memory, or has failed.
        """
        with self._lock:
            self.used_at = time.monotonic()
            for buffer in self._buffers:
                offset = buffer.ranges.take(nbytes)
                if offset is not None:
                    return Staged(buffer, offset, nbytes)
            grown = self._grow(nbytes)
            if grown is None:
                return None
            offset = grown.ranges.take(nbytes)
            assert offset is not None
            return Staged(grown, offset, nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Return whether a piece can be had without an allocation; for the moment, at least."""
        with self._lock:
            for buffer in self._buffers:
                offset = buffer.ranges.take(nbytes)
                if offset is not None:
                    buffer.ranges.give(offset)
                    return True
        return False

    def give(self, pieces: Iterable[Staged]) -> None:
        """Take pieces back which nobody reads any more."""
        with self._lock:
            for piece in pieces:
                piece.buffer.ranges.give(piece.offset)

    def retire(self) -> list[Buffer]:
        """Take those buffers out of use of which no piece is in use, and return them."""
        with self._lock:
            retired = [buffer for buffer in self._buffers if buffer.ranges.unused]
            self._buffers = [buffer for buffer in self._buffers if not buffer.ranges.unused]
        return retired

    def use_again(self, buffers: Iterable[Buffer]) -> None:
        """Take retired buffers back into use, which some process may have open still."""
        with self._lock:
            self._buffers += buffers

    def free(self, buffers: Iterable[Buffer]) -> None:
        """Give retired buffers back to the device: no process may have them open."""
        for buffer in buffers:
            with self.device:
                self._calls.work.free(buffer.pointer)
            with self._lock:
                self._nbytes -= buffer.nbytes

    def _grow(self, nbytes: int) -> Buffer | None:
        # Powers of two, so that there are few of them: each is opened once by each peer.
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
        buffer = Buffer(next(_numbers), pointer, wanted, handle)
        self._buffers.append(buffer)
        self._nbytes += wanted
        return buffer


_numbers = itertools.count(1)
