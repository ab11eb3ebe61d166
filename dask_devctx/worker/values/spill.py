"""Values of a worker's devices are spilled to host memory, and restored where they are needed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any

from dask_devctx.cuda.device import Device
from dask_devctx.transfer import nbytes_by_device, walk
from dask_devctx.transfer.location import Memory
from dask_devctx.transfer.page_locked import PageLockedPool
from dask_devctx.worker.values.accounting import allocations, numbers
from dask_devctx.worker.values.copies import Copies
from dask_devctx.worker.values.host_form import HostForm, Sent
from dask_devctx.worker.values.room import Room
from dask_devctx.worker.values.value import AWAY, Value


class Spill(Room):
    """A worker's values on devices and in host memory; thread-safe.

    Without limits nothing is spilled. ``before`` is the one whose place this takes: values that it
    moves just now are counted here.
    """

    def __init__(
        self,
        limits: Mapping[Device, int],
        pool: PageLockedPool,
        copies: Copies | None = None,
        before: Spill | None = None,
    ) -> None:
        super().__init__(limits, threading.RLock() if before is None else before.lock, copies)
        self.pool = pool
        self.on_disk = False  # whether values went to disk
        self.open = bool(limits)  # whether values are spilled
        # Called with a device, bytes and seconds, and whether they were restored.
        self.moved_bytes: Callable[[Device, int, float, bool], object] = lambda *about: None
        # Called with each value that was spilled or restored.
        self.moved: Callable[[Value], object] = lambda value: None
        # Called, with the lock, with a device that more is used of.
        self.look: Callable[[Device], object] = lambda device: None
        self._coming: dict[int, Future[None]] = {}

    # -- values that come and go

    def add(self, value: Value) -> None:
        """Count a value on devices from now on."""
        value.spill = self
        if not self.accounts:
            return
        value.stays = len(value.nbytes) > 1 or next(iter(value.nbytes)) not in self.accounts
        under = allocations(value.value, value.nbytes)
        with self.lock:
            self.accounts.add(value, under)
            self.handed_over(value.key)
            for device in value.nbytes:
                self.look(device)

    def adopt(self, value: Value) -> None:
        """Count a value in host memory that was read from disk, or arrived so."""
        with self.lock:
            if value.spill is None and value.form is not None:
                if self.accounts and value.form.home not in self.accounts:
                    value.form.home = next(iter(self.accounts))
                value.form.members = [weakref.ref(value)]
                value.spill = self
                self.accounts.add_away(value)

    def take_over(self, value: Value) -> None:
        """Count a value that another spill has counted."""
        with self.lock:
            under = frozenset() if value.entry is None else value.entry.memories
            value.spill, value.entry = self, None
            if value.is_away:
                self.accounts.add_away(value)
            elif self.accounts:
                self.accounts.add(value, under or allocations(value.value, value.nbytes))

    def count_away(self, value: Value) -> None:
        """Count a value in host memory, and no longer on its devices; with the lock held."""
        self.accounts.add_away(value)

    def count_back(self, value: Value, under: frozenset[Memory]) -> None:
        """Count a value on its devices, in these allocations; with the lock held."""
        self.accounts.remove(value)
        if self.accounts:
            self.accounts.add(value, under)

    # -- readers

    def pin_if_here(self, value: Value) -> Any:
        """Return a value that is on its device, pinned; or ``AWAY``, not pinned. Never waits."""
        if value.spill is None:
            self.adopt(value)
        with self.lock:
            value.touched = next(numbers)
            value.pins += value.value is not AWAY
            return value.value

    def pin(self, value: Value, device: Device | None) -> Any:
        """Return a value, which stays on its device until :meth:`unpin`.

        From host memory it is restored on the device, or on the one that it left.
        """
        if (found := self.pin_if_here(value)) is not AWAY:
            return found
        with self.lock:
            value.pins += 1
        try:
            return self._restored(value, device)
        except BaseException:
            self.unpin([value])
            raise

    def unpin(self, values: Sequence[Value]) -> None:
        """Let values be spilled again."""
        with self.lock:
            may_leave = False
            for value in values:
                value.pins -= 1
                may_leave |= not (value.pins or value.stays)
            if may_leave:
                for account in self.accounts.values():
                    if account.stuck:
                        account.changed.notify_all()

    def read(self, value: Value) -> Any:
        """Return the value on its device, for any reader; its work on this thread comes after."""
        found = self.pin(value, None)
        if value.stamp is not None:
            value.stamp.hold_back_readers()
        self.unpin([value])
        return found

    def to_send(self, value: Value, *, whole: bool) -> Any:
        """Return a value on its device; or else a stand-in that is the value in another process.

        ``whole`` gives the :class:`Value` itself, for a process that keeps it in host memory.
        """
        with self.lock:
            value.touched = next(numbers)
            if value.is_away:
                assert value.form is not None
                return value if whole else Sent(value.form, value.index)
            return value.value

    # -- restored

    def _restored(self, value: Value, device: Device | None) -> Any:
        """Return a value on a device. One thread restores it; others that need it wait."""
        while True:
            with self.lock:
                if not value.is_away:
                    return value.value
                form = value.form
                assert form is not None
                coming = self._coming.get(id(form))
                if coming is None:
                    mine = self._coming[id(form)] = Future()
            if coming is not None:
                coming.exception()  # waits; the other thread raises the error
                continue
            try:
                self._restore(form, device or form.home)
            finally:
                with self.lock:
                    del self._coming[id(form)]
                mine.set_result(None)

    def _restore(self, form: HostForm, device: Device) -> None:
        self.make_room(device, form.nbytes)
        try:
            begun = perf_counter()
            wholes, stamp = self.allocated(device, form.nbytes, lambda: form.on_device(device))
            self.moved_bytes(device, form.nbytes, perf_counter() - begun, True)
            back = []
            found = [(whole, nbytes_by_device(whole)) for whole in wholes]
            under = [allocations(*each) for each in found]
            with self.lock:
                self.accounts.settle()
                for ref in form.members:
                    value = ref()
                    if value is None or value.form is not form or not value.is_away:
                        continue
                    whole, value.nbytes = found[value.index]
                    value.stamp = stamp
                    value.value = whole  # last: a task may see it now
                    assert value.spill is not None
                    value.spill.count_back(value, under[value.index])
                    if not _stays_right(wholes):
                        value.form = None
                    back.append(value)
                if (account := self.accounts.get(device)) is not None:
                    account.counts.unspills += len(back)
                    account.counts.unspilled_nbytes += form.nbytes
        finally:
            self.give_room(device, form.nbytes)
        for value in back:
            self.moved(value)

    # -- host memory

    def copied(self, value: Value) -> HostForm:
        """Return a host form of a value that is on its device, where it stays."""
        whole = self.pin(value, None)
        try:
            device = next(iter(value.nbytes))
            return HostForm.copied((whole,), device, [value.work()], self.pool.take).apart(
                self.pool.take
            )[0]
        finally:
            self.unpin([value])

    def drop_host_forms(self, nbytes: int) -> bool:
        """Give back host memory of values that are on their devices again."""
        with self.lock:
            accounts = self.accounts.values()
            both = [one for account in accounts for one in account.values() if one.form is not None]
            freed = 0
            for value in sorted(both, key=lambda value: value.touched):
                if freed >= nbytes or value.form is None or value.is_away:
                    continue
                freed += value.form.nbytes
                value.form = None
        return freed > 0

    def __repr__(self) -> str:
        return f"<Spill of {', '.join(map(str, self.accounts)) or 'nothing'}>"


def _stays_right(values: tuple[Any, ...]) -> bool:
    """Return whether the host form of values is kept while they are on the device again.

    Plain arrays are not written to: dask's tasks share them. An object, such as a module, may be.
    """
    (value,) = values if len(values) == 1 else (None,)
    if value is None or walk.find(type(value)) is not walk.LEAF:
        return False
    return type(value).__module__.partition(".")[0] not in ("torch", "cudf")
