"""Bytes that are reserved on a device, for values on their way there and for results."""

from __future__ import annotations

from collections.abc import Hashable
from time import monotonic, sleep
from typing import TYPE_CHECKING, Final

from dask_devctx.cuda.device import Device
from dask_devctx.transfer import release_held
from dask_devctx.worker.memory.books import Books

if TYPE_CHECKING:
    from dask_devctx.worker.memory.surroundings import Surroundings

# A thread that waits for memory looks again this often, in case nobody wakes it.
_WAIT_S: Final = 0.5
# A busy event loop may take so long to store a result.
_HANDED_S: Final = 1.0
_POLL_S: Final = 0.002


class Reservations:
    """Reserves bytes on a worker's devices, after other values have left them.

    Parameters
    ----------
    books
        Counts the values on the devices.
    around
        Drops copies.

    Attributes
    ----------
    handed
        The reservations for values that dask is about to have, by key.

    Notes
    -----
    Thread-safe.
    """

    def __init__(self, books: Books, around: Surroundings) -> None:
        self._books = books
        self._around = around
        self.handed: dict[Hashable, tuple[Device, int]] = {}
        self._expected: dict[str, int] = {}

    def make_room(self, device: Device, nbytes: int, *, wait: bool = True) -> bool:
        """Reserve bytes on a device, after others have left it; :meth:`give_room` undoes it.

        Returns
        -------
        bool
            Whether they are within the limit. If nothing can leave, they are reserved beyond it.
        """
        ledger = self._books.ledgers.get(device)
        if ledger is None:
            return True
        lock = self._books.lock
        in_vain = not wait
        while True:
            over = self._books.used(device) + nbytes - ledger.limit
            if over <= 0 or in_vain or ledger.stopped:
                break
            if self._around.drop_copies(device, over):
                release_held()
                continue
            with lock:
                ledger.demand = max(ledger.demand, over)
                answers = ledger.answers
                ledger.waiting += 1
                ledger.changed.notify_all()
                try:
                    if ledger.answers == answers and not ledger.stopped:
                        ledger.changed.wait(_WAIT_S)
                finally:
                    ledger.waiting -= 1
                # If nothing can leave now, others may still have left before this was said.
                in_vain = ledger.answers != answers and not ledger.moved_last
        with lock:
            ledger.incoming += nbytes
        return over <= 0

    def give_room(self, device: Device, nbytes: int) -> None:
        """Undo a reservation."""
        ledger = self._books.ledgers.get(device)
        if ledger is not None:
            with self._books.lock:
                ledger.incoming -= nbytes

    def hand_over(self, key: Hashable, device: Device, nbytes: int) -> None:
        """Keep a reservation until a key's value is counted, or :meth:`handed_over` is called."""
        with self._books.lock:
            self.handed_over(key)
            self.handed[key] = device, nbytes

    def handed_over(self, key: Hashable) -> None:
        """Undo the reservation for a key's value, if there is one."""
        if key in self.handed:
            with self._books.lock:
                device, nbytes = self.handed.pop(key, (None, 0))
                if device is not None:
                    self.give_room(device, nbytes)

    def wait_for_results(self, device: Device) -> None:
        """Wait a moment until dask has the results of a device's tasks that ended."""
        until = monotonic() + _HANDED_S
        while monotonic() < until:
            with self._books.lock:
                if not any(one is device for one, _ in self.handed.values()):
                    return
            sleep(_POLL_S)

    # -- results

    def expected(self, prefix: str) -> int:
        """Return how many bytes a task of this prefix will probably make."""
        return self._expected.get(prefix, 0)

    def made(self, prefix: str, nbytes: int) -> None:
        """Learn how many bytes a task of this prefix has made."""
        self._expected[prefix] = nbytes
