"""The threads that spill, before the limits of the devices are reached."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, Final

from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import (
    release_library_caches,
)
from dask_devctx.errors import DriverError
from dask_devctx.transfer import release_held
from dask_devctx.worker.threads.executors import near_cpus
from dask_devctx.worker.values.accounting import Account
from dask_devctx.worker.values.leaving import Leaving, is_sticky
from dask_devctx.worker.values.spill import Spill

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S: Final = 0.5
# The fraction of a device's memory that stays free for others.
_SPARE: Final = 0.02
# A device that no values can leave is looked at often, and named in the log so often.
_WARN_EVERY_S: Final = 30.0


class Spilling:
    """Spills a worker's values before the limits are reached: a thread for each device.

    ``next_use`` returns the priority of the next task that needs a key's value, or None.
    ``looks_at_others`` says whether values are spilled, too, when others have taken nearly all of a
    device; not where a pool has the memory, of which the driver's free memory says nothing.
    """

    def __init__(
        self,
        spill: Spill,
        worker_name: str,
        next_use: Callable[[Hashable], Any],
        on_failure: Callable[[Device, DriverError], object],
        *,
        looks_at_others: bool = True,
    ) -> None:
        self.looks_at_others = looks_at_others
        self._spill = spill
        self._lock = spill.lock
        self._on_failure = on_failure
        self._grow = threading.Event()
        self._leaving = Leaving(spill, worker_name, next_use)
        self._failed_at: dict[Device, float] = {}
        spill.spill_all, spill.look = self.spill_all, self._look
        for device, account in spill.accounts.items():
            self._run(str(device), partial(self._keep_below, account))
        if spill.accounts:
            self._run("host", self._grow_ahead)

    @staticmethod
    def _run(name: str, run: Callable[[], object]) -> None:
        threading.Thread(target=run, name=f"devctx-memory-{name}", daemon=True).start()

    def stop(self) -> None:
        """Spill no more values; those that are in host memory are still restored when read."""
        with self._lock:
            self._spill.open = False
            self._grow.set()
            for account in self._spill.accounts.values():
                account.changed.notify_all()

    def _look(self, device: Device) -> None:
        """Wake the thread of a device if there is something to spill; with the lock held."""
        account = self._spill.accounts.get(device)
        if account is not None and account.used > account.prepare:
            if not self._grow.is_set():
                self._grow.set()
            if account.used > account.start:
                account.changed.notify_all()

    def spill_all(self, device: Device) -> int:
        """Spill all values that are not in use from a device that ran out of memory; waits."""
        account = self._spill.accounts.get(device)
        if account is None or not self._spill.open:
            return 0
        with self._lock:
            before = account.counts.held
        try:
            self._leaving.leave(account, account.counts.limit, for_retry=True)
        except Exception as error:
            self._note_failure(account, error)
        release_held()
        with self._lock:
            self._spill.accounts.settle()
            return max(before - account.counts.held, 0)

    # -- the threads

    def _grow_ahead(self) -> None:
        """Page-lock host memory before it is needed."""
        while self._grow.wait() and self._spill.open:
            if not self._spill.pool.grow_ahead():
                self._grow.clear()

    def _keep_below(self, account: Account) -> None:
        """Spill values of a device whenever more than the limit comes near."""
        cpus = near_cpus(account.device.info.cpu_affinity)
        if cpus:
            with suppress(OSError):
                os.sched_setaffinity(0, cpus)
        try:
            while self._spill.open and not account.stopped:
                self._keep_below_once(account)
        finally:
            with self._lock:
                account.stopped = True
                account.changed.notify_all()

    def _keep_below_once(self, account: Account) -> None:
        with self._lock:
            wanted = self._wanted(account)
            if not wanted:
                account.changed.wait(_LOOK_INTERVAL_S)
                wanted = self._wanted(account)
            if not self._spill.open:
                return
        try:
            if not wanted:
                self._look_at_others(account)
                return
            moved = self._free(account, wanted)
        except Exception as error:
            if self._note_failure(account, error):
                return
            moved = False
        with self._lock:
            account.answer(moved)
            if not moved and not account.demand and self._spill.open:
                account.stuck = True
                account.changed.wait(_LOOK_INTERVAL_S / 10)  # until one can leave
                account.stuck = False

    def _wanted(self, account: Account) -> int:
        self._spill.accounts.settle()
        demand, account.demand = account.demand, 0
        used = account.used + self._spill.beside(account.device)
        if used > account.start:
            demand = max(demand, used - account.stop)
        return demand

    def _look_at_others(self, account: Account) -> None:
        """Give memory back to the driver when others have taken nearly all that is left."""
        device = account.device
        for freed in (False, True):
            if not account.counts.held or not self.looks_at_others:
                return
            found = discovery.memory_info(device._backend, device.info)
            if found is None or found[0] >= found[1] * _SPARE:
                return
            # A library may have just cached what was freed. So first only the caches go.
            if not freed or self._free(account, int(found[1] * 2 * _SPARE) - found[0]):
                with device:
                    release_library_caches()

    def _free(self, account: Account, wanted: int) -> bool:
        """Drop copies first, then spill; return whether anything went."""
        dropped = self._spill.drop_copies(account.device, wanted)
        if dropped >= wanted:
            return True
        self._grow.set()  # some of the host memory is taken
        return self._leaving.leave(account, wanted - dropped) or dropped > 0

    def _note_failure(self, account: Account, error: Exception) -> bool:
        """Note why no values left; return whether the device has failed."""
        device = account.device
        if is_sticky(error):
            self._on_failure(device, error)
            account.stopped = True
            return True
        if monotonic() - self._failed_at.get(device, float("-inf")) >= _WARN_EVERY_S:
            self._failed_at[device] = monotonic()
            logger.warning("no values left %s", device, exc_info=error)
        return False
