"""Values leave a device for host memory: a thread for each device moves them."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Final, TypeGuard

from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory, release_library_caches
from dask_devctx.driver import statuses
from dask_devctx.errors import DriverError
from dask_devctx.transfer import Stamp, release_held
from dask_devctx.transfer.page_locked import PageLockedPool
from dask_devctx.worker.memory.books import Books
from dask_devctx.worker.memory.host_form import HostForm
from dask_devctx.worker.memory.kept import AWAY, Kept
from dask_devctx.worker.memory.ledger import Ledger, in_order_of_leaving
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
            self._leave_all(ledger, ledger.limit)
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
        if _is_sticky(error):
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
        return self._leave_all(ledger, wanted - dropped) or dropped > 0

    def _leave_all(self, ledger: Ledger, wanted: int) -> bool:
        """Move values of so many bytes to host memory; return whether any went.

        Others go in the place of one that fails. The first error is raised if none went.
        """
        moved, first = False, None
        failed: set[int] = set()
        while wanted > 0 and (groups := self._groups(ledger, wanted, failed)):
            before = len(failed)
            try:
                while groups:
                    group = groups.pop()
                    gain = ledger.gain(group)
                    try:
                        went = self._leave(ledger, group)
                    except Exception as error:
                        if _is_sticky(error):
                            raise
                        first, went = first or error, False
                        failed.update(map(id, group))
                    wanted -= gain if went else 0
                    moved |= went
                    with self._lock:
                        ledger.answer(moved)  # a task may go on before the others have left
            finally:
                with self._lock:
                    for kept in itertools.chain.from_iterable(groups):
                        kept.leaving = False
            if len(failed) == before:
                break
        if first is not None and not moved:
            raise first
        return moved

    def _groups(self, ledger: Ledger, wanted: int, but: Container[int]) -> list[list[Kept]]:
        """Return values that leave next, the first one last; those that share memory together."""
        with self._lock:
            self._books.settle()
            found: list[list[Kept]] = []
            gain = 0
            for kept in in_order_of_leaving(ledger, self._around.next_use):
                if gain >= wanted:
                    break
                if kept.leaving or id(kept) in but:
                    continue
                group = ledger.group(kept)
                if any(one.pins or one.leaving or one.stays or one.is_away for one in group):
                    continue
                for one in group:
                    one.leaving = True
                found.append(group)
                gain += ledger.gain(group)
        return found[::-1]

    def _leave(self, ledger: Ledger, group: list[Kept]) -> bool:
        """Move values that share memory to host memory; return whether they went."""
        device, begun = ledger.device, perf_counter()
        form = group[0].form if len(group) == 1 else None
        copied = form is None
        try:
            forms = self._copied(group, device) if form is None else [form]
        except Exception as error:
            with self._lock:
                for kept in group:
                    kept.leaving = False
                    kept.stays = not _passes(error)
            if not group[0].stays:
                raise
            self._notices.stays(group[0].value, error)
            return False
        with self._lock:
            for kept in group:
                kept.leaving = False
            if any(kept.pins for kept in group):  # a task needs it now
                return False
            values = [kept.value for kept in group]
            gain = ledger.gain(group)
            whole = forms[0] if len(forms) == 1 else None  # the values stay together
            for form in forms:
                form.home, form.members = device, []
            for index, kept in enumerate(group):
                kept.form, kept.index = (forms[index], 0) if whole is None else (whole, index)
                kept.form.members.append(weakref.ref(kept))
            for kept in group:
                kept.value, kept.places, kept.after = AWAY, {}, None
                kept.books.left(kept)
            ledger.spills += len(group)
            ledger.spilled_nbytes += gain
        values.clear()  # frees the memory
        if copied:
            self._around.copied(device, gain, perf_counter() - begun, back=False)
        self._notices.spilled(device, ledger.limit)
        for kept in group:
            self._around.moved(kept)
        self._grow.set()
        return True

    def _copied(self, group: Sequence[Kept], device: Device) -> list[HostForm]:
        """Return a host form of all values, or one of each if they share nothing."""
        after = []
        for kept in group:
            stamp = kept.after or self._around.made_by(kept)
            if stamp is None or device not in stamp.devices:
                stamp = Stamp.of_devices([device])
            after.append(stamp)
        values = tuple(kept.value for kept in group)
        form = HostForm.copied(values, device, after, self._pool.take)
        return form.apart(self._pool.take) or [form]


def _is_sticky(error: Exception) -> TypeGuard[DriverError]:
    return isinstance(error, DriverError) and error.code in statuses.STICKY


def _passes(error: Exception) -> bool:
    return isinstance(error, (DriverError, MemoryError, OSError)) or is_out_of_memory(error)
