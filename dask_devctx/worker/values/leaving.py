"""Values leave a device: the next one is copied to the host while the one before is completed."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final, NamedTuple, TypeGuard

from dask.utils import format_bytes

from dask_devctx.cuda.out_of_memory import clear_frames, is_out_of_memory
from dask_devctx.driver import statuses
from dask_devctx.errors import DriverError
from dask_devctx.worker.values.accounting import Account, gain
from dask_devctx.worker.values.host_form import Copying, HostForm
from dask_devctx.worker.values.spill import Spill
from dask_devctx.worker.values.spillable import are_arrays
from dask_devctx.worker.values.value import AWAY, Value

logger = logging.getLogger(__name__)

# The next copy runs while the thread completes the one before.
_AT_A_TIME: Final = 2


class Leaving:
    """Spills values of a device.

    ``next_use`` returns the priority of the next task that needs a key's value, or None.
    """

    def __init__(self, spill: Spill, worker_name: str, next_use: Callable[[Hashable], Any]) -> None:
        self._spill = spill
        self._lock = spill.lock
        self._worker_name = worker_name
        self._next_use = next_use
        self._told = False
        self._told_types: set[type] = set()

    def leave(self, account: Account, wanted: int, *, for_retry: bool = False) -> bool:
        """Spill values of so many bytes; return whether any went.

        Others go in the place of one that fails. The first error is raised if none went, and an
        error that broke the device is raised at once.
        """
        freed = 0
        failed: dict[int, Exception] = {}
        try:
            while wanted > freed and (groups := self._groups(account, wanted - freed, failed)):
                before = len(failed)
                freed += self._leave_in_turn(account, groups, failed, for_retry)
                if len(failed) == before:
                    break
            if failed and not freed:
                raise next(iter(failed.values()))
        finally:
            failed.clear()  # the errors' frames know it, and so would keep each other
        return freed > 0

    def _groups(self, account: Account, wanted: int, but: Container[int]) -> list[list[Value]]:
        """Return values that leave next, the first one last; those that share memory together."""
        with self._lock:
            self._spill.accounts.settle()
            found: list[list[Value]] = []
            nbytes = 0
            for value in account.in_order(self._next_use):
                if nbytes >= wanted:
                    break
                if value.leaving or id(value) in but:
                    continue
                group = account.group(value)
                if any(one.pins or one.leaving or one.stays or one.is_away for one in group):
                    continue
                for one in group:
                    one.leaving = True
                found.append(group)
                nbytes += gain(group)
        return found[::-1]

    def _leave_in_turn(
        self,
        account: Account,
        groups: list[list[Value]],
        failed: dict[int, Exception],
        for_retry: bool,
    ) -> int:
        """Spill groups of values, the last one first; return the bytes."""
        freed, free_at = 0, 0.0
        under_way: deque[_UnderWay] = deque()
        group: list[Value] = []
        try:
            while groups or under_way:
                # A value that is no plain array may need memory of the full device for its copy.
                if groups and (
                    not under_way
                    or (len(under_way) < _AT_A_TIME and are_arrays(v.value for v in groups[-1]))
                ):
                    group = groups.pop()
                    with self._noting(group, failed):
                        behind = under_way[-1].copying if under_way else None
                        under_way.append(self._begin(account, group, behind))
                else:
                    leaving, forms = under_way.popleft(), None
                    group = leaving.group
                    with self._noting(group, failed):
                        forms = leaving.finish(self._spill)
                    if forms and self._let_go(account, leaving, forms, free_at, for_retry):
                        freed += leaving.nbytes
                    free_at = perf_counter()
                    if freed:
                        with self._lock:
                            account.answer(True)  # a task may go on before the others have left
                group = []
        finally:
            for leaving in under_way:
                if leaving.copying is not None:
                    leaving.copying.drop()
                groups.append(leaving.group)
            with self._lock:
                for value in itertools.chain(group, *groups):
                    value.leaving = False
        return freed

    def _begin(self, account: Account, group: list[Value], behind: Copying | None) -> _UnderWay:
        """Begin to copy values that share memory, unless their host form is still right."""
        nbytes, begun_at = gain(group), perf_counter()
        form = group[0].form if len(group) == 1 else None
        if form is not None:
            return _UnderWay(group, nbytes, begun_at, form, None)
        values = tuple(value.value for value in group)
        after = [value.work() for value in group]
        copying = HostForm.begun(values, account.device, after, self._spill.pool.take, behind)
        return _UnderWay(group, nbytes, begun_at, None, copying)

    def _let_go(
        self,
        account: Account,
        leaving: _UnderWay,
        forms: Sequence[HostForm],
        free_at: float,
        for_retry: bool,
    ) -> bool:
        """Let values go that have been copied; return whether they went.

        ``free_at`` is when the copy before was completed.
        """
        group, device, counts = leaving.group, account.device, account.counts
        with self._lock:
            for value in group:
                value.leaving = False
            if any(value.pins for value in group):  # a task needs it now
                return False
            wholes = [value.value for value in group]
            nbytes = gain(group)
            together = len(forms) == 1
            for form in forms:
                form.home, form.members = device, []
            for index, value in enumerate(group):
                value.form, value.index = (forms[0], index) if together else (forms[index], 0)
                value.form.members.append(weakref.ref(value))
            for value in group:
                value.value, value.nbytes, value.stamp = AWAY, {}, None
                assert value.spill is not None
                value.spill.count_away(value)
            counts.spills += len(group)
            counts.spilled_nbytes += nbytes
            counts.spills_for_retries += len(group) if for_retry else 0
            over = account.used + counts.spilled > counts.limit and not for_retry
        wholes.clear()  # frees the memory
        if leaving.copying is not None:
            seconds = perf_counter() - max(leaving.begun_at, free_at)
            self._spill.moved_bytes(device, nbytes, seconds, False)
        if over and not self._told:
            self._told = True
            logger.warning(  # once: dask shows no lines of a lower level
                "%s: %s holds more than its limit of %s: values go to host memory, and come back "
                "before their tasks (device_memory_limit). report(client).devices counts them",
                self._worker_name,
                device,
                format_bytes(counts.limit),
            )
        for value in group:
            self._spill.moved(value)
        return True

    @contextmanager
    def _noting(self, group: Sequence[Value], failed: dict[int, Exception]) -> Iterator[None]:
        """Note that values stay if they cannot be copied, for now or for good."""
        try:
            yield
        except Exception as error:
            passes = isinstance(error, (DriverError, MemoryError, OSError))
            passes = passes or is_out_of_memory(error)
            with self._lock:
                for value in group:
                    value.leaving = False
                    value.stays = not passes
            if is_sticky(error):
                raise
            clear_frames(error)  # they hold the values
            kind = type(group[0].value)
            if passes:
                failed.update((id(value), error) for value in group)
            elif kind not in self._told_types:
                self._told_types.add(kind)
                logger.warning(
                    "values of the type %s stay on their devices, whatever the limit: they cannot "
                    "be pickled without their device memory (%s: %s)",
                    kind.__qualname__,
                    type(error).__name__,
                    error,
                )


class _UnderWay(NamedTuple):
    """Values that share memory, and their host form or the copy that makes it."""

    group: list[Value]
    nbytes: int
    begun_at: float
    form: HostForm | None
    copying: Copying | None

    def finish(self, spill: Spill) -> list[HostForm]:
        """Return a host form of all values, or one of each."""
        if self.copying is None:
            assert self.form is not None
            return [self.form]
        return self.copying.finish().apart(spill.pool.take)


def is_sticky(error: Exception) -> TypeGuard[DriverError]:
    """Return whether an error broke its device."""
    return isinstance(error, DriverError) and error.code in statuses.STICKY
