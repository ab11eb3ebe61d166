"""The device memory of one worker: the values that dask keeps, wherever they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DriverError
from dask_devctx.transfer import Stamp, nbytes_by_device
from dask_devctx.transfer.page_locked import PageLockedPool
from dask_devctx.worker.memory.books import Books
from dask_devctx.worker.memory.host_form import HostForm, Sent
from dask_devctx.worker.memory.kept import AWAY, Kept
from dask_devctx.worker.memory.leaving import Leaving
from dask_devctx.worker.memory.reservations import Reservations
from dask_devctx.worker.memory.returning import Returning

if TYPE_CHECKING:
    from dask_devctx.worker.memory.surroundings import Surroundings

# So many tasks that ran out of memory are remembered with the reasons.
_STOCKS: Final = 100


class DeviceMemory:
    """Keeps the values on a worker's devices within limits; those beyond go to host memory.

    Parameters
    ----------
    limits
        The limit of each device in bytes.
    pool
        Host memory for the values that leave.
    around
        The parts of the worker that it concerns.
    on_failure
        Called with a device that failed, and the driver's error.
    before
        The manager that this takes the place of. Values that it moves just now are counted here.

    Attributes
    ----------
    books, reservations, leaving, pool
        Its parts.
    on_disk
        Whether values went to disk.

    Notes
    -----
    Thread-safe. Each device has a thread that moves its values to host memory. They come back on
    the thread of their task, or ahead of it on the thread that copies inputs.
    """

    def __init__(
        self,
        limits: Mapping[Device, int],
        pool: PageLockedPool,
        around: Surroundings,
        on_failure: Callable[[Device, DriverError], object] = lambda device, error: None,
        before: DeviceMemory | None = None,
    ) -> None:
        self.books: Books = Books(limits, around, None if before is None else before.books.lock)
        self.reservations = Reservations(self.books, around)
        self.leaving = Leaving(self.books, pool, around, on_failure)
        self.on_disk = False
        self._returning = Returning(self.books, self.reservations, self.leaving, pool.take, around)
        self.pool = pool
        self._around = around
        self._lock = self.books.lock
        self._stock: dict[Hashable, dict[str, int]] = {}

    # -- values that come and go

    def keep(self, key: Hashable, value: Any) -> Kept | None:
        """Count a value from now on; None for a value that is on no device of the worker."""
        try:
            places = self._around.places(key)
            if places is None:
                places = nbytes_by_device.estimated(value).places
        except Exception:  # of a user's type; the task that gets the value fails with it
            return None
        if not places or not self.leaving.open:
            return None
        kept = Kept(key, value, self)
        kept.places = places
        kept.stays = len(places) > 1 or next(iter(places)) not in self.books.ledgers
        kept.memories = self.books.memories(value, places)
        with self._lock:
            self.books.arrived(kept)
            self.reservations.handed_over(key)
            for device in places:
                self.leaving.look(device)
        return kept

    def adopt(self, kept: Kept) -> None:
        """Count a value that was read from disk."""
        with self._lock:
            if kept.memory is None and kept.form is not None:
                if kept.form.home not in self.books.ledgers:
                    kept.form.home = next(iter(self.books.ledgers))
                kept.memory = self
                kept.form.members = [weakref.ref(kept)]
                self.books.count_away(kept)

    def take_over(self, kept: Kept) -> None:
        """Count a value that another manager has kept."""
        with self._lock:
            kept.memory = self
            self.books.take_over(kept)

    # -- readers

    def pin(self, kept: Kept, device: Device | None, *, wait: bool = True) -> Any:
        """Return a value, which stays on its device until :meth:`unpin`.

        Parameters
        ----------
        kept
            The value.
        device
            The device on which it comes back from host memory; None for the device that it left.
        wait
            Whether to wait until other values have made room for it.
        """
        value = self.pin_if_here(kept)
        if value is not AWAY:
            return value
        with self._lock:
            kept.pins += 1
        try:
            return self._returning.bring(kept, device, wait=wait)
        except BaseException:
            self.unpin([kept])
            raise

    def pin_if_here(self, kept: Kept) -> Any:
        """Return a value that is on its device, pinned; or ``AWAY``, not pinned. Never waits."""
        if kept.memory is None:
            self.adopt(kept)
        with self._lock:
            self.books.touch(kept)
            kept.pins += kept.value is not AWAY
            return kept.value

    def unpin(self, values: Sequence[Kept]) -> None:
        """Let values leave their devices again."""
        with self._lock:
            may_leave = False
            for kept in values:
                kept.pins -= 1
                may_leave |= not (kept.pins or kept.stays)
            if may_leave:
                for ledger in self.books.ledgers.values():
                    if ledger.stuck:
                        ledger.changed.notify_all()

    def read(self, kept: Kept) -> Any:
        """Return the value on its device, for any reader; its work on this thread comes after."""
        value = self.pin(kept, None)
        if kept.after is not None:
            kept.after.hold_back_readers()
        self.unpin([kept])
        return value

    def to_send(self, kept: Kept, *, whole: bool) -> Any:
        """Return a value on its device; or else a stand-in that is the value in another process.

        ``whole`` gives the :class:`Kept` itself, for a process that keeps it in host memory.
        """
        with self._lock:
            self.books.touch(kept)
            if kept.is_away:
                assert kept.form is not None
                return kept if whole else Sent(kept.form, kept.index)
            value, after = kept.value, kept.after
        if after is not None:
            after.hold_back_readers()
        return value

    # -- memory that ran out

    def take_stock(self, key: Hashable, device: Device) -> None:
        """Note why values cannot leave a device on which memory just ran out for a task."""
        ledger = self.books.ledgers.get(device)
        if ledger is not None:
            with self._lock:
                self._stock[key] = ledger.reasons()
                while len(self._stock) > _STOCKS:
                    del self._stock[next(iter(self._stock))]

    def stock(self, key: Hashable, device: Device) -> tuple[int | None, dict[str, int]]:
        """Return the limit of a device, and the bytes that could not leave it, by reason.

        These are the bytes at the time when memory last ran out for the task.
        """
        ledger = self.books.ledgers.get(device)
        if ledger is None:
            return None, {}
        with self._lock:
            stayed = self._stock.pop(key, None)
            if stayed is None:
                stayed = ledger.reasons()
        if copies := self._around.copies(device):
            stayed["of copies, and of transfers between workers"] = copies
        return ledger.limit, stayed

    # -- host memory

    def copied(self, kept: Kept) -> HostForm:
        """Return a host form of a value that is on its device, where it stays."""
        value = self.pin(kept, None)
        try:
            device, take = next(iter(kept.places)), self.pool.take
            form = HostForm.copied((value,), device, [Stamp.of_devices(kept.places)], take)
            return (form.apart(take) or [form])[0]
        finally:
            self.unpin([kept])

    def spill_clean(self, nbytes: int) -> bool:
        """Give back host memory of values that are on their devices again."""
        with self._lock:
            clean = [
                kept
                for ledger in self.books.ledgers.values()
                for kept in ledger.values()
                if kept.form is not None and not kept.is_away
            ]
            clean.sort(key=lambda kept: kept.touched)
            freed = 0
            while clean and freed < nbytes:
                kept = clean.pop(0)
                freed += kept.form.nbytes if kept.form is not None else 0
                kept.form = None
        return freed > 0

    def __repr__(self) -> str:
        return f"<DeviceMemory of {', '.join(map(str, self.books.ledgers))}>"
