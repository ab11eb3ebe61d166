"""One transfer on its sender's side: from where the parts are to staging memory."""

from __future__ import annotations

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
        The parts; they are kept alive with it.
    staging
        Staging memory of the device that has most of them.
    after
        Stamps of the work that makes them.
    gathered
        Whether this thread's current streams were given some of that work just now.

    Attributes
    ----------
    nbytes, piece
        The bytes in all, and of a piece.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        staging: Staging,
        after: Iterable[Stamp],
        *,
        gathered: bool = False,
    ) -> None:
        self.parts = parts
        self.staging = staging
        self._after = tuple(after)
        self._gathered = gathered
        self._layout = Layout(part.nbytes for part in parts)
        self._staged: dict[int, Staged] = {}
        self.nbytes = self._layout.nbytes
        self.piece = max(self.nbytes, 1)
        if not staging.fits(self.nbytes):
            self.in_pieces()

    def in_pieces(self) -> None:
        """Let it pass in pieces, for which there is room sooner; before any was begun."""
        self.piece = min(self.staging.piece, self.piece)

    def start(self, index: int) -> Lane | None:
        """Begin to copy a piece into staging memory; None where there is no room now.

        Returns
        -------
        Lane or None
            Whoever waits for it gives it to :meth:`finish`.

        Raises
        ------
        DriverError
            The device cannot export memory, or has failed.
        """
        begin, end = index * self.piece, min((index + 1) * self.piece, self.nbytes)
        staged = self.staging.take(end - begin)
        if staged is None:
            return None
        self._staged[index] = staged  # given back by whoever closes this, whatever happens here
        device = self.staging.device
        with device:
            lane = lanes.take(device)
            try:
                for stamp in self._after:
                    lane.after(stamp)
                if self._gathered:
                    lane.after_current_streams()
                    self._gathered = False
                for span in self._layout.spans(begin, end):
                    source = self.parts[span.part].pointer + span.in_part
                    lane.copy(staged.pointer + span.in_piece, source, span.nbytes)
                lane.mark()
            except BaseException:
                lanes.drop(lane)
                raise
        return lane

    def finish(self, lane: Lane) -> None:
        """Wait until a piece is there."""
        with lane.device:
            try:
                lane.wait()
            except BaseException:
                lanes.drop(lane)
                raise
            lanes.give(lane)

    def description(self, index: int) -> tuple[int, bytes, int, int]:
        """Return what another process needs to read a piece."""
        return self._staged[index].description

    def was_read(self, until: int) -> None:
        """Give back the pieces before this one: the receiver has read them."""
        for index in [index for index in self._staged if index < until]:
            self.staging.give([self._staged.pop(index)])

    def close(self) -> None:
        """Give back all pieces: nobody reads them any more."""
        staged, self._staged = self._staged, {}
        self.staging.give(staged.values())
