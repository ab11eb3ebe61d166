"""The sending side: staging memory, which other processes open, and transfers through it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.errors import DriverError
from dask_devctx.transfer.events import Stamp
from dask_devctx.transfer.ipc import lanes
from dask_devctx.transfer.ipc.frames import Part
from dask_devctx.transfer.ipc.lanes import Lane
from dask_devctx.transfer.ipc.messages import Place
from dask_devctx.transfer.ipc.ranges import Layout, Ranges, aligned

# The smallest allocation, and the smallest limit of a device.
_LEAST: Final = 2 * 2**20
_numbers = itertools.count(1)


@dataclass(eq=False)
class Buffer:
    """One allocation that other processes may open; its number is unique in this process."""

    pointer: int
    nbytes: int
    handle: bytes
    number: int = field(default_factory=_numbers.__next__)

    def __post_init__(self) -> None:
        self.ranges = Ranges(self.nbytes)


@dataclass(eq=False, slots=True)
class Staged:
    """A piece of a buffer that holds some bytes of a transfer."""

    buffer: Buffer
    offset: int
    nbytes: int

    @property
    def pointer(self) -> int:
        return self.buffer.pointer + self.offset

    @property
    def place(self) -> Place:
        """The data that another process needs to read it."""
        return Place(self.buffer.number, self.buffer.handle, self.offset, self.nbytes)


class Staging:
    """The staging memory of one device, up to a limit; thread-safe."""

    # The memory comes from the driver and not from a library's allocator, for two reasons. A handle
    # shows another process a whole allocation. And an allocation that another process has open must
    # not be freed: `retire` only takes buffers out of use, and the caller frees them when no
    # process has them open.

    def __init__(self, device: Device, limit: int) -> None:
        self.device = device
        self.limit = max(limit, _LEAST)
        self.used_at = time.monotonic()
        self.nbytes = 0  # of all allocated buffers, the retired ones included
        self._work = device._backend.calls.work
        self._buffers: list[Buffer] = []
        self._lock = threading.Lock()
        self._growing = threading.Lock()  # taken before the other; an allocation takes its time

    @property
    def in_use(self) -> int:
        """The bytes that transfers use now."""
        with self._lock:
            return sum(buffer.ranges.taken for buffer in self._buffers)

    @property
    def piece(self) -> int:
        """The bytes of a piece of a large transfer, which has two pieces here at a time."""
        return max(self.limit // 5 // 256 * 256, 256)

    @property
    def one_piece(self) -> int:
        """The most bytes that pass in one piece and leave room for other transfers."""
        return max(self.limit // 4, _LEAST // 2)

    def take(self, nbytes: int, *, grow: bool = True) -> Staged | None:
        """Return a piece of staging memory; None if there is no room now.

        Raise `DriverError` if the device cannot export memory, or has failed.
        """
        self.used_at = time.monotonic()
        staged = self._piece(nbytes)
        if staged is None and grow:
            with self._growing:  # others take pieces of the buffers that are there meanwhile
                staged = self._piece(nbytes)  # another thread may have just grown it
                if staged is None and (buffer := self._grown(nbytes)) is not None:
                    with self._lock:
                        self._buffers.append(buffer)
                    staged = self._piece(nbytes)
        return staged

    def _piece(self, nbytes: int) -> Staged | None:
        with self._lock:
            for buffer in self._buffers:
                if (offset := buffer.ranges.take(nbytes)) is not None:
                    return Staged(buffer, offset, nbytes)
        return None

    def give(self, pieces: Iterable[Staged]) -> None:
        """Take back pieces that no process reads any more."""
        with self._lock:
            for piece in pieces:
                piece.buffer.ranges.give(piece.offset)

    def retire(self) -> list[Buffer]:
        """Return the buffers that have no piece in use, after taking them out of use."""
        with self._lock:
            retired = [buffer for buffer in self._buffers if buffer.ranges.unused]
            self._buffers = [buffer for buffer in self._buffers if not buffer.ranges.unused]
        return retired

    def use_again(self, buffers: Iterable[Buffer]) -> None:
        """Take retired buffers back into use, which some process may have open still."""
        with self._lock:
            self._buffers += buffers

    def free(self, buffers: Iterable[Buffer]) -> None:
        """Give retired buffers back to the device; no process may have them open."""
        for buffer in buffers:
            with self.device:
                self._work.free(buffer.pointer)
            with self._lock:
                self.nbytes -= buffer.nbytes

    def _grown(self, nbytes: int) -> Buffer | None:
        # Powers of two give few buffers: each peer opens each buffer once.
        wanted = max(_LEAST, 1 << (aligned(nbytes) - 1).bit_length())
        wanted = min(wanted, self.limit - self.nbytes)
        if wanted < aligned(nbytes):
            return None
        with self.device:
            try:
                pointer = self._work.allocate(wanted)
            except DriverError as error:
                if error.code == statuses.OUT_OF_MEMORY:
                    return None
                raise
            try:
                handle = self._work.ipc_export(pointer)
            except BaseException:
                self._work.free(pointer)
                raise
        with self._lock:
            self.nbytes += wanted
        return Buffer(pointer, wanted, handle)


class Sending:
    """Parts on their way to another process through staging memory, in one piece or in several.

    Thread-safe. It keeps the parts alive, and copies them after the work of stamps and, if they are
    ``gathered``, after this thread's streams.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        staging: Staging,
        after: Iterable[Stamp] = (),
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
        self._copying: set[int] = set()  # the pieces that are not staged yet
        self.is_closed = False
        self.nbytes = self._layout.nbytes
        self.piece = max(self.nbytes, 1)
        if self.nbytes > staging.one_piece:
            self.in_pieces()

    def in_pieces(self) -> None:
        """Split the transfer into pieces, which fit sooner; call this before the first start."""
        self.piece = min(self.staging.piece, self.piece)

    @property
    def pieces(self) -> int:
        """The number of pieces."""
        return self._layout.pieces(self.piece)

    def start(self, index: int, *, grow: bool = True) -> Lane | None:
        """Start the copy of a piece into staging memory, for :meth:`finish`.

        None if there is no room now, or it is closed. Raise `DriverError` if the device cannot
        export memory, or has failed.
        """
        begin, end = index * self.piece, min((index + 1) * self.piece, self.nbytes)
        staged = self.staging.take(end - begin, grow=grow)
        if staged is None:
            return None
        with self._lock:
            if self.is_closed:
                self.staging.give([staged])
                return None
            self._staged[index] = staged
            self._copying.add(index)
        try:
            return self._started(begin, end, staged)
        except BaseException:
            self._ended(index)
            raise

    def _started(self, begin: int, end: int, staged: Staged) -> Lane:
        spans = tuple(self._layout.spans(begin, end))
        with self.staging.device as device:
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
                    copy(staged.pointer + span.in_piece, part.pointer + span.in_part, span.nbytes)
                lane.mark()
            except BaseException:
                lanes.drop(lane)
                raise
        return lane

    def finish(self, index: int, lane: Lane, *, is_done: bool = False) -> None:
        """Wait until a piece is in staging memory, unless it is there."""
        try:
            lanes.finish(lane, is_done=is_done)
        finally:
            self._ended(index)

    def _ended(self, index: int) -> None:
        """Note that nothing is copied into a piece any more."""
        with self._lock:
            self._copying.discard(index)
            if self.is_closed:
                self.staging.give([self._staged.pop(index)])

    def place(self, index: int) -> Place | None:
        """Return where another process reads a piece; None if it is not staged."""
        return self._staged[index].place if index in self._staged.keys() - self._copying else None

    def was_read(self, until: float) -> None:
        """Give back the pieces before ``until``: the receiver has read them."""
        with self._lock:
            read = [i for i in self._staged if i < until and i not in self._copying]
            self.staging.give([self._staged.pop(i) for i in read])

    def close(self) -> None:
        """Give back all pieces; the one that is being copied goes back when its copy has ended."""
        self.is_closed = True
        self.was_read(float("inf"))
