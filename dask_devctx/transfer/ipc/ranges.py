"""Blocks of memory: pieces of them are given out and taken back, and parts lie in them in order."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator
from typing import NamedTuple

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


class Span(NamedTuple):
    """Bytes of one part in one piece: the part's index, the offsets in both, and their number."""

    part: int
    in_part: int
    in_piece: int
    nbytes: int


class Layout:
    """Parts one after another, each aligned; both sides compute this from the sizes alone.

    >>> layout = Layout([300, 100])
    >>> layout.nbytes
    612
    >>> list(layout.spans(256, 612))
    [Span(part=0, in_part=256, in_piece=0, nbytes=44), Span(part=1, in_part=0, in_piece=256, ...)]
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._parts: list[tuple[int, int]] = []
        self.nbytes = end = 0
        for size in sizes:
            self._parts.append((end, size))
            if size:
                self.nbytes = end + size
            end += aligned(size)

    def spans(self, start: int, end: int) -> Iterator[Span]:
        """Yield the spans between two offsets of the block."""
        for part, (begins, size) in enumerate(self._parts):
            first, last = max(begins, start), min(begins + size, end)
            if first < last:
                yield Span(part, first - begins, first - start, last - first)

    def pieces(self, nbytes: int) -> int:
        """Return the number of pieces of that length that hold the whole block."""
        return -(-self.nbytes // nbytes)
