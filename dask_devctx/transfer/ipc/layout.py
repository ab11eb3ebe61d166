"""The place of each part in one block of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dask_devctx.transfer.ipc.ranges import aligned


class Span(NamedTuple):
    """Bytes of one part that lie in one piece.

    Parameters
    ----------
    part
        The part's index in the list of parts.
    in_part, in_piece
        The offset of the bytes in the part and in the piece.
    nbytes
        Their number.
    """

    part: int
    in_part: int
    in_piece: int
    nbytes: int


class Layout:
    """Parts one after another, each aligned; both sides compute this from the sizes alone.

    Parameters
    ----------
    sizes
        The number of bytes of each part.

    Examples
    --------
    >>> layout = Layout([300, 100])
    >>> layout.nbytes
    612
    >>> list(layout.spans(256, 612))
    [Span(part=0, in_part=256, in_piece=0, nbytes=44), Span(part=1, in_part=0, in_piece=256, ...)]
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._sizes: Sequence[int] = list(sizes)
        self._starts: list[int] = []
        self.nbytes = end = 0
        for size in self._sizes:
            self._starts.append(end)
            if size:
                self.nbytes = end + size
            end += aligned(size)

    def spans(self, start: int, end: int) -> Iterator[Span]:
        """Yield the spans between two offsets of the block."""
        for part, (begins, size) in enumerate(zip(self._starts, self._sizes, strict=True)):
            first, last = max(begins, start), min(begins + size, end)
            if first < last:
                yield Span(part, first - begins, first - start, last - first)

    def pieces(self, nbytes: int) -> int:
        """Return the number of pieces of that length that hold the whole block."""
        return -(-self.nbytes // nbytes)
