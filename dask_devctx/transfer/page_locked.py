"""Host memory for values that leave a device: page-locked and pooled, ordinary beyond a bound.

Copies between a device and page-locked memory run at the speed of the link, and the thread that
starts them does not wait. Locking pages takes longer than a copy. So the pool keeps its pages, and
locks further ones ahead.

Most of that time, the kernel makes the pages: the driver lets one thread do it. So several threads
write to the pages first, which is four times as fast, and the driver finds them made.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.errors import DevctxError
from dask_devctx.transfer import copy_streams
from dask_devctx.transfer.pieces import Pool, Ranges

logger = logging.getLogger(__name__)

_SLAB_NBYTES: Final = 256 * 2**20
_SPARE_SLABS: Final = 2
_LEAST_SLAB_NBYTES: Final = 2 * 2**20
# More threads than these make pages no faster.
_MAKERS: Final = 8
_PART_NBYTES: Final = 16 * 2**20
# One thread copies less than the link carries: the driver takes one, too.
_COPIERS: Final = 4


@dataclass(eq=False, slots=True, weakref_slot=True)
class HostBlock:
    """Host memory of one value's part; it goes back to its pool when this object is collected."""

    memory: Any
    address: int
    nbytes: int
    is_page_locked: bool

    @property
    def contents(self) -> memoryview:
        """The bytes, without a copy. The view keeps the block."""
        array = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        array._block = self  # type: ignore[attr-defined]  # it keeps the block
        return memoryview(array).cast("B")


class _Slab:
    """Pages that are locked together, until neither a pool nor a block has them."""

    def __init__(self, device: Device, nbytes: int) -> None:
        pages = _pages(nbytes)
        self.address = _address(pages)
        self.ranges = Ranges(nbytes)
        _make(self.address, nbytes)
        with device:
            device._backend.calls.work.lock_pages(self.address, nbytes)
        weakref.finalize(self, _unlock, device, pages).atexit = False


def _unlock(device: Device, pages: mmap.mmap) -> None:
    with suppress(DevctxError), device:  # a broken context has no locked pages
        device._backend.calls.work.unlock_pages(_address(pages))


class PageLockedPool(Pool):
    """Host memory for values of all devices, at most ``limit`` bytes of it locked for ``device``.

    ``make_room`` is called with a number of bytes before a block becomes ordinary memory; it
    returns whether it gave blocks back. Thread-safe.
    """

    def __init__(
        self,
        device: Device,
        limit: int,
        *,
        slab: int = _SLAB_NBYTES,
        make_room: Callable[[int], bool] = lambda nbytes: False,
    ) -> None:
        super().__init__()
        self.limit = limit
        self._device = device
        self._slab = max(min(slab, limit), _LEAST_SLAB_NBYTES)
        self._make_room = make_room
        self._refused = False  # no more pages can be locked

    @property
    def nbytes(self) -> int:
        """The bytes that are locked, in use or not."""
        return sum(slab.ranges.nbytes for slab in self._blocks)

    def take(self, nbytes: int) -> HostBlock:
        """Return a block of memory; it goes back when it is collected."""
        found = self.piece(nbytes)
        if found is None and self._make_room(nbytes):
            found = self.piece(nbytes, grow=False)
        if found is None:
            pages = _pages(max(nbytes, 1))
            return HostBlock(pages, _address(pages), nbytes, is_page_locked=False)
        slab, offset = found
        block = HostBlock(slab, slab.address + offset, nbytes, is_page_locked=True)
        weakref.finalize(block, self.give, slab, offset).atexit = False
        return block

    def grow_ahead(self) -> bool:
        """Lock further pages if few are free; return whether it did."""
        with self._growing:
            is_spare = self.nbytes - self.taken >= _SPARE_SLABS * self._slab
            return not is_spare and self._grow(self._slab)

    def close(self) -> None:
        """Unlock the pages that are not in use; the others are unlocked as they come back."""
        self._refused, self._blocks = True, []

    def _made(self, nbytes: int) -> _Slab | None:
        wanted = max(self._slab, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        if self._refused or self.nbytes + wanted > self.limit:
            return None
        try:
            made = _Slab(self._device, wanted)
            return None if self._refused else made  # it was closed meanwhile
        except (DevctxError, OSError) as error:
            if statuses.is_sticky(error):
                raise  # the device failed
            self._refused = True
            logger.warning(
                "No more host memory can be page-locked (%s). Values that leave a device go to "
                "ordinary host memory, which is slower",
                error,
            )
            return None


@functools.cache
def _ring(device: Device) -> PageLockedPool:
    return PageLockedPool(device, _COPIERS * _PART_NBYTES)


def copy_ordinary(device: Device, target: int, source: int, nbytes: int) -> None:
    """Copy ordinary host memory to the device, through page-locked memory in pieces; waits."""

    def copy(offset: int) -> None:
        size = min(_PART_NBYTES, nbytes - offset)
        block = _ring(device).take(size)
        ctypes.memmove(block.address, source + offset, size)
        with device, copy_streams.taken(device) as stream:
            stream.copy_in(target + offset, block.address, size)
        copy_streams.finish(stream)

    with ThreadPoolExecutor(_COPIERS, "devctx-memory-pages") as threads:
        list(threads.map(copy, range(0, nbytes, _PART_NBYTES)))


def _pages(nbytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # fewer pages take less time to make and to lock
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _make(address: int, nbytes: int) -> None:
    """Let the kernel make pages now, on several threads."""
    parts = [
        (address + offset, 0, min(_PART_NBYTES, nbytes - offset))
        for offset in range(0, nbytes, _PART_NBYTES)
    ]
    with ThreadPoolExecutor(min(_MAKERS, len(parts)), "devctx-memory-pages") as threads:
        list(threads.map(ctypes.memset, *zip(*parts, strict=True)))


def _address(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))
