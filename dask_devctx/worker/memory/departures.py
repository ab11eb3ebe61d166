"""Values leave for host memory: the next one is copied while the one before is completed."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeGuard

from dask_devctx.cuda.out_of_memory import clear_frames, is_out_of_memory
from dask_devctx.driver import statuses
from dask_devctx.errors import DriverError
from dask_devctx.transfer import Stamp
from dask_devctx.transfer.page_locked import PageLockedPool
from dask_devctx.worker.memory.books import Books
from dask_devctx.worker.memory.host_form import Copying, HostForm
from dask_devctx.worker.memory.kept import AWAY, Kept
from dask_devctx.worker.memory.ledger import Ledger, in_order_of_leaving
from dask_devctx.worker.memory.notices import Notices
from dask_devctx.worker.memory.types import are_arrays

if TYPE_CHECKING:
    from dask_devctx.worker.memory.surroundings import Surroundings

# The next copy runs while the thread completes the one before.
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

    def leave(self, ledger: Ledger, wanted: int, *, retry: bool = False) -> bool:
        """Move values of so many bytes to host memory; return whether any went.

        Others go in the place of one that fails. The first error is raised if none went, and an
        error that broke the device is raised at once. ``retry`` says that memory ran out.
        """
        freed = 0
        failed: dict[int, Exception] = {}
        try:
            while wanted > freed and (groups := self._groups(ledger, wanted - freed, failed)):
                before = len(failed)
                freed += self._leave_in_turn(ledger, groups, failed, retry)
                if len(failed) == before:
                    break
            if failed and not freed:
                raise next(iter(failed.values()))
        finally:
            failed.clear()  # the errors' frames know it, and so would keep each other
        return freed > 0

    def _leave_in_turn(
        self,
        ledger: Ledger,
        groups: list[list[Kept]],
        failed: dict[int, Exception],
        retry: bool,
    ) -> int:
        """Move groups of values, the last one first; return the bytes."""
        freed, free_at = 0, 0.0
        under_way: deque[_Departure] = deque()
        group: list[Kept] = []
        try:
            while groups or under_way:
                if groups and self._may_begin(groups[-1], under_way):
                    group = groups.pop()
                    with self._noting(group, failed):
                        under_way.append(self._begin(ledger, group, under_way))
                else:
                    departure, forms = under_way.popleft(), None
                    group = departure.group
                    with self._noting(group, failed):
                        forms = departure.finish(self._pool)
                    if forms and self._let_go(ledger, departure, forms, free_at, retry):
                        freed += departure.gain
                    free_at = perf_counter()
                    if freed:
                        with self._lock:
                            ledger.answer(True)  # a task may go on before the others have left
                group = []
        finally:
            for departure in under_way:
                departure.drop()
                groups.append(departure.group)
            with self._lock:
                for kept in itertools.chain(group, *groups):
                    kept.leaving = False
        return freed

    @staticmethod
    def _may_begin(group: Sequence[Kept], under_way: Sequence[_Departure]) -> bool:
        """Return whether a copy may begin before those under way are completed.

        A value that is no plain array may need memory of the full device for its copy.
        """
        if not under_way:
            return True
        return len(under_way) < _AT_A_TIME and are_arrays(kept.value for kept in group)

    @contextmanager
    def _noting(self, group: Sequence[Kept], failed: dict[int, Exception]) -> Iterator[None]:
        """Note that values stay if they cannot be copied, for now or for good."""
        try:
            yield
        except Exception as error:
            passes = isinstance(error, (DriverError, MemoryError, OSError))
            passes = passes or is_out_of_memory(error)
            with self._lock:
                for kept in group:
                    kept.leaving = False
                    kept.stays = not passes
            if is_sticky(error):
                raise
            clear_frames(error)  # they hold the values
            if passes:
                failed.update((id(kept), error) for kept in group)
            else:
                self._notices.stays(group[0].value, error)

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
        """Begin to copy values that share memory, unless their host form is still right."""
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
        behind = under_way[-1].copying if under_way else None
        copying = HostForm.begun(values, ledger.device, after, self._pool.take, behind)
        return _Departure(group, gain, begun_at, None, copying)

    def _let_go(
        self,
        ledger: Ledger,
        departure: _Departure,
        forms: Sequence[HostForm],
        free_at: float,
        retry: bool,
    ) -> bool:
        """Let values go that have been copied; return whether they went.

        ``free_at`` is when the copy before was completed.
        """
        group, device = departure.group, ledger.device
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
            ledger.spills_for_retries += len(group) if retry else 0
            over = ledger.held + ledger.incoming + ledger.spilled > ledger.limit and not retry
        values.clear()  # frees the memory
        if departure.copying is not None:
            seconds = perf_counter() - max(departure.begun_at, free_at)
            self._around.copied(device, gain, seconds, back=False)
        if over:
            self._notices.spilled(device, ledger.limit)
        for kept in group:
            self._around.moved(kept)
        self._on_taken()
        return True


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
