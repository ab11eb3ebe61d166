"""Blocks of memory: pieces of them are given out and taken back, and parts lie in them in order."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable

# The driver aligns its own allocations like this.
ALIGNMENT = 256


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
    def unused(self) -> bool:
        """Whether everything was given back."""
        return not self._taken

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


def in_a_row(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return the offsets of parts one after another, each aligned, and the bytes of them all.

    Both sides compute this from the sizes alone.

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
