"""Values of a worker's devices are spilled to host memory, and restored where they are needed."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic, perf_counter, sleep
from typing import Any, Final, TypeVar

from dask.utils import format_bytes
from distributed import Worker

from dask_devctx.config.options import fair_memory
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
from dask_devctx.worker.threads import keep_near
from dask_devctx.worker.values.accounting import Account, Accounts, allocations, numbers
from dask_devctx.worker.values.copies import Copies
from dask_devctx.worker.values.host_form import Copying, HostForm
from dask_devctx.worker.values.spill_order import in_order, may_leave, next_use
from dask_devctx.worker.values.value import AWAY, Value

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Values are spilled when more than the first fraction of the limit is used, until the second is.
_START: Final = 0.92
_STOP: Final = 0.86
# Host memory is page-locked ahead from here on.
_PREPARE: Final = 0.5
# The next copy runs while the thread completes the one before.
_AT_A_TIME: Final = 2
_LOOK_S: Final = 0.5
# Values to be spilled ahead are looked at again this often while none of them can leave.
_STUCK_S: Final = 0.05
# A device that a value cannot leave is named in the log so often.
_WARN_EVERY_S: Final = 30.0
# So many looks, until the event loop has stored a result: a garbage collection stops all threads.
_LOOKS: Final = 500
_POLL_S: Final = 0.002
# The fraction of a worker's host memory that may be page-locked.
_PAGE_LOCKED: Final = 0.4


class Spill:
    """A worker's values on devices and in host memory; thread-safe. Without limits, none leaves.

    A thread for each device spills before its limit is reached. ``before`` is the one whose place
    this takes: values that it moves just now are counted here. ``moved`` is called with each value
    that was spilled or restored, ``on_copy`` with each copy, as by `TrafficCounts`.
    """

    def __init__(
        self,
        worker: Worker,
        limits: Mapping[Device, int | None],
        copies: Copies,
        before: Spill | None,
        *,
        moved: Callable[[Value], object],
        on_copy: Callable[..., object],
        on_failure: Callable[[Device, DriverError], object],
    ) -> None:
        self.lock: threading.RLock = threading.RLock() if before is None else before.lock
        # The bytes that a task of a prefix has made last, and that the next one will probably make.
        self.expected: dict[str, int] = {}
        self.accounts = Accounts(limits, self.lock)
        self.copies = copies
        known = [nbytes for nbytes in limits.values() if nbytes is not None]
        self.open = bool(known)  # whether values are spilled
        self.stagings: Mapping[Device, Staging] = {}  # beside the values
        self.worker = worker
        self.moved = moved
        self._on_copy = on_copy
        self._on_failure = on_failure
        self._told = False
        self._told_types: set[type] = set()
        self._warned_at = float("-inf")
        limit = worker.memory_manager.memory_limit or fair_memory(len(limits))
        self.pool = PageLockedPool(
            next(iter(limits)),
            int(_PAGE_LOCKED * limit) if known else 0,
            slab=min(max(known, default=0) // 16, 256 * 2**20),
            make_room=self.drop_host_forms,
        )

    def start(self) -> None:
        """Start the threads that spill ahead."""
        for account in self.accounts.values() if self.open else ():
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
        self.pool.close()

    # -- room

    def make_room(self, device: Device, nbytes: int, *, wait: bool = True) -> bool:
        """Reserve bytes on a device, after others were spilled; :meth:`give_room` undoes it.

        Returns whether they are within the limit: if nothing can be spilled, they are beyond it.
        """
        account = self.accounts[device]
        with self.lock:
            if self.accounts.ended:
                self.accounts.settle()
            account.reserved += nbytes
        while True:
            over = account.counts.held + account.reserved + self.beside(device) - account.limit
            if over <= 0:
                return True
            if not wait:
                return False
            wait = self._free(account, over)

    def give_room(self, device: Device, nbytes: int) -> None:
        """Undo a reservation."""
        with self.lock:
            self.accounts[device].reserved -= nbytes

    def reserve(self, run: Any, room: Mapping[Device, int]) -> None:
        """Reserve bytes for a run, by device and without a wait, in the place of those it has."""
        with self.lock:
            for sign, some in ((-1, run.room), (1, room)):
                for device, nbytes in some.items():
                    self.accounts[device].reserved += sign * nbytes
            run.room = room

    def allocated(self, device: Device, nbytes: int, allocate: Callable[[], T]) -> T:
        """Return what a function allocates; out of memory, more is freed and it is called again."""
        return allocated(allocate, lambda: self.clear(device, nbytes), lambda: self.clear(device))

    def beside(self, device: Device) -> int:
        """Return the bytes of copies and of staging memory."""
        found = self.stagings[device].nbytes if device in self.stagings else 0
        return found + self.copies.there[device].nbytes

    def _free(self, account: Account, wanted: float) -> bool:
        """Drop copies, then spill; return whether anything went, or soon goes."""
        dropped = self.copies.drop(account.device, wanted)
        if dropped >= wanted:
            return True
        if not account.spilling.acquire(blocking=False):  # another thread does it
            with self.lock:
                account.changed.wait(_STUCK_S)
            return True
        try:
            return self._leave(account, wanted - dropped) + dropped > 0
        finally:
            account.spilling.release()

    # -- values that come and go

    def add(self, value: Value) -> None:
        """Count a value from now on: a new one, one from disk, or one of the spill before."""
        with self.lock:
            if value.spill is self:
                return
            value.spill, value.entry = self, None
            if value.value is AWAY:
                assert value.form is not None
                if value.form.home not in self.accounts:
                    value.form.home = next(iter(self.accounts))
                self.accounts.count(value)
                return
            value.stays = len(value.nbytes) > 1 or next(iter(value.nbytes)) not in self.accounts
            self.accounts.count(value, allocations(value.value, value.nbytes))
            for device in value.nbytes:
                account = self.accounts.get(device)
                if account and account.counts.held + account.reserved > account.limit * _START:
                    account.changed.notify_all()

    # -- readers

    def pin_if_here(self, value: Value) -> Any:
        """Return a value that is on its device, pinned; or ``AWAY``, not pinned. Never waits."""
        with self.lock:
            value.touched = next(numbers)
            value.pins += value.value is not AWAY
            return value.value

    def pin(self, value: Value, device: Device | None) -> Any:
        """Return a value, which stays on its device until :meth:`unpin`.

        From host memory it is restored on the device, or on the one that it left.
        """
        whole = self.pin_if_here(value)
        return self._restored(value, device) if whole is AWAY else whole

    def unpin(self, values: Iterable[Value]) -> None:
        """Let values be spilled again."""
        with self.lock:
            for value in values:
                value.pins -= 1

    @contextmanager
    def pinned(self, value: Value, device: Device | None = None) -> Iterator[Any]:
        """Give a value that stays on its device while this is open."""
        found = self.pin(value, device)
        try:
            yield found
        finally:
            self.unpin([value])

    def read(self, value: Value) -> Any:
        """Return the value on its device, for any reader; its work on this thread comes after."""
        with self.pinned(value) as found:
            if value.stamp is not None:
                value.stamp.hold_back_readers()
        return found

    # -- the threads

    def _keep_below(self, account: Account) -> None:
        """Spill values of a device whenever more than the limit comes near."""
        keep_near(account.device.info.cpu_affinity, threading.current_thread())
        while self.open and not account.failed:
            with self.lock:
                self.accounts.settle()
                used = account.used + self.beside(account.device)
                wanted = used - account.limit * _STOP if used > account.limit * _START else 0
                if not wanted:
                    account.changed.wait(_LOOK_S)
            try:
                if wanted and not self._free(account, wanted):
                    sleep(_STUCK_S)
                if account.used > account.limit * _PREPARE and self.open:
                    self.pool.grow_ahead()
            except Exception as error:
                if statuses.is_sticky(error):
                    account.failed = True
                    self._on_failure(account.device, error)
                    return
                logger.warning("no values left %s", account.device, exc_info=True)
                sleep(_WARN_EVERY_S)

    # -- to the host

    def _leave(self, account: Account, wanted: float) -> int:
        """Spill so many bytes, another value for one that fails; return the bytes."""
        # Only the thread that has `account.spilling` may call it.
        freed, free_at = 0, 0.0
        moving: deque[tuple[Value, Copying]] = deque()
        with self.lock:
            self.accounts.settle()
            values = deque(in_order(account, partial(next_use, self.worker)))
        try:
            while True:
                soon = sum(copying.form.nbytes for _, copying in moving)
                more = freed + soon < wanted and not account.failed
                if values and more and len(moving) < _AT_A_TIME:
                    value = values.popleft()
                    if (form := value.form) is not None:  # it is still right
                        freed += self._gone(account, value, form)
                    elif may_leave(value):
                        with self._noting(account.device, value):
                            work, take = value.work(), self.pool.take
                            moving.append((value, Copying(value.value, account.device, work, take)))
                elif moving:
                    value, copying = moving[0]
                    with self._noting(account.device, value):
                        form = copying.finish()
                        took = perf_counter() - max(copying.begun_at, free_at)
                        self._on_copy(account.device.uuid, "host", form.nbytes, took, "spill")
                        freed += self._gone(account, value, form)
                    free_at = perf_counter()
                    moving.popleft()
                    with self.lock:
                        account.changed.notify_all()  # a task may go on before the others have left
                else:
                    break
        except DriverError as error:  # it broke the device
            account.failed = True
            self._on_failure(account.device, error)
        finally:
            for _, copying in moving:
                copying.drop()
        return freed

    def _gone(self, account: Account, value: Value, form: HostForm) -> int:
        """Let a value go that is in host memory, too; return the bytes that this frees."""
        device, counts = account.device, account.counts
        with self.lock:
            # A task may need it now, or another plugin may have moved it.
            if not may_leave(value):
                return 0
            whole, before = value.value, counts.held
            form.home, value.form = device, form
            value.value, value.nbytes, value.stamp = AWAY, {}, None
            value.spill.accounts.count(value)  # another plugin may have taken it over
            freed = before - counts.held
            counts.spills += 1
            counts.spilled_nbytes += form.nbytes
            over = account.used + counts.spilled > account.limit
        del whole  # frees the memory
        if over and not self._told:
            self._told = True
            logger.warning(  # once: dask shows no lines of a lower level
                "worker %s: %s holds more than its limit of %s: values go to host memory, and come "
                "back before their tasks (device_memory_limit). report(client).devices counts them",
                *(self.worker.name, device, format_bytes(account.limit)),
            )
        self.moved(value)
        return freed

    @contextmanager
    def _noting(self, device: Device, value: Value) -> Iterator[None]:
        """Note that a value stays if it cannot be copied, for now or for good."""
        try:
            yield
        except Exception as error:
            if statuses.is_sticky(error):
                raise
            clear_frames(error)  # they hold the values
            if isinstance(error, (DriverError, MemoryError, OSError)) or is_out_of_memory(error):
                if monotonic() - self._warned_at >= _WARN_EVERY_S:
                    self._warned_at = monotonic()
                    logger.warning("a value cannot leave %s now", device, exc_info=error)
                return
            value.stays, kind = True, type(value.value)
            if kind not in self._told_types:
                self._told_types.add(kind)
                logger.warning(
                    "values of the type %s stay on their devices, whatever the limit: they cannot "
                    "be pickled without their device memory (%s: %s)",
                    *(kind.__qualname__, type(error).__name__, error),
                )

    # -- restored

    def _restored(self, value: Value, device: Device | None) -> Any:
        """Return a value on a device, pinned. One thread restores it; others that need it wait."""
        with value.moving:
            found = self.pin_if_here(value)
            form: Any = value.form  # read after: it may leave meanwhile
            if found is not AWAY:
                return found
            device = device or form.home
            self.make_room(device, form.nbytes)
            try:
                begun = perf_counter()
                whole, stamp = self.allocated(device, form.nbytes, partial(form.on_device, device))
                took = perf_counter() - begun
                self._on_copy("host", device.uuid, form.nbytes, took, "spill")
                nbytes = nbytes_by_device(whole)
                under = allocations(whole, nbytes)
                with self.lock:
                    value.nbytes, value.stamp = nbytes, stamp
                    value.pins += 1
                    value.value = whole  # last: a task may see it now
                    value.spill.accounts.count(value, under)
                    if not _stays_right(whole):
                        value.form = None
                    counts = self.accounts[device].counts
                    counts.unspills += 1
                    counts.unspilled_nbytes += form.nbytes
            finally:
                self.give_room(device, form.nbytes)
        self.moved(value)
        return whole

    def clear(self, device: Device, nbytes: int | None = None) -> int:
        """Free memory of a device that ran out: so many bytes of copies, or all not in use; waits.

        Returns the bytes of the copies, and of the values that were spilled.
        """
        if isinstance(new := getattr(self.worker.data, "spill", self), Spill) and new is not self:
            return new.clear(device, nbytes)  # another plugin has the values now
        freed, account = self.copies.drop(device, nbytes), self.accounts[device]
        if nbytes is None and self.open:
            with account.spilling:
                freed += self._leave(account, account.limit)
        release_held()
        with suppress(DevctxError), device:
            release_library_caches()
        return freed

    # -- host memory

    def copied(self, value: Value) -> HostForm:
        """Return a host form of a value that is on its device, where it stays."""
        with self.pinned(value) as whole:
            device = next(iter(value.nbytes))
            return Copying(whole, device, value.work(), self.pool.take).finish()

    def drop_host_forms(self, nbytes: int) -> bool:
        """Give back host memory of values that are on their devices again."""
        with self.lock:
            accounts = self.accounts.values()
            both = [one for account in accounts for one in account.values() if one.form]
            freed = 0
            for value in sorted(both, key=lambda value: value.touched):
                if value.form is not None and freed < nbytes:
                    freed += value.form.nbytes
                    value.form = None
        return freed > 0

    # -- counts

    def counts(self, device: Device) -> dict[str, int | None]:
        """Return the counts of a device."""
        with self.lock:
            self.accounts.settle()
            staging = self.stagings[device].nbytes if self.stagings else 0
            beside = {"copies": self.copies.there[device].nbytes, "staging": staging}
            return vars(self.accounts[device].counts) | beside

    def wait_for_all(self, device: Device) -> None:
        """Wait for the copy ahead that is under way; a moment for results, readers and staging."""
        staging = self.stagings.get(device)
        with self.copies.ahead:
            pass
        for _ in range(_LOOKS):  # readers: a P2P rechunk's for other workers, too
            with self.lock:
                self.accounts.settle()
                account = self.accounts[device]
                used = account.reserved or any(one.pins for one in account.values())
                if not used and not (staging and staging.taken):
                    return
            sleep(_POLL_S)

    def stock(
        self, device: Device, stayed: Mapping[str, int] | None
    ) -> tuple[int | None, dict[str, int]]:
        """Return a device's limit, and the bytes by the reason why they stayed, or now stay."""
        if (limit := self.accounts[device].counts.limit) is None:
            return None, {}
        found = dict(stayed or self.accounts[device].reasons())
        if beside := self.beside(device):
            found["of copies, and of transfers between workers"] = beside
        return limit, found


def _stays_right(value: Any) -> bool:
    """Return whether a host form stays right on the device: tasks write to no plain array."""
    library = type(value).__module__.partition(".")[0]
    return walk.find(type(value)) is walk.LEAF and library not in ("torch", "cudf")
