"""The sending side of one transfer: from the parts' own memory to staging memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from dask_devctx.transfer.events import Stamp
from dask_devctx.transfer.ipc import lanes
from dask_devctx.transfer.ipc.frames import Part
from dask_devctx.transfer.ipc.lanes import Lane
from dask_devctx.transfer.ipc.layout import Layout
from dask_devctx.transfer.ipc.staging import Staged, Staging


class Sending:
    """Parts on their way to another process, in one piece or in several.

    Parameters
    ----------
    parts
        The parts; this object keeps them alive.
    staging
        Staging memory of the device that has most of them.
    after
        Stamps of the work that makes them.
    gathered
        Whether some of that work was just given to this thread's current streams.
    on_one_device
        Whether the parts are on no other device than the staging memory.

    Attributes
    ----------
    nbytes, piece
        The number of bytes of all parts, and of a piece.
    is_closed
        Whether it was closed: no more pieces are staged.

    Notes
    -----
    Thread-safe. A piece that is being copied when the transfer is closed goes back when its copy
    has ended: until then, the copy writes there.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        staging: Staging,
        after: Iterable[Stamp],
        *,
        gathered: bool = False,
        on_one_device: bool = False,
    ) -> None:
        self.parts = parts
        self.staging = staging
        self._after = tuple(after)
        self._gathered = gathered
        self._on_one_device = on_one_device and not any(part.on_host for part in parts)
        self._layout = Layout(part.nbytes for part in parts)
        self._lock = threading.Lock()
        self._staged: dict[int, Staged] = {}
        self._copies: dict[int, Lane | None] = {}  # of the pieces that are not staged yet
        self.is_closed = False
        self.nbytes = self._layout.nbytes
        self.piece = max(self.nbytes, 1)
        if self.nbytes > staging.one_piece:
            self.in_pieces()

    def in_pieces(self) -> None:
        """Split the transfer into pieces, which fit sooner; call this before the first start."""
        self.piece = min(self.staging.piece, self.piece)

    def start(self, index: int) -> Lane | None:
        """Start the copy of a piece into staging memory; None if there is no room now.

        None, too, after :meth:`close`.

        Returns
        -------
        Lane or None
            The argument of :meth:`finish`, which waits for the copy.

        Raises
        ------
        DriverError
            The device cannot export memory, or has failed.
        """
        begin, end = index * self.piece, min((index + 1) * self.piece, self.nbytes)
        staged = self.staging.take(end - begin)
        if staged is None:
            return None
        with self._lock:
            if closed := self.is_closed:
                self.staging.give([staged])
            else:
                self._staged[index] = staged  # close() gives it back, also after an error here
                self._copies[index] = None
        if closed:
            return None
        try:
            lane = self._copies[index] = self._started(begin, end, staged)
        except BaseException:
            self._ended(index)
            raise
        return lane

    def _started(self, begin: int, end: int, staged: Staged) -> Lane:
        device = self.staging.device
        spans = tuple(self._layout.spans(begin, end))
        with device:
            lane = lanes.take(device)
            try:
                for stamp in self._after:
                    lane.after(stamp)
                if self._gathered:
                    lane.after_current_streams()
                    self._gathered = False
                if self._on_one_device:
                    lane.keep_lock(len(spans), end - begin)
                for span in spans:
                    part = self.parts[span.part]
                    copy = lane.copy_in if part.on_host else lane.copy
                    source = part.pointer + span.in_part
                    copy(staged.pointer + span.in_piece, source, span.nbytes)
                lane.mark()
            except BaseException:
                lanes.drop(lane)
                raise
        return lane

    def finish(self, lane: Lane, *, is_done: bool = False) -> None:
        """Wait until a piece is in staging memory, unless it is there."""
        try:
            lanes.finish(lane, is_done=is_done)
        finally:
            self._ended(next(index for index, one in tuple(self._copies.items()) if one is lane))

    def _ended(self, index: int) -> None:
        """Note that nothing is copied into a piece any more."""
        with self._lock:
            del self._copies[index]
            if self.is_closed:
                self.staging.give([self._staged.pop(index)])

    def description(self, index: int) -> tuple[int, bytes, int, int]:
        """Return the data that another process needs to read a piece."""
        return self._staged[index].description

    @property
    def pieces(self) -> int:
        """The number of pieces."""
        return self._layout.pieces(self.piece)

    def is_staged(self, index: int) -> bool:
        """Return whether a piece is in staging memory."""
        return index in self._staged and index not in self._copies

    def was_read(self, until: int) -> None:
        """Give back the pieces before ``until``: the receiver has read them."""
        with self._lock:
            read = [i for i in self._staged if i < until and i not in self._copies]
            self.staging.give([self._staged.pop(i) for i in read])

    def close(self) -> None:
        """Give back all pieces: no process reads them any more."""
        with self._lock:
            self.is_closed = True
            left = [i for i in self._staged if i not in self._copies]
            self.staging.give([self._staged.pop(i) for i in left])
