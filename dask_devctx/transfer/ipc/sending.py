"""The sending side: staging memory, which other processes open, and transfers through it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.errors import DriverError
from dask_devctx.transfer import copy_streams
from dask_devctx.transfer.events import Stamp
from dask_devctx.transfer.parcel import Part
from dask_devctx.transfer.pieces import Pool, Ranges, aligned, in_a_row, in_piece

# The smallest allocation, and the smallest limit of a device.
_LEAST: Final = 2 * 2**20


class Buffer(NamedTuple):
    """One allocation that other processes may open by its handle, which no other one gets."""

    pointer: int
    handle: bytes
    ranges: Ranges


class Staging(Pool):
    """The staging memory of one device, up to a limit, or for one larger transfer; thread-safe."""

    # The memory comes from the driver and not from a library's allocator, for two reasons. A handle
    # shows another process a whole allocation. And an allocation that another process has open must
    # not be freed: `retire` only takes buffers out of use, and the caller frees them when no
    # process has them open.

    def __init__(self, device: Device, limit: int) -> None:
        super().__init__()
        self.device = device
        self.limit = max(limit, _LEAST)
        self.used_at = time.monotonic()
        self.nbytes = 0  # of all allocated buffers, the retired ones included
        self.refused = ""  # why the device cannot export memory
        self._work = device._backend.calls.work

    def retire(self) -> list[Buffer]:
        """Return the buffers that have no piece in use, after taking them out of use."""
        with self._locked():
            retired = [buffer for buffer in self._blocks if not buffer.ranges.taken]
            self._blocks = [buffer for buffer in self._blocks if buffer.ranges.taken]
        return retired

    def use_again(self, buffers: Iterable[Buffer]) -> None:
        """Take retired buffers back into use, which some process may have open still."""
        with self._locked():
            self._blocks += buffers

    def free(self, buffers: Iterable[Buffer]) -> None:
        """Give retired buffers back to the device; no process may have them open."""
        for buffer in buffers:
            with self.device:
                self._work.free(buffer.pointer)
            with self._lock:
                self.nbytes -= buffer.ranges.nbytes

    def _made(self, nbytes: int) -> Buffer | None:
        # Powers of two give few buffers: each peer opens each buffer once.
        wanted = max(_LEAST, 1 << (aligned(nbytes) - 1).bit_length())
        wanted = min(wanted, self.limit - self.nbytes)
        if aligned(nbytes) > self.limit and not self.taken:  # a large one passes alone
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
        return Buffer(pointer, handle, Ranges(wanted))


class Sending:
    """Parts on their way to another process through staging memory; :meth:`close` it in the end.

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
        self.place: tuple[Buffer, int] | None = None  # where the parts are: an offset in it
        self._offsets, self.nbytes = in_a_row(part.nbytes for part in parts)
        self._after = tuple(after)
        self._gathered = gathered
        self._on_one_device = on_one_device and not any(part.on_host for part in parts)

    def start(self, *, grow: bool = True) -> bool:
        """Start the copy of the first piece, for :meth:`finish`; False if there is no room now.

        Raise `DriverError` if the device cannot export memory, or has failed.
        """
        # Beyond its limit, only a transfer that needs this much uses it.
        if self.staging.nbytes <= self.staging.limit or aligned(self.nbytes) > self.staging.limit:
            self.staging.used_at = time.monotonic()
        found = self.staging.piece(self.nbytes, grow=grow)
        if found is None:
            return False
        self.place = found
        try:
            with self.staging.device as device, copy_streams.taken(device) as self.stream:
                for stamp in self._after:
                    self.stream.after(stamp)
                if self._gathered:
                    self.stream.after_current_streams()
                if self._on_one_device:
                    self.stream.keep_lock(len(self.parts), self.nbytes)
                self._copy(self.stream, 0)
                self.stream.mark()
        except BaseException:
            self.close()
            raise
        return True

    def _copy(self, stream: copy_streams.CopyStream, begin: int) -> None:
        assert self.place is not None
        buffer, offset = self.place
        for part, at in zip(self.parts, self._offsets, strict=True):
            skip, nbytes = in_piece(begin, at, part.nbytes)
            copy = stream.copy_in if part.on_host else stream.copy
            copy(buffer.pointer + offset + at + skip, part.pointer + skip, nbytes)

    def copy_piece(self, begin: int) -> None:
        """Copy one more piece into staging memory, and wait for it."""
        with self.staging.device as device, copy_streams.taken(device) as stream:
            self._copy(stream, begin)
        copy_streams.finish(stream)

    def finish(self, *, is_done: bool = False) -> None:
        """Wait until the first piece is in staging memory, unless it is there."""
        try:
            copy_streams.finish(self.stream, is_done=is_done)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the staging memory back; no copy into it is under way."""
        self.parts = []  # a connection that broke may keep this, and must keep no value
        place, self.place = self.place, None
        if place is not None:
            self.staging.give(*place)
