"""Values leave a device for host memory: a thread for each device moves them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import release_library_caches
from dask_devctx.errors import DriverError
from dask_devctx.transfer import release_held
from dask_devctx.transfer.page_locked import PageLockedPool
from dask_devctx.worker.memory.books import Books
from dask_devctx.worker.memory.departures import Departures, is_sticky
from dask_devctx.worker.memory.ledger import Ledger
from dask_devctx.worker.memory.notices import Notices
from dask_devctx.worker.threads.executors import near_cpus

if TYPE_CHECKING:
    from dask_devctx.worker.memory.surroundings import Surroundings

_LOOK_INTERVAL_S: Final = 0.5
# The fraction of a device's memory that stays free for others.
_SPARE: Final = 0.02


class Leaving:
    """Moves the values of a worker's devices to host memory, before the limits are reached.

    Parameters
    ----------
    books
        Counts the values on the devices.
    pool
        Host memory for the values.
    around
        The parts of the worker that it concerns.
    on_failure
        Called with a device that failed, and the driver's error.

    Attributes
    ----------
    open
        Whether values leave; false after :meth:`stop`.
    looks_at_others
        Whether values leave, too, when others have taken nearly all of a device. Not where a pool
        has the memory: then the driver's free memory says nothing.
    """

    def __init__(
        self,
        books: Books,
        pool: PageLockedPool,
        around: Surroundings,
        on_failure: Callable[[Device, DriverError], object],
    ) -> None:
        self.open = True
        self.looks_at_others = True
        self._books = books
        self._lock = books.lock
        self._pool = pool
        self._around = around
        self._on_failure = on_failure
        self._notices = Notices(around.worker_name)
        self._grow = threading.Event()
        self._departures = Departures(books, pool, around, self._notices, self._grow.set)
        threading.Thread(target=self._grow_ahead, name="devctx-memory-host", daemon=True).start()
        for device, ledger in books.ledgers.items():
            name = f"devctx-memory-{device}"
            threading.Thread(
                target=self._keep_below, args=(ledger,), name=name, daemon=True
            ).start()

    def stop(self) -> None:
        """Move no more values; those that are in host memory still come back when read."""
        with self._lock:
            self.open = False
            self._grow.set()
            for ledger in self._books.ledgers.values():
                ledger.changed.notify_all()

    def look(self, device: Device) -> None:
        """Wake the thread of a device if there is something to move; with the lock held."""
        ledger = self._books.ledgers.get(device)
        if ledger is not None and ledger.held + ledger.incoming > ledger.prepare:
            if not self._grow.is_set():
                self._grow.set()
            if ledger.held + ledger.incoming > ledger.start:
                ledger.changed.notify_all()

    def spill_all(self, device: Device) -> int:
        """Move all values that are not in use from a device that ran out of memory; wait for it."""
        ledger = self._books.ledgers.get(device)
        if ledger is None or not self.open:
            return 0
        with self._lock:
            before = ledger.held
        try:
            self._departures.leave(ledger, ledger.limit, retry=True)
        except Exception as error:
            self._note_failure(ledger, error)
        release_held()
        with self._lock:
            self._books.settle()
            return max(before - ledger.held, 0)

    # -- the threads

    def _grow_ahead(self) -> None:
        """Run the thread that page-locks host memory before it is needed."""
        while self._grow.wait() and self.open:
            if not self._pool.grow_ahead():
                self._grow.clear()

    def _keep_below(self, ledger: Ledger) -> None:
        """Run a device's thread: move values away whenever more than the limit comes near."""
        cpus = near_cpus(ledger.device.info.cpu_affinity)
        if cpus:
            with suppress(OSError):
                os.sched_setaffinity(0, cpus)
        try:
            while self.open and not ledger.stopped:
                self._keep_below_once(ledger)
        finally:
            with self._lock:
                ledger.stopped = True
                ledger.changed.notify_all()

    def _keep_below_once(self, ledger: Ledger) -> None:
        with self._lock:
            wanted = self._wanted(ledger)
            if not wanted:
                ledger.changed.wait(_LOOK_INTERVAL_S)
                wanted = self._wanted(ledger)
            if not self.open:
                return
        try:
            if not wanted:
                self._look_at_others(ledger)
                return
            moved = self._move_away(ledger, wanted)
        except Exception as error:
            if self._note_failure(ledger, error):
                return
            moved = False
        with self._lock:
            ledger.answer(moved)
            if not moved and not ledger.demand and self.open:
                ledger.stuck = True
                ledger.changed.wait(_LOOK_INTERVAL_S / 10)  # until one can leave
                ledger.stuck = False

    def _note_failure(self, ledger: Ledger, error: Exception) -> bool:
        """Note why no values left; return whether the device has failed."""
        if is_sticky(error):
            self._on_failure(ledger.device, error)
            ledger.stopped = True
            return True
        self._notices.failed(ledger.device, error)
        return False

    def _wanted(self, ledger: Ledger) -> int:
        self._books.settle()
        demand, ledger.demand = ledger.demand, 0
        used = ledger.held + ledger.incoming + self._around.copies(ledger.device)
        if used > ledger.start:
            demand = max(demand, used - ledger.stop)
        return demand

    def _look_at_others(self, ledger: Ledger) -> None:
        """Give memory back to the driver when others have taken nearly all that is left."""
        if not ledger.held or not self.looks_at_others:
            return
        device = ledger.device
        found = discovery.memory_info(device._backend, device.info)
        if found is None or found[0] >= found[1] * _SPARE:
            return
        # A library may have just cached what was freed. So first only the caches go.
        with device:
            release_library_caches()
        found = discovery.memory_info(device._backend, device.info)
        if found is None or found[0] >= found[1] * _SPARE:
            return
        if self._move_away(ledger, int(found[1] * 2 * _SPARE) - found[0]):
            with device:
                release_library_caches()

    # -- the way to host memory

    def _move_away(self, ledger: Ledger, wanted: int) -> bool:
        dropped = self._around.drop_copies(ledger.device, wanted)
        if dropped:
            release_held()
        if dropped >= wanted:
            return True
        return self._departures.leave(ledger, wanted - dropped) or dropped > 0
