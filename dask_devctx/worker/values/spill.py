"""Values of a worker's devices are spilled to host memory, and restored where they are needed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic, perf_counter, sleep
from typing import Any, Final, TypeVar

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import allocated, release_library_caches
from dask_devctx.errors import DevctxError
from dask_devctx.transfer import nbytes_by_device, release_held, walk
from dask_devctx.transfer.page_locked import PageLockedPool
from dask_devctx.worker.values.accounting import allocations, gain, numbers
from dask_devctx.worker.values.copies import Copies
from dask_devctx.worker.values.host_form import Copying, HostForm, Sent
from dask_devctx.worker.values.leaving import Leaving
from dask_devctx.worker.values.value import AWAY, Value

T = TypeVar("T")

# A busy event loop may take so long to store a result.
_HANDED_S: Final = 1.0
_POLL_S: Final = 0.002


class Spill(Leaving):
    """A worker's values on devices and in host memory; thread-safe.

    ``before`` is the one whose place this takes: values that it moves just now are counted here.
    """

    def __init__(
        self,
        limits: Mapping[Device, int],
        pool: PageLockedPool,
        copies: Copies | None = None,
        before: Spill | None = None,
    ) -> None:
        super().__init__(limits, pool, copies, threading.RLock() if before is None else before.lock)
        self.on_disk = False  # whether values went to disk
        # The bytes that a task of a prefix has made last, and that the next one will probably make.
        self.expected: dict[str, int] = {}
        self._coming: dict[int, Future[None]] = {}

    # -- room

    def make_room(self, device: Device, nbytes: int, *, wait: bool = True) -> bool:
        """Reserve bytes on a device, after others were spilled; :meth:`give_room` undoes it.

        Returns whether they are within the limit: if nothing can be spilled, they are beyond it.
        """
        account = self.accounts.get(device)
        if account is None:
            return True
        with self.lock:
            if self.accounts.ended:
                self.accounts.settle()
            account.reserved += nbytes
        while True:
            over = account.counts.held + account.reserved - account.counts.limit
            if device in self.stagings:
                over += self.stagings[device].nbytes
            if self.copies is not None and (there := self.copies.there.get(device)) is not None:
                over += there.nbytes
            if over <= 0:
                return True
            if not wait:
                return False
            wait = self._free(account, over)

    def give_room(self, device: Device, nbytes: int) -> None:
        """Undo a reservation."""
        account = self.accounts.get(device)
        if account is not None:
            with self.lock:
                account.reserved -= nbytes

    def allocated(self, device: Device, nbytes: int, allocate: Callable[[], T]) -> T:
        """Return what a function allocates; out of memory, more is freed and it is called again."""
        return allocated(allocate, lambda: self.clear(device, nbytes), lambda: self.clear(device))

    def spill_all(self, device: Device) -> int:
        """Spill all values that are not in use from a device that ran out of memory; waits."""
        account = self.accounts.get(device)
        if account is None or not self.open:
            return 0
        with self.lock:
            before = account.counts.held
        self.leave(account, account.counts.limit, for_retry=True)
        release_held()
        with self.lock:
            self.accounts.settle()
            return max(before - account.counts.held, 0)

    # -- values that come and go

    def add(self, value: Value) -> None:
        """Count a value on devices from now on."""
        value.spill = self
        if not self.accounts:
            return
        value.stays = len(value.nbytes) > 1 or next(iter(value.nbytes)) not in self.accounts
        under = allocations(value.value, value.nbytes)
        with self.lock:
            self.accounts.count(value, under)
            for device in value.nbytes:
                account = self.accounts.get(device)
                if account and account.counts.held + account.reserved > account.start:
                    account.changed.notify_all()

    def adopt(self, value: Value) -> None:
        """Count a value in host memory that was read from disk, or arrived so."""
        with self.lock:
            if value.spill is None and value.form is not None:
                if self.accounts and value.form.home not in self.accounts:
                    value.form.home = next(iter(self.accounts))
                value.form.members = [weakref.ref(value)]
                value.spill = self
                self.accounts.count(value)

    def take_over(self, value: Value) -> None:
        """Count a value that another spill has counted."""
        with self.lock:
            under = frozenset() if value.entry is None else value.entry.memories
            value.spill, value.entry = self, None
            if self.accounts and not value.is_away:
                under = under or allocations(value.value, value.nbytes)
            self.accounts.count(value, under)

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
            for value in values:
                value.pins -= 1

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
            with self.lock:
                values = {v.index: v for ref in form.members if (v := ref()) and v.form is form}
            wholes, stamp = self.allocated(
                device, form.nbytes, lambda: form.on_device(device, values)
            )
            self.moved_bytes(device, form.nbytes, perf_counter() - begun, True)
            found = {
                index: (nbytes := nbytes_by_device(whole), allocations(whole, nbytes))
                for index, whole in wholes.items()
            }
            with self.lock:
                back = [(index, one) for index, one in values.items() if one.is_away]
                for index, value in back:
                    value.nbytes, under = found[index]
                    value.stamp = stamp
                    value.value = wholes[index]  # last: a task may see it now
                    assert value.spill is not None
                    value.spill.accounts.count(value, under)
                    if len(form.pickles) > 1 or not _stays_right(value.value):
                        value.form = None
                if (account := self.accounts.get(device)) is not None:
                    account.counts.unspills += len(back)
                    account.counts.unspilled_nbytes += form.nbytes
        finally:
            self.give_room(device, form.nbytes)
        for _, value in back:
            self.moved(value)

    def clear(self, device: Device, nbytes: int | None = None) -> int:
        """Free memory of a device that ran out: so many bytes of copies, or all not in use."""
        freed = 0 if self.copies is None else self.copies.drop(device, nbytes)
        if nbytes is None:
            freed += self.spill_all(device)
        release_held()
        with suppress(DevctxError), device:
            release_library_caches()
        return freed

    # -- host memory

    def copied(self, value: Value) -> HostForm:
        """Return a host form of a value that is on its device, where it stays."""
        whole = self.pin(value, None)
        try:
            device, nbytes = next(iter(value.nbytes)), gain([value])
            return Copying([whole], nbytes, device, [value.work()], self.pool.take).finish()[0]
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

    # -- counts

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

    def wait_for_results(self, device: Device) -> None:
        """Wait a moment until dask has the results of a device's tasks that ended."""
        account, until = self.accounts.get(device), monotonic() + _HANDED_S
        while account is not None and monotonic() < until:
            with self.lock:
                self.accounts.settle()
                if not any(value.fresh for value in account.values()):
                    return
            sleep(_POLL_S)

    def take_stock(self, error: BaseException, device: Device) -> None:
        """Note with an error why values cannot leave a device whose memory just ran out."""
        account = self.accounts.get(device)
        if account is not None:
            with self.lock, suppress(AttributeError):
                error._devctx_stayed = account.reasons()  # type: ignore[attr-defined]

    def stock(self, error: BaseException, device: Device) -> tuple[int | None, dict[str, int]]:
        """Return a device's limit, and the bytes that could not leave at an error, by reason."""
        account = self.accounts.get(device)
        if account is None:
            return None, {}
        with self.lock:
            stayed = dict(getattr(error, "_devctx_stayed", None) or account.reasons())
        if beside := self.beside(device):
            stayed["of copies, and of transfers between workers"] = beside
        return account.counts.limit, stayed

    def __repr__(self) -> str:
        return f"<Spill of {', '.join(map(str, self.accounts)) or 'nothing'}>"


def _stays_right(value: Any) -> bool:
    """Return whether the host form of a value is kept while it is on the device again.

    Plain arrays are not written to: dask's tasks share them. An object, such as a module, may be.
    """
    library = type(value).__module__.partition(".")[0]
    return walk.find(type(value)) is walk.LEAF and library not in ("torch", "cudf")
