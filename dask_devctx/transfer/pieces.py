"""Pieces of a transfer, and of blocks of memory, which are given out and taken back."""

from __future__ import annotations

import threading
from bisect import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# The driver aligns its own allocations like this.
ALIGNMENT = 256
# A transfer has pieces of so many bytes: one is staged while the receiver reads the one before.
PIECE = 2**29


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole units of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Ranges:
    """Gives out pieces of a block of ``nbytes`` bytes, from the first gap that fits.

    >>> ranges = Ranges(1024)
    >>> ranges.take(300), ranges.take(512), ranges.take(1)
    (0, 512, None)
    >>> ranges.give(0)
    >>> ranges.take(1)
    0
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free = [(0, nbytes)] if nbytes else []  # (offset, nbytes) in order, none adjacent
        self._taken: dict[int, int] = {}

    @property
    def taken(self) -> int:
        """How many bytes were given out."""
        return sum(self._taken.values())

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a piece of at least ``nbytes``; None if no gap is that long."""
        wanted = aligned(max(nbytes, 1))
        for index, (offset, length) in enumerate(self._free):
            if length >= wanted:
                rest = [(offset + wanted, length - wanted)] if length > wanted else []
                self._free[index : index + 1] = rest
                self._taken[offset] = wanted
                return offset
        return None

    def give(self, offset: int) -> None:
        """Take a piece back."""
        nbytes = self._taken.pop(offset)
        index = bisect(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + nbytes:
            nbytes += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            before, length = self._free.pop(index - 1)
            index, offset, nbytes = index - 1, before, length + nbytes
        self._free.insert(index, (offset, nbytes))


class Pool:
    """Gives out pieces of blocks, each with its ``ranges``; makes blocks as needed; thread-safe."""

    def __init__(self) -> None:
        self._blocks: list[Any] = []
        self._lock = threading.Lock()
        self._growing = threading.Lock()  # taken before the other; a new block takes its time
        # A piece may end at any moment, also on a thread that has the lock just then.
        self._ended: deque[tuple[Any, int]] = deque()

    def _made(self, nbytes: int) -> Any:
        """Return a new block, with room for so many bytes; None if there is to be none now."""
        raise NotImplementedError

    @property
    def taken(self) -> int:
        """The bytes that are in use."""
        with self._locked():
            return sum(block.ranges.taken for block in self._blocks)

    def piece(self, nbytes: int, *, grow: bool = True) -> tuple[Any, int] | None:
        """Return a block and the offset of a piece in it; None if there is no room now."""
        found = self._piece(nbytes)
        if found is None and grow:
            with self._growing:  # others take pieces of the blocks that are there meanwhile
                while (found := self._piece(nbytes)) is None and self._grow(nbytes):
                    pass
        return found

    def give(self, block: Any, offset: int) -> None:
        """Take a piece back, unless a thread has the lock: the next one does it."""
        self._ended.append((block, offset))
        if self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _piece(self, nbytes: int) -> tuple[Any, int] | None:
        with self._locked():
            for block in self._blocks:
                if (offset := block.ranges.take(nbytes)) is not None:
                    return block, offset
        return None

    def _grow(self, nbytes: int) -> bool:
        block = self._made(nbytes)
        if block is not None:
            with self._locked():
                self._blocks.append(block)
        return block is not None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, and take back the pieces that ended, before and after."""
        with self._lock:
            self._take_back()
            yield
            self._take_back()

    def _take_back(self) -> None:
        while self._ended:
            block, offset = self._ended.popleft()
            block.ranges.give(offset)


def in_a_row(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return the offsets of parts one after another, each aligned, and the bytes of them all.

    >>> in_a_row([300, 100, 0])
    ([0, 512, 768], 612)
    """
    offsets, nbytes, end = [], 0, 0
    for size in sizes:
        offsets.append(end)
        if size:
            nbytes = end + size
        end += aligned(size)
    return offsets, nbytes


def more_pieces(nbytes: int) -> range:
    """Return where the pieces of a transfer begin, after the first one."""
    return range(PIECE, nbytes, PIECE)


def in_piece(begin: int, at: int, nbytes: int) -> tuple[int, int]:
    """Return how many bytes of a part at an offset to skip, and to take, for a piece.

    >>> in_piece(0, 100, 300), in_piece(PIECE, PIECE - 100, 300), in_piece(PIECE, 0, 300)
    ((0, 300), (100, 200), (0, 0))
    """
    first, end = max(begin, at), min(begin + PIECE, at + nbytes)
    return (first - at, end - first) if first < end else (0, 0)
