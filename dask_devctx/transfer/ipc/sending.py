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
from dask_devctx.transfer.ipc.lanes import Lane
from dask_devctx.transfer.ipc.parcel import Part, Place
from dask_devctx.transfer.ipc.ranges import Ranges, aligned, in_a_row

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
    """A piece of a buffer that holds the bytes of a transfer."""

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
    """The staging memory of one device, up to a limit, or for one larger transfer; thread-safe."""

    # The memory comes from the driver and not from a library's allocator, for two reasons. A handle
    # shows another process a whole allocation. And an allocation that another process has open must
    # not be freed: `retire` only takes buffers out of use, and the caller frees them when no
    # process has them open.

    def __init__(self, device: Device, limit: int) -> None:
        self.device = device
        self.limit = max(limit, _LEAST)
        self.used_at = time.monotonic()
        self.nbytes = 0  # of all allocated buffers, the retired ones included
        self.refused = ""  # why the device cannot export memory
        self._work = device._backend.calls.work
        self._buffers: list[Buffer] = []
        self._lock = threading.Lock()
        self._growing = threading.Lock()  # taken before the other; an allocation takes its time

    @property
    def in_use(self) -> int:
        """The bytes that transfers use now."""
        with self._lock:
            return sum(buffer.ranges.taken for buffer in self._buffers)

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

    def give(self, piece: Staged) -> None:
        """Take back a piece that no process reads any more."""
        with self._lock:
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
        if aligned(nbytes) > self.limit and not self.in_use:  # a large one passes alone
            wanted = aligned(nbytes)
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
            except BaseException as error:
                self._work.free(pointer)
                self.refused = f"its device cannot show its memory: {error}"
                raise
        with self._lock:
            self.nbytes += wanted
        return Buffer(pointer, wanted, handle)


class Sending:
    """Parts on their way to another process through staging memory; thread-safe.

    It keeps the parts alive, and copies them after the work of stamps and, if they are
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
        self.offsets, self.nbytes = in_a_row(part.nbytes for part in parts)
        self.staged: Staged | None = None
        self.is_closed = False
        self._after = tuple(after)
        self._gathered = gathered
        self._on_one_device = on_one_device and not any(part.on_host for part in parts)
        self._lock = threading.Lock()
        self._copying = False

    def start(self, *, grow: bool = True) -> Lane | None:
        """Start the copy into staging memory, for :meth:`finish`.

        None if there is no room now, or it is closed. Raise `DriverError` if the device cannot
        export memory, or has failed.
        """
        staged = self.staging.take(self.nbytes, grow=grow)
        if staged is None:
            return None
        with self._lock:
            if self.is_closed:
                self.staging.give(staged)
                return None
            self.staged, self._copying = staged, True
        try:
            with self.staging.device as device:
                lane = lanes.take(device)
                try:
                    for stamp in self._after:
                        lane.after(stamp)
                    if self._gathered:
                        lane.after_current_streams()
                    if self._on_one_device:
                        lane.keep_lock(len(self.parts), self.nbytes)
                    for part, offset in zip(self.parts, self.offsets, strict=True):
                        copy = lane.copy_in if part.on_host else lane.copy
                        if part.nbytes:
                            copy(staged.pointer + offset, part.pointer, part.nbytes)
                    lane.mark()
                except BaseException:
                    lanes.drop(lane)
                    raise
        except BaseException:
            self._copied()
            raise
        return lane

    def finish(self, lane: Lane, *, is_done: bool = False) -> None:
        """Wait until the parts are in staging memory, unless they are there."""
        try:
            lanes.finish(lane, is_done=is_done)
        finally:
            self._copied()

    def _copied(self) -> None:
        with self._lock:
            self._copying = False
        if self.is_closed:
            self.close()

    def close(self) -> None:
        """Give the memory back, when the copy into it has ended."""
        with self._lock:
            self.is_closed = True
            if self.staged is not None and not self._copying:
                self.staging.give(self.staged)
                self.staged = None
