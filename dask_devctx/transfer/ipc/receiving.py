"""The receiving side of one transfer: from a peer's staging memory to this process's memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.ipc import lanes
from dask_devctx.transfer.ipc.frames import allocate
from dask_devctx.transfer.ipc.headers import Description
from dask_devctx.transfer.ipc.lanes import Lane
from dask_devctx.transfer.ipc.layout import Layout
from dask_devctx.transfer.ipc.opened import Opened, OpenedBuffers


class Receiving:
    """Parts on their way from another process.

    Parameters
    ----------
    peer
        The process that sends them.
    parts
        The kind, number of bytes and detail of each, as in ``Part.description``.
    piece
        The number of bytes of a piece.
    device
        The device that they go to.
    opened
        The open buffers of the peers.

    Attributes
    ----------
    memory
        The object of each part's library that holds the part; :meth:`allocate` makes them.
    pieces
        The number of pieces.
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
        """Allocate memory for all parts, each with its own library.

        Raises
        ------
        MemoryError
            There is not enough memory. Each library raises its own class: torch's is a
            ``RuntimeError``.
        """
        self.memory, self._pointers = [], []
        with self.device:
            for kind, nbytes, detail in self._parts:
                memory, pointer = allocate(kind, nbytes, detail, self.device)
                self.memory.append(memory)
                self._pointers.append(pointer)

    def start(self, index: int, where: Description) -> tuple[Lane, Opened]:
        """Start the copy of a piece.

        Returns
        -------
        Lane, Opened
            The arguments of :meth:`finish`, which waits for the copy.

        Raises
        ------
        DriverError
            The peer's memory cannot be opened, or the device has failed.
        MalformedHeaderError
            The peer's buffer does not contain the piece.
        """
        begin, end = index * self._piece, min((index + 1) * self._piece, self.nbytes)
        spans = tuple(self._layout.spans(begin, end))
        with self.device:
            opened = self._opened.begin(self._peer, where.number, where.handle, self.device)
            try:
                base = opened.place(where.offset, end - begin)
                lane = lanes.take(self.device)
                try:
                    # The libraries reuse memory that earlier work in their streams still reads.
                    lane.after_current_streams()
                    lane.keep_lock(len(spans), end - begin)
                    for span in spans:
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

    def finish(self, lane: Lane, opened: Opened, *, is_done: bool = False) -> None:
        """Wait until a piece has arrived, unless it has."""
        try:
            lanes.finish(lane, is_done=is_done)
        finally:
            self._opened.end(opened)

    def is_quick(self, where: Description) -> bool:
        """Return whether :meth:`start` needs no call that may take milliseconds."""
        return self._opened.has(self._peer, where.number, self.device)
