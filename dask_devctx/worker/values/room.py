"""Room on a worker's devices: what is reserved, and what is freed where memory runs out."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import fields
from time import monotonic, sleep
from typing import Final, TypeVar

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory, release_library_caches
from dask_devctx.errors import DevctxError
from dask_devctx.transfer import release_held
from dask_devctx.worker.values.accounting import Accounts
from dask_devctx.worker.values.copies import Copies
from dask_devctx.worker.values.value import Counts

T = TypeVar("T")

COUNTS: Final = tuple(field.name for field in fields(Counts))
# A thread that waits for memory looks again this often, in case nobody wakes it.
_WAIT_S: Final = 0.5
# A busy event loop may take so long to store a result.
_HANDED_S: Final = 1.0
_POLL_S: Final = 0.002
# So many tasks that ran out of memory are remembered with the reasons.
_STOCKS: Final = 100


class Room:
    """The accounts of a worker's devices, copies and reservations; thread-safe.

    Without limits there are no accounts: there is always room.
    """

    def __init__(
        self, limits: Mapping[Device, int], lock: threading.RLock, copies: Copies | None
    ) -> None:
        self.lock = lock
        self.accounts = Accounts(limits.items(), lock)
        self.copies = copies
        # The bytes of a device that are staging memory.
        self.staging: Callable[[Device], int] = lambda device: 0
        # Spills all of a device that is not in use, after memory ran out; returns the bytes.
        self.spill_all: Callable[[Device], int] = lambda device: 0
        # The reservations for values that dask is about to have, by key.
        self.handed: dict[Hashable, tuple[Device, int]] = {}
        # The bytes that a task of a prefix has made last, and that the next one will probably make.
        self.expected: dict[str, int] = {}
        self._stock: dict[Hashable, dict[str, int]] = {}

    def count(self, name: str, device: Device) -> int | None:
        """Return one of the ``COUNTS`` of a device; None for a device without a limit."""
        account = self.accounts.get(device)
        if account is None:
            return None
        with self.lock:
            self.accounts.settle()
            return int(getattr(account.counts, name))

    def used(self, device: Device) -> int:
        """Return the bytes of a device that count towards its limit."""
        with self.lock:
            self.accounts.settle()
            return self.accounts[device].used + self.beside(device)

    def beside(self, device: Device) -> int:
        """Return the bytes of copies and of staging memory."""
        copies = 0 if self.copies is None else self.copies.nbytes(device)
        return copies + self.staging(device)

    def drop_copies(self, device: Device, nbytes: int) -> int:
        """Drop at least so many bytes of the copies on a device, and return the bytes."""
        dropped = 0 if self.copies is None else self.copies.drop(device, nbytes)
        if dropped:
            release_held()
        return dropped

    def make_room(self, device: Device, nbytes: int, *, wait: bool = True) -> bool:
        """Reserve bytes on a device, after others were spilled; :meth:`give_room` undoes it.

        Returns whether they are within the limit: if nothing can be spilled, they are beyond it.
        """
        account = self.accounts.get(device)
        if account is None:
            return True
        in_vain = not wait
        while True:
            over = self.used(device) + nbytes - account.counts.limit
            if over <= 0 or in_vain or account.stopped:
                break
            if self.drop_copies(device, over):
                continue
            with self.lock:
                account.demand = max(account.demand, over)
                answers = account.answers
                account.waiting += 1
                account.changed.notify_all()
                try:
                    if account.answers == answers and not account.stopped:
                        account.changed.wait(_WAIT_S)
                finally:
                    account.waiting -= 1
                # If nothing can leave now, others may still have left before this was said.
                in_vain = account.answers != answers and not account.moved_last
        with self.lock:
            account.reserved += nbytes
        return over <= 0

    def give_room(self, device: Device, nbytes: int) -> None:
        """Undo a reservation."""
        account = self.accounts.get(device)
        if account is not None:
            with self.lock:
                account.reserved -= nbytes

    def hand_over(self, key: Hashable, device: Device, nbytes: int) -> None:
        """Keep a reservation until a key's value is counted, or :meth:`handed_over` is called."""
        with self.lock:
            if key in self.handed:
                self.handed_over(key)
            self.handed[key] = device, nbytes

    def handed_over(self, key: Hashable) -> None:
        """Undo the reservation for a key's value, if there is one."""
        if key in self.handed:
            with self.lock:
                device, nbytes = self.handed.pop(key, (None, 0))
                if device is not None:
                    self.give_room(device, nbytes)

    def wait_for_results(self, device: Device) -> None:
        """Wait a moment until dask has the results of a device's tasks that ended."""
        until = monotonic() + _HANDED_S
        while monotonic() < until:
            with self.lock:
                if not any(one is device for one, _ in self.handed.values()):
                    return
            sleep(_POLL_S)

    def allocated(self, device: Device, nbytes: int, allocate: Callable[[], T]) -> T:
        """Return what a function allocates; out of memory, more is freed and it is called again."""
        for free in (self._free_copies, self._free_all, None):
            try:
                return allocate()
            except Exception as error:
                if free is None or not is_out_of_memory(error):
                    raise
            free(device, nbytes)
            with suppress(DevctxError), device:
                release_library_caches()
        raise AssertionError

    def _free_copies(self, device: Device, nbytes: int) -> None:
        self.drop_copies(device, nbytes)
        release_held()

    def _free_all(self, device: Device, nbytes: int) -> None:
        self._free_copies(device, nbytes)
        self.spill_all(device)

    # -- memory that ran out

    def take_stock(self, key: Hashable, device: Device) -> None:
        """Note why values cannot leave a device on which memory just ran out for a task."""
        account = self.accounts.get(device)
        if account is not None:
            with self.lock:
                self._stock[key] = account.reasons()
                for old in itertools.islice([*self._stock], max(len(self._stock) - _STOCKS, 0)):
                    del self._stock[old]

    def stock(self, key: Hashable, device: Device) -> tuple[int | None, dict[str, int]]:
        """Return a device's limit, and the bytes that could not leave for a task, by reason."""
        account = self.accounts.get(device)
        if account is None:
            return None, {}
        with self.lock:
            stayed = self._stock.pop(key, None)
            if stayed is None:
                stayed = account.reasons()
        if beside := self.beside(device):
            stayed["of copies, and of transfers between workers"] = beside
        return account.counts.limit, stayed
