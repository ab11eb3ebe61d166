"""Values leave devices whose limit is near: copies go first, then values go to the host."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic, perf_counter, sleep
from typing import Any, Final

from dask.utils import format_bytes

from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import clear_frames, is_out_of_memory, release_library_caches
from dask_devctx.driver import statuses
from dask_devctx.errors import DriverError
from dask_devctx.transfer.ipc.sending import Staging
from dask_devctx.transfer.page_locked import PageLockedPool
from dask_devctx.worker.comms.device_types import are_arrays
from dask_devctx.worker.threads.executors import near_cpus
from dask_devctx.worker.values.accounting import Account, Accounts, gain, may_leave
from dask_devctx.worker.values.copies import Copies
from dask_devctx.worker.values.host_form import Copying, HostForm
from dask_devctx.worker.values.value import AWAY, Value

logger = logging.getLogger(__name__)

# The next copy runs while the thread completes the one before.
_AT_A_TIME: Final = 2
_LOOK_S: Final = 0.5
# Values to be spilled ahead are looked at again this often while none of them can leave.
_STUCK_S: Final = 0.05
# The fraction of a device's memory that stays free for others.
_SPARE: Final = 0.02
# A device that no values can leave is named in the log so often.
_WARN_EVERY_S: Final = 30.0


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


class Leaving:
    """Spills values of a worker's devices; without limits, none.

    A thread for each device does so before the limit is reached.
    """

    def __init__(
        self,
        limits: Mapping[Device, int],
        pool: PageLockedPool,
        copies: Copies | None,
        lock: threading.RLock,
    ) -> None:
        self.lock = lock
        self.accounts = Accounts(limits.items(), lock)
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
        form = group.values[0].form if len(group.values) == 1 else None
        if form is not None:
            group.forms = [form]
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
            for form in forms:
                form.home, form.members = device, []
            for index, value in enumerate(group.values):
                value.form, value.index = (
                    (forms[0], index) if len(forms) == 1 else (forms[index], 0)
                )
                value.form.members.append(weakref.ref(value))
            for value in group.values:
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
