"""The books of a worker's devices: the values on each of them, and those that have left it."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.blocks import Memory, memories
from dask_devctx.worker.memory.ledger import Ledger

if TYPE_CHECKING:
    from dask_devctx.worker.memory.kept import Kept
    from dask_devctx.worker.memory.surroundings import Surroundings


# The objects of a value whose allocations are looked up: the worker's event loop does it.
_AT_MOST: Final = 5_000

# All books of a process count on: values go from one to the next.
_numbers = itertools.count(1)


class _Counted:
    """The entries of one value in the books; this outlives the value."""

    __slots__ = ("away", "memories")

    def __init__(self) -> None:
        # In host memory: the device that it left, and its bytes. On devices: its allocations.
        self.away: tuple[Device, int] | None = None
        self.memories: frozenset[Memory] = frozenset()


class Books:
    """Counts the values that dask keeps on a worker's devices, and those in host memory.

    Parameters
    ----------
    limits
        The limit of each device in bytes.
    around
        Knows the copies and the staging memory.
    lock
        The lock of the books that these take the place of; a new one by default.

    Attributes
    ----------
    lock
        Guards everything here, and the state of each :class:`Kept`.
    ledgers
        The values on each device.

    Notes
    -----
    The methods need the lock, apart from :meth:`used` and :meth:`count`.

    A value ends when the garbage collector says so. It must not be found any more then: a
    ``__del__`` would run while other threads can still take the value up by its weak reference.
    """

    # The limit, the bytes on the device and those that left it; then the moves since the start.
    counts: Final = (
        *("limit", "held", "spilled"),
        *("spills", "spilled_nbytes", "unspills", "unspilled_nbytes", "spills_for_retries"),
    )

    def __init__(
        self,
        limits: Mapping[Device, int],
        around: Surroundings,
        lock: threading.RLock | None = None,
    ) -> None:
        self.lock = lock or threading.RLock()
        self.ledgers = {
            device: Ledger(device, limit, threading.Condition(self.lock))
            for device, limit in limits.items()
        }
        self._around = around
        self._ended: deque[_Counted] = deque()

    def used(self, device: Device) -> int:
        """Return the bytes of a device that count towards its limit."""
        ledger = self.ledgers[device]
        with self.lock:
            self.settle()
            return ledger.held + ledger.incoming + self._around.copies(device)

    def count(self, name: str, device: Device) -> int | None:
        """Return one of the ``counts`` of a device; None for a device without a limit."""
        ledger = self.ledgers.get(device)
        if ledger is None:
            return None
        with self.lock:
            self.settle()
            return int(getattr(ledger, name))

    def touch(self, kept: Kept) -> None:
        """Note that a value is used now."""
        kept.touched = next(_numbers)

    def memories(self, value: Any, places: Mapping[Device, int]) -> frozenset[Memory]:
        """Return the allocations under a value; those that are not known, by its places."""
        try:
            found = memories(value, _AT_MOST)
        except Exception:
            found = None
        if found is None:
            found = {Memory(device, 0, nbytes) for device, nbytes in places.items()}
        # An allocation without an address is nobody else's.
        return frozenset(one if one.base else one._replace(base=-next(_numbers)) for one in found)

    def arrived(self, kept: Kept) -> None:
        """Count a value that is on its device."""
        self.settle()
        self.touch(kept)
        self._entries(kept).memories = kept.memories
        for memory, ledger in self._with_ledgers(kept.memories):
            ledger.add(memory, kept)

    def left(self, kept: Kept) -> None:
        """Count a value that has left its device as one in host memory."""
        for memory, ledger in self._with_ledgers(kept.memories):
            ledger.remove(memory, kept)
        kept.memories = self._entries(kept).memories = frozenset()
        self.count_away(kept)

    def count_away(self, kept: Kept) -> None:
        """Count a value in host memory."""
        form, counted = kept.form, self._entries(kept)
        assert form is not None
        self._count_back(counted)
        if form.home in self.ledgers:
            counted.away = form.home, form.share
            self.ledgers[form.home].spilled += form.share

    def count_back(self, kept: Kept) -> None:
        """Count a value in host memory no longer."""
        self._count_back(self._entries(kept))

    def take_over(self, kept: Kept) -> None:
        """Count a value that other books have counted."""
        kept.counted = None
        if kept.is_away:
            self.count_away(kept)
        else:
            self.arrived(kept)

    def settle(self) -> None:
        """Count off the values that were released."""
        while self._ended:
            counted = self._ended.popleft()
            self._count_back(counted)
            for memory, ledger in self._with_ledgers(counted.memories):
                ledger.forget_dead(memory)

    def _entries(self, kept: Kept) -> _Counted:
        if kept.counted is None:
            kept.counted = _Counted()
            weakref.finalize(kept, self._ended.append, kept.counted).atexit = False
        return kept.counted  # type: ignore[no-any-return]

    def _count_back(self, counted: _Counted) -> None:
        if counted.away is not None:
            home, nbytes = counted.away
            self.ledgers[home].spilled -= nbytes
            counted.away = None

    def _with_ledgers(self, found: Iterable[Memory]) -> Iterator[tuple[Memory, Ledger]]:
        """Yield the allocations on devices with a limit, each with its device's ledger."""
        for memory in found:
            ledger = self.ledgers.get(memory.device)
            if ledger is not None:
                yield memory, ledger
