"""Places in one block of memory, given out and taken back."""

from __future__ import annotations

from bisect import bisect

# The driver aligns its own allocations like this.
ALIGNMENT = 256


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole units of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Ranges:
    """Gives out pieces of a block of ``nbytes`` bytes, from the first gap that fits.

    Parameters
    ----------
    nbytes
        The size of the block.

    Examples
    --------
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
        for place, (offset, length) in enumerate(self._free):
            if length >= wanted:
                rest = [(offset + wanted, length - wanted)] if length > wanted else []
                self._free[place : place + 1] = rest
                self._taken[offset] = wanted
                return offset
        return None

    def give(self, offset: int) -> None:
        """Take a piece back."""
        nbytes = self._taken.pop(offset)
        place = bisect(self._free, (offset, 0))
        if place < len(self._free) and self._free[place][0] == offset + nbytes:
            nbytes += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == offset:
            before, length = self._free.pop(place - 1)
            place, offset, nbytes = place - 1, before, length + nbytes
        self._free.insert(place, (offset, nbytes))
