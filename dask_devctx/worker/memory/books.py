"""The books of a worker's devices: the values on each of them, and those that have left it."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.blocks import Memory, memories
from dask_devctx.worker.memory.kept import AWAY, Kept
from dask_devctx.worker.memory.ledger import Ledger

if TYPE_CHECKING:
    from dask_devctx.worker.memory.surroundings import Surroundings


class Books:
    """Counts the values that dask keeps on a worker's devices, and those in host memory.

    Parameters
    ----------
    limits
        The limit of each device in bytes.
    around
        Knows the copies and the staging memory.

    Attributes
    ----------
    lock
        Guards everything here, and the state of each :class:`Kept`.
    ledgers
        The values on each device.

    Notes
    -----
    The methods need the lock, apart from :meth:`used`, :meth:`count` and :meth:`ended`.
    """

    # The limit, the bytes on the device and those that left it; then the moves since the start.
    counts: Final = (
        *("limit", "held", "spilled"),
        *("spills", "spilled_nbytes", "unspills", "unspilled_nbytes"),
    )

    def __init__(self, limits: Mapping[Device, int], around: Surroundings) -> None:
        self.lock = threading.RLock()
        self.ledgers = {
            device: Ledger(device, limit, threading.Condition(self.lock))
            for device, limit in limits.items()
        }
        self._around = around
        self._ended: deque[tuple[Device | None, int, frozenset[Memory]]] = deque()
        self._numbers = itertools.count(1)

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
        kept.touched = next(self._numbers)

    def memories(self, value: Any, places: Mapping[Device, int]) -> frozenset[Memory]:
        """Return the allocations under a value; those that are not known, by its places."""
        try:
            found = memories(value)
        except Exception:
            found = None
        if found is None:
            found = {Memory(device, 0, nbytes) for device, nbytes in places.items()}
        # An allocation without an address is nobody else's.
        return frozenset(
            one if one.base else one._replace(base=-next(self._numbers)) for one in found
        )

    def arrived(self, kept: Kept) -> None:
        """Count a value that is on its device."""
        self.settle()
        self.touch(kept)
        for memory, ledger in self._with_ledgers(kept.memories):
            ledger.add(memory, kept)

    def left(self, kept: Kept) -> None:
        """Count a value that has left its device as one in host memory."""
        for memory, ledger in self._with_ledgers(kept.memories):
            ledger.remove(memory, kept)
        kept.memories = frozenset()
        self.count_away(kept, +1)

    def count_away(self, kept: Kept, sign: int) -> None:
        """Count a value in host memory, or no longer."""
        form = kept.form
        assert form is not None
        if form.home in self.ledgers:
            self.ledgers[form.home].spilled += sign * form.share

    def ended(self, kept: Kept) -> None:
        """Stop counting a value that was released; called by the garbage collector."""
        if kept.value is AWAY:
            if kept.form is not None:
                self._ended.append((kept.form.home, kept.form.share, frozenset()))
        else:
            self._ended.append((None, 0, kept.memories))

    def settle(self) -> None:
        """Count off the values that were released."""
        while self._ended:
            home, nbytes, gone = self._ended.popleft()
            if home is not None and home in self.ledgers:
                self.ledgers[home].spilled -= nbytes
            for memory, ledger in self._with_ledgers(gone):
                ledger.forget_dead(memory)

    def _with_ledgers(self, found: Iterable[Memory]) -> Iterator[tuple[Memory, Ledger]]:
        """Yield the allocations on devices with a limit, each with its device's ledger."""
        for memory in found:
            ledger = self.ledgers.get(memory.device)
            if ledger is not None:
                yield memory, ledger
