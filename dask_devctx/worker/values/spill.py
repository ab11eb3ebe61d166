"""Values of a worker's devices are spilled to host memory, and restored where they are needed."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic, perf_counter, sleep
from typing import Any, Final, TypeVar

from dask.utils import format_bytes

from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import (
    allocated,
    clear_frames,
    is_out_of_memory,
    release_library_caches,
)
from dask_devctx.driver import statuses
from dask_devctx.errors import DevctxError, DriverError
from dask_devctx.transfer import nbytes_by_device, release_held, walk
from dask_devctx.transfer.ipc.sending import Staging
from dask_devctx.transfer.page_locked import PageLockedPool
from dask_devctx.worker.comms.device_types import are_arrays
from dask_devctx.worker.threads.executors import near_cpus
from dask_devctx.worker.values.accounting import (
    Account,
    Accounts,
    allocations,
    gain,
    may_leave,
    numbers,
)
from dask_devctx.worker.values.copies import Copies
from dask_devctx.worker.values.host_form import Copying, HostForm
from dask_devctx.worker.values.value import AWAY, Value

logger = logging.getLogger(__name__)
T = TypeVar("T")

# The next copy runs while the thread completes the one before.
_AT_A_TIME: Final = 2
_LOOK_S: Final = 0.5
# Values to be spilled ahead are looked at again this often while none of them can leave.
_STUCK_S: Final = 0.05
# The fraction of a device's memory that stays free for others.
_SPARE: Final = 0.02
# A device that no values can leave is named in the log so often.
_WARN_EVERY_S: Final = 30.0
# A busy event loop may take so long to store a result.
_HANDED_S: Final = 1.0
_POLL_S: Final = 0.002


@dataclass(eq=False)
class _Group:
    """Values that share memory and leave together."""

    values: list[Value]
    nbytes: int
    forms: list[HostForm] = field(default_factory=list)  # when they are copied
    copying: Copying | None = None
    begun_at: float = 0.0

    def are_arrays(self) -> bool:
        return are_arrays(value.value for value in self.values)


class Spill:
    """A worker's values on devices and in host memory; thread-safe. Without limits, none leaves.

    A thread for each device spills before its limit is reached. ``before`` is the one whose place
    this takes: values that it moves just now are counted here.
    """

    def __init__(
        self,
        limits: Mapping[Device, int],
        pool: PageLockedPool,
        copies: Copies | None = None,
        before: Spill | None = None,
    ) -> None:
        self.lock: threading.RLock = threading.RLock() if before is None else before.lock
        self.on_disk = False  # whether values went to disk
        # The bytes that a task of a prefix has made last, and that the next one will probably make.
        self.expected: dict[str, int] = {}
        self._coming: dict[int, Future[None]] = {}
        self.accounts = Accounts(limits.items(), self.lock)
        self.pool = pool
        self.copies = copies
        self.open = bool(limits)  # whether values are spilled
        self.worker_name = ""
        # Returns the priority of the next task that needs a key's value, or None.
        self.next_use: Callable[[Hashable], Any] = lambda key: None
        self.on_failure: Callable[[Device, DriverError], object] = lambda device, error: None
        # Called with a device, bytes and seconds, and whether they were restored.
        self.moved_bytes: Callable[[Device, int, float, bool], object] = lambda *about: None
        # Called with each value that was spilled or restored.
        self.moved: Callable[[Value], object] = lambda value: None
        self.stagings: Mapping[Device, Staging] = {}  # beside the values
        # Whether values are spilled, too, when others have taken nearly all of a device. Not where
        # a pool has the memory, of which the driver's free memory says nothing.
        self.looks_at_others = True
        self._told = False
        self._told_types: set[type] = set()
        self._warned_at = float("-inf")

    def start(self) -> None:
        """Start the threads that spill ahead."""
        for account in self.accounts.values():
            name = f"devctx-memory-{account.device}"
            threading.Thread(
                target=self._keep_below, args=[account], name=name, daemon=True
            ).start()

    def stop(self) -> None:
        """Spill no more values; those that are in host memory are still restored when read."""
        with self.lock:
            self.open = False
            for account in self.accounts.values():
                account.changed.notify_all()

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

    def beside(self, device: Device) -> int:
        """Return the bytes of copies and of staging memory."""
        copies = 0 if self.copies is None else self.copies.nbytes(device)
        return copies + (self.stagings[device].nbytes if device in self.stagings else 0)

    def _free(self, account: Account, wanted: int) -> bool:
        """Drop copies, then spill; return whether anything went, or soon goes."""
        dropped = 0 if self.copies is None else self.copies.drop(account.device, wanted)
        if dropped >= wanted:
            return True
        with self.lock:
            wanted -= dropped + account.leaving
        if wanted > 0 and self.leave(account, wanted):
            return True
        with self.lock:
            leaving = account.leaving
            if leaving and not dropped:
                account.changed.wait(_LOOK_S)
        with self.lock:
            self.accounts.settle()
        return dropped > 0 or leaving > 0

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
                return value if whole else value.form
            return value.value

    # -- the threads

    def _keep_below(self, account: Account) -> None:
        """Spill values of a device whenever more than the limit comes near."""
        cpus = near_cpus(account.device.info.cpu_affinity)
        if cpus:
            with suppress(OSError):
                os.sched_setaffinity(0, cpus)
        while self.open and not account.failed:
            with self.lock:
                self.accounts.settle()
                used = account.used + self.beside(account.device) - account.leaving
                wanted = used - account.stop if used > account.start else 0
                idle = not wanted and not account.changed.wait(_LOOK_S)
            try:
                if wanted and not self._free(account, wanted):
                    sleep(_STUCK_S)
                elif idle:
                    self._look_at_others(account)
                if account.used > account.prepare and self.open:
                    self.pool.grow_ahead()
            except Exception:
                logger.warning("no values left %s", account.device, exc_info=True)
                sleep(_WARN_EVERY_S)

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
                with suppress(DriverError), device:
                    release_library_caches()

    # -- to the host

    def leave(self, account: Account, wanted: int, *, for_retry: bool = False) -> int:
        """Spill values of so many bytes, others in the place of one that fails; return the bytes.

        Each is copied while the one before is completed.
        """
        freed, free_at = 0, 0.0
        failed: dict[int, Exception] = {}
        left: deque[_Group] = deque()
        try:
            while wanted > freed and (groups := self._groups(account, wanted - freed, failed)):
                left.extend(groups)
                before, n_failed = None, len(failed)
                for group in [*groups, None]:
                    # To copy a value other than a plain array may need memory of the full device.
                    early = before is not None and group is not None and group.are_arrays()
                    if early:
                        self._begin(account, group, failed, before)
                    if before is not None:
                        freed += self._finish(account, before, failed, free_at, for_retry)
                        free_at = perf_counter()
                        self._ended(account, left.popleft())
                    if group is not None and not early:
                        self._begin(account, group, failed, None)
                    before = group
                if len(failed) == n_failed:
                    break
            if failed and not freed and monotonic() - self._warned_at >= _WARN_EVERY_S:
                self._warned_at = monotonic()
                error = next(iter(failed.values()))
                logger.warning("no values left %s", account.device, exc_info=error)
        except DriverError as error:  # it broke the device
            account.failed = True
            self.on_failure(account.device, error)
        finally:
            failed.clear()  # the errors' frames know it, and so would keep each other
            for group in left:
                if group.copying is not None:
                    group.copying.drop()
                self._ended(account, group)
        return freed

    def _groups(self, account: Account, wanted: int, failed: Mapping[int, Exception]) -> list[Any]:
        """Return values that leave next, in order; those that share memory together."""
        found: list[_Group] = []
        with self.lock:
            self.accounts.settle()
            for value in () if account.failed else account.in_order(self.next_use):
                if wanted <= 0:
                    break
                if id(value) in failed or value.leaving:
                    continue
                values = account.group(value)
                if all(map(may_leave, values)):
                    for one in values:
                        one.leaving = True
                    found.append(_Group(values, gain(values)))
                    account.leaving += found[-1].nbytes
                    wanted -= found[-1].nbytes
        return found

    def _ended(self, account: Account, group: _Group) -> None:
        with self.lock:
            for value in group.values:
                value.leaving = False
            account.leaving -= group.nbytes
            account.changed.notify_all()  # a task may go on before the others have left

    def _begin(
        self, account: Account, group: _Group, failed: dict[int, Exception], behind: _Group | None
    ) -> None:
        """Begin to copy values that share memory, unless their host form is still right."""
        group.begun_at = perf_counter()
        forms = [value.form for value in group.values if value.form is not None]
        if len(forms) == len(group.values):
            group.forms = forms
            return
        with self._noting(group, failed):
            group.copying = Copying(
                [value.value for value in group.values],
                group.nbytes,
                account.device,
                [value.work() for value in group.values],
                self.pool.take,
                None if behind is None else behind.copying,
            )

    def _finish(
        self,
        account: Account,
        group: _Group,
        failed: dict[int, Exception],
        free_at: float,
        for_retry: bool,
    ) -> int:
        """Let values go when they have been copied; return the bytes of those that went.

        ``free_at`` is when the copy before was completed.
        """
        if group.copying is not None:
            with self._noting(group, failed):
                group.forms = group.copying.finish()
        device, counts, forms = account.device, account.counts, group.forms
        with self.lock:
            # A task may need it now.
            if not forms or any(value.pins for value in group.values):
                return 0
            wholes = [value.value for value in group.values]
            for value, form in zip(group.values, forms, strict=True):
                form.home, value.form = device, form
                value.value, value.nbytes, value.stamp = AWAY, {}, None
                assert value.spill is not None
                value.spill.accounts.count(value)  # another plugin may have taken it over
            counts.spills += len(wholes)
            counts.spilled_nbytes += group.nbytes
            counts.spills_for_retries += len(wholes) if for_retry else 0
            over = account.used + counts.spilled > counts.limit and not for_retry
        wholes.clear()  # frees the memory
        if group.copying is not None:
            seconds = perf_counter() - max(group.begun_at, free_at)
            self.moved_bytes(device, group.nbytes, seconds, False)
        if over and not self._told:
            self._told = True
            logger.warning(  # once: dask shows no lines of a lower level
                "%s: %s holds more than its limit of %s: values go to host memory, and come back "
                "before their tasks (device_memory_limit). report(client).devices counts them",
                self.worker_name,
                device,
                format_bytes(counts.limit),
            )
        for value in group.values:
            self.moved(value)
        return group.nbytes

    @contextmanager
    def _noting(self, group: _Group, failed: dict[int, Exception]) -> Iterator[None]:
        """Note that values stay if they cannot be copied, for now or for good."""
        try:
            yield
        except Exception as error:
            group.copying = None
            if isinstance(error, DriverError) and error.code in statuses.STICKY:
                raise
            clear_frames(error)  # they hold the values
            if isinstance(error, (DriverError, MemoryError, OSError)) or is_out_of_memory(error):
                failed.update((id(value), error) for value in group.values)
                return
            with self.lock:
                for value in group.values:
                    value.stays = True
            kind = type(group.values[0].value)
            if kind not in self._told_types:
                self._told_types.add(kind)
                logger.warning(
                    "values of the type %s stay on their devices, whatever the limit: they cannot "
                    "be pickled without their device memory (%s: %s)",
                    kind.__qualname__,
                    type(error).__name__,
                    error,
                )

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
                self._restore(value, form, device or form.home)
            finally:
                with self.lock:
                    del self._coming[id(form)]
                mine.set_result(None)

    def _restore(self, value: Value, form: HostForm, device: Device) -> None:
        self.make_room(device, form.nbytes)
        try:
            begun = perf_counter()
            whole, stamp = self.allocated(device, form.nbytes, lambda: form.on_device(device))
            self.moved_bytes(device, form.nbytes, perf_counter() - begun, True)
            nbytes = nbytes_by_device(whole)
            under = allocations(whole, nbytes)
            with self.lock:
                value.nbytes, value.stamp = nbytes, stamp
                value.value = whole  # last: a task may see it now
                assert value.spill is not None
                value.spill.accounts.count(value, under)
                if not _stays_right(whole):
                    value.form = None
                if (account := self.accounts.get(device)) is not None:
                    account.counts.unspills += 1
                    account.counts.unspilled_nbytes += form.nbytes
        finally:
            self.give_room(device, form.nbytes)
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
