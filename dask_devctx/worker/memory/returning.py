"""Values come back from host memory, onto the device where they are needed."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory, release_library_caches
from dask_devctx.errors import DevctxError
from dask_devctx.transfer import Stamp, nbytes_by_device, release_held, walk
from dask_devctx.worker.memory.books import Books
from dask_devctx.worker.memory.host_form import HostForm, Take
from dask_devctx.worker.memory.kept import Kept
from dask_devctx.worker.memory.leaving import Leaving
from dask_devctx.worker.memory.reservations import Reservations

if TYPE_CHECKING:
    from dask_devctx.worker.memory.surroundings import Surroundings


class Returning:
    """Brings values back onto a device, after others have made room for them.

    Parameters
    ----------
    books
        Counts the values on the devices.
    reservations
        Makes room.
    leaving
        Moves other values away where an allocation fails in spite of that.
    take
        Returns host memory.
    around
        The parts of the worker that it concerns.

    Notes
    -----
    Thread-safe. One thread brings a value, on its own or ahead of it; others that need it wait.
    """

    def __init__(
        self,
        books: Books,
        reservations: Reservations,
        leaving: Leaving,
        take: Take,
        around: Surroundings,
    ) -> None:
        self._books = books
        self._lock = books.lock
        self._reservations = reservations
        self._leaving = leaving
        self._take = take
        self._around = around
        self._coming: dict[int, Future[None]] = {}

    def bring(self, kept: Kept, device: Device | None, *, wait: bool) -> Any:
        """Return a value on a device; None for the device that it left."""
        while True:
            with self._lock:
                if not kept.is_away:
                    return kept.value
                form = kept.form
                assert form is not None
                coming = self._coming.get(id(form))
                if coming is None:
                    mine = self._coming[id(form)] = Future()
            if coming is not None:
                coming.exception()  # waits; the other thread raises the error
                continue
            try:
                self._bring_form(form, device or form.home, wait=wait)
            finally:
                with self._lock:
                    del self._coming[id(form)]
                mine.set_result(None)

    def _bring_form(self, form: HostForm, device: Device, *, wait: bool) -> None:
        """Bring the values of a host form, or take them apart if there is too little room."""
        nbytes = form.nbytes
        within = self._reservations.make_room(device, nbytes, wait=wait)
        try:
            tight = not within or self._around.is_short_of(device)
            if tight and self._taken_apart(form):
                return  # the caller brings the value alone
            begun = perf_counter()
            values, stamp = self._allocated(form, device)
            self._around.copied(device, form.nbytes, perf_counter() - begun, back=True)
            back = []
            found = [(value, nbytes_by_device(value)) for value in values]
            under = [self._books.memories(*one) for one in found]
            with self._lock:
                self._books.settle()
                for ref in form.members:
                    kept = ref()
                    if kept is None or kept.form is not form or not kept.is_away:
                        continue
                    value, places = found[kept.index]
                    kept.books.count_back(kept)
                    self._around.brought(kept, places, stamp)  # before a task can see the value
                    kept.value, kept.places, kept.after = value, places, stamp
                    kept.memories = under[kept.index]
                    kept.books.arrived(kept)
                    if not _stays_right(values):
                        kept.form = None
                    back.append(kept)
                ledger = self._books.ledgers.get(device)
                if ledger is not None:
                    ledger.unspills += len(back)
                    ledger.unspilled_nbytes += form.nbytes
        finally:
            self._reservations.give_room(device, nbytes)
        for kept in back:
            self._around.moved(kept)

    def _taken_apart(self, form: HostForm) -> bool:
        """Give each of the values that share an allocation its own bytes; return whether it did."""
        forms = form.apart(self._take, unshared=True)
        if forms is None:
            return False
        with self._lock:
            for ref in form.members:
                kept = ref()
                if kept is None or kept.form is not form or not kept.is_away:
                    continue
                kept.form, kept.index = forms[kept.index], 0
                kept.form.members = [ref]
                kept.books.count_away(kept)
        return True

    def _allocated(self, form: HostForm, device: Device) -> tuple[tuple[Any, ...], Stamp]:
        for attempt in itertools.count():
            try:
                return form.on_device(device)
            except Exception as error:
                if not is_out_of_memory(error) or attempt == 2:
                    raise
            self._around.drop_copies(device, form.nbytes)
            release_held()
            if attempt:
                self._leaving.spill_all(device)
            with suppress(DevctxError), device:
                release_library_caches()
        raise AssertionError


def _stays_right(values: tuple[Any, ...]) -> bool:
    """Return whether the host form of values is kept while they are on the device again.

    Plain arrays are not written to: dask's tasks share them. An object, such as a module, may be.
    """
    (value,) = values if len(values) == 1 else (None,)
    if value is None or walk.find(type(value)) is not walk.LEAF:
        return False
    return type(value).__module__.partition(".")[0] not in ("torch", "cudf")
