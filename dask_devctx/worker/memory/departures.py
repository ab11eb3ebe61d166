"""The way of values to host memory: one is copied while the one before is completed."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Container, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeGuard

from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.driver import statuses
from dask_devctx.errors import DriverError
from dask_devctx.transfer import Stamp
from dask_devctx.transfer.page_locked import PageLockedPool
from dask_devctx.worker.memory.books import Books
from dask_devctx.worker.memory.host_form import Copying, HostForm
from dask_devctx.worker.memory.kept import AWAY, Kept
from dask_devctx.worker.memory.ledger import Ledger, in_order_of_leaving
from dask_devctx.worker.memory.notices import Notices

if TYPE_CHECKING:
    from dask_devctx.worker.memory.surroundings import Surroundings

# So many copies are under way at a time: one is done while the thread completes the one before.
_AT_A_TIME: Final = 2


class Departures:
    """Moves values to host memory, the ones that are needed last first.

    Parameters
    ----------
    books
        Counts the values on the devices.
    pool
        Host memory for the values.
    around
        The parts of the worker that it concerns.
    notices
        Tells the user.
    on_taken
        Called after some of the pool was taken.
    """

    def __init__(
        self,
        books: Books,
        pool: PageLockedPool,
        around: Surroundings,
        notices: Notices,
        on_taken: Callable[[], object],
    ) -> None:
        self._books = books
        self._lock = books.lock
        self._pool = pool
        self._around = around
        self._notices = notices
        self._on_taken = on_taken

    def leave(self, ledger: Ledger, wanted: int) -> bool:
        """Move values of so many bytes to host memory; return whether any went.

        Others go in the place of one that fails. The first error is raised if none went, and an
        error that broke the device is raised at once.
        """
        moved, first = False, None
        failed: set[int] = set()
        while wanted > 0 and (groups := self._groups(ledger, wanted, failed)):
            before = len(failed)
            under_way: deque[_Departure] = deque()
            completed_at = 0.0
            try:
                while groups or under_way:
                    gain = 0
                    try:
                        if groups and len(under_way) < _AT_A_TIME:
                            group = groups.pop()
                            under_way.append(self._begin(ledger, group, under_way))
                            continue
                        departure = under_way.popleft()
                        group = departure.group
                        if self._complete(ledger, departure, completed_at):
                            gain, moved = departure.gain, True
                        completed_at = perf_counter()
                    except Exception as error:
                        if not self._stay(group, error):
                            first = first or error
                            failed.update(map(id, group))
                    wanted -= gain
                    with self._lock:
                        ledger.answer(moved)  # a task may go on before the others have left
            finally:
                for departure in under_way:
                    departure.drop()
                with self._lock:
                    left = (departure.group for departure in under_way)
                    for kept in itertools.chain.from_iterable([*groups, *left]):
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

    def _begin(
        self, ledger: Ledger, group: list[Kept], under_way: Sequence[_Departure]
    ) -> _Departure:
        """Begin to copy values that share memory, unless a host form is right still."""
        gain, begun_at = ledger.gain(group), perf_counter()
        form = group[0].form if len(group) == 1 else None
        if form is not None:
            return _Departure(group, gain, begun_at, form, None)
        after = []
        for kept in group:
            stamp = kept.after or self._around.made_by(kept)
            if stamp is None or ledger.device not in stamp.devices:
                stamp = Stamp.of_devices([ledger.device])
            after.append(stamp)
        values = tuple(kept.value for kept in group)
        behind = next((one.copying for one in reversed(under_way) if one.copying), None)
        copying = HostForm.begun(values, ledger.device, after, self._pool.take, behind)
        return _Departure(group, gain, begun_at, None, copying)

    def _complete(self, ledger: Ledger, departure: _Departure, free_at: float) -> bool:
        """Wait for the copy of values, and let them go; return whether they went.

        ``free_at`` is when the copy before was completed.
        """
        group, device = departure.group, ledger.device
        forms = departure.finish(self._pool)
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
                form, kept.index = (forms[index], 0) if whole is None else (whole, index)
                kept.form = form
                form.members.append(weakref.ref(kept))
            for kept in group:
                kept.value, kept.places, kept.after = AWAY, {}, None
                kept.books.left(kept)
            ledger.spills += len(group)
            ledger.spilled_nbytes += gain
        values.clear()  # frees the memory
        if departure.copying is not None:
            seconds = perf_counter() - max(departure.begun_at, free_at)
            self._around.copied(device, gain, seconds, back=False)
        self._notices.spilled(device, ledger.limit)
        for kept in group:
            self._around.moved(kept)
        self._on_taken()
        return True

    def _stay(self, group: Sequence[Kept], error: Exception) -> bool:
        """Note that values did not leave; return whether they never can."""
        passes = isinstance(error, (DriverError, MemoryError, OSError)) or is_out_of_memory(error)
        with self._lock:
            for kept in group:
                kept.leaving = False
                kept.stays = not passes
        if is_sticky(error):
            raise error
        if not passes:
            self._notices.stays(group[0].value, error)
        return not passes


class _Departure(NamedTuple):
    """Values that share memory, and their host form or the copy that makes it."""

    group: list[Kept]
    gain: int
    begun_at: float
    form: HostForm | None
    copying: Copying | None

    def finish(self, pool: PageLockedPool) -> list[HostForm]:
        """Return a host form of all values, or one of each if they share nothing."""
        if self.form is not None:
            return [self.form]
        assert self.copying is not None
        form = self.copying.finish()
        return form.apart(pool.take) or [form]

    def drop(self) -> None:
        if self.copying is not None:
            self.copying.drop()


def is_sticky(error: Exception) -> TypeGuard[DriverError]:
    """Return whether an error broke its device."""
    return isinstance(error, DriverError) and error.code in statuses.STICKY
