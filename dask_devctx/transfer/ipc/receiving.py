"""One transfer on its receiver's side: from a peer's staging memory to memory of its own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.ipc import lanes
from dask_devctx.transfer.ipc.frames import allocate
from dask_devctx.transfer.ipc.lanes import Lane
from dask_devctx.transfer.ipc.layout import Layout
from dask_devctx.transfer.ipc.opened import Opened, OpenedBuffers

# What names a piece: a buffer's number and handle, and where in it the piece is.
Description = tuple[int, bytes, int, int]


class Receiving:
    """Parts on their way from another process.

    Parameters
    ----------
    peer
        Whose they are.
    parts
        What each needs: its kind, bytes and detail, as ``Part.description`` says.
    piece
        The bytes of a piece.
    device
        Where they go.
    opened
        What is open of the peers' memory.

    Attributes
    ----------
    memory
        What each part's library has it in, when :meth:`allocate` was called.
    pieces
        In how many pieces it passes.
    """

    def __init__(
        self,
        peer: Hashable,
        parts: Sequence[tuple[str, int, Any]],
        piece: int,
        device: Device,
        opened: OpenedBuffers,
    ) -> None:
        self.device = device
        self.memory: list[Any] = []
        self._peer = peer
        self._parts = parts
        self._piece = piece
        self._opened = opened
        self._pointers: list[int] = []
        self._layout = Layout(nbytes for _, nbytes, _ in parts)
        self.nbytes = self._layout.nbytes
        self.pieces = self._layout.pieces(piece)

    def allocate(self) -> None:
        """Make room for all of it, by each part's own library.

        Raises
        ------
        MemoryError
            There is none, in the library's own words: torch's is a ``RuntimeError``.
        """
        self.memory, self._pointers = [], []
        with self.device:
            for kind, nbytes, detail in self._parts:
                memory, pointer = allocate(kind, nbytes, detail, self.device)
                self.memory.append(memory)
                self._pointers.append(pointer)

    def start(self, index: int, where: Description) -> tuple[Lane, Opened]:
        """Begin to copy a piece.

        Returns
        -------
        Lane, Opened
            Whoever waits for it gives them to :meth:`finish`.

        Raises
        ------
        DriverError
            The peer's memory cannot be opened, or the device has failed.
        """
        number, handle, offset, _ = where
        begin, end = index * self._piece, min((index + 1) * self._piece, self.nbytes)
        with self.device:
            opened = self._opened.begin(self._peer, number, handle, self.device)
            try:
                lane = lanes.take(self.device)
                try:
                    # The libraries give memory out again that is still read by what was given to
                    # their streams before.
                    lane.after_current_streams()
                    base = opened.pointer + offset
                    for span in self._layout.spans(begin, end):
                        target = self._pointers[span.part] + span.in_part
                        lane.copy(target, base + span.in_piece, span.nbytes)
                    lane.mark()
                except BaseException:
                    lanes.drop(lane)
                    raise
            except BaseException:
                self._opened.end(opened)
                raise
        return lane, opened

    def finish(self, lane: Lane, opened: Opened) -> None:
        """Wait until a piece is there."""
        try:
            with self.device:
                try:
                    lane.wait()
                except BaseException:
                    lanes.drop(lane)
                    raise
                lanes.give(lane)
        finally:
            self._opened.end(opened)

    def is_quick(self, where: Description) -> bool:
        """Return whether it begins without a call that may take milliseconds."""
        return self._opened.has(self._peer, where[0], self.device)
