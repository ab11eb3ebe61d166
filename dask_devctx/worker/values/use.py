"""A call's use of values: its inputs are on its devices while it runs, and its result has room."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from contextlib import suppress
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.dask_internals.tasks import NODE_PARTS
from dask_devctx.errors import DevctxError
from dask_devctx.transfer import Stamp, nbytes_by_device, walk
from dask_devctx.transfer.move import Move
from dask_devctx.transfer.rebuild import register_copy
from dask_devctx.worker.values.value import AWAY, Value

if TYPE_CHECKING:
    from dask_devctx.worker.values.copies import Used
    from dask_devctx.worker.values.store import Store

_POLL_S: Final = 0.001
# The number of objects of a task to look at here; the walk takes a sample of more.
_AT_MOST: Final = 1000


class Use:
    """One call's inputs on its devices, and room for its result; a ``with`` block around the call.

    Before it is entered, :meth:`wait` restores what is in host memory and makes room: a coroutine
    calls it on another thread. It is entered and left where the call runs, in its device's scope.
    Without devices, the inputs stay where they are.
    """

    __slots__ = (
        *("_copies", "_devices", "_key", "_pinned", "_prefix", "_reserved", "_store", "away"),
        *("brought_s", "data", "made", "task", "waited_s", "wanted"),
    )

    def __init__(
        self,
        store: Store | None,
        task: Any,
        key: Hashable,
        prefix: str,
        data: Any,
        devices: tuple[Device, ...],
    ) -> None:
        self._store = store
        self._key = key
        self._prefix = prefix
        self._devices = devices
        self._reserved = 0
        self._copies: Used = []
        self._pinned: dict[Hashable, Value] = {}
        # The inputs in host memory, and the bytes of room: with neither, :meth:`wait` does nothing.
        self.away: list[Value] = []
        self.wanted = 0
        # The result as a value; None if its type holds no arrays.
        self.made: Value | None = None
        self.brought_s = self.waited_s = 0.0
        self.task = task
        self.data: Any = data
        if store is None:
            return
        if devices:
            self.wanted = store.spill.expected.get(prefix, 0)
        if data:
            self.data = {}
            for one, value in data.items():
                if value.__class__ is Value:
                    pinned, value = value, store.spill.pin_if_here(value)
                    if value is AWAY:
                        self.away.append(pinned)
                    else:
                        self._pinned[one] = pinned
                self.data[one] = value

    def wait(self) -> None:
        """Bring the inputs that are in host memory, and make room for the result; any thread."""
        begun, store = perf_counter(), self._store
        assert store is not None
        device = self._devices[0] if self._devices else None
        try:
            while self.away:
                value = self.away[-1]
                self.data[value.key] = store.spill.pin(value, device)
                self._pinned[value.key] = self.away.pop()
            if self.wanted and device is not None:
                store.spill.make_room(device, self.wanted)
                self._reserved, self.wanted = self.wanted, 0
        except BaseException as error:
            self._leave(error)
            raise
        finally:
            self.waited_s += perf_counter() - begun

    async def wait_elsewhere(self) -> None:
        """Do as :meth:`wait` on another thread: this one runs the worker's event loop."""
        if self.away or self.wanted:
            await asyncio.to_thread(self.wait)
        for value in self._pinned.values():
            while value.stamp is not None and not value.stamp.may_be_read():
                await asyncio.sleep(_POLL_S)  # a graph is being captured

    def __enter__(self) -> Self:
        store = self._store
        try:
            if self._devices and store is not None and store.copies is not None:
                if may_hold_arrays(self.task):
                    self._bring_its_own()
                if self.data:
                    self._bring(store)
            else:
                for value in self._pinned.values():
                    if value.stamp is not None:
                        value.stamp.hold_back_readers()
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def _bring_its_own(self) -> None:
        """Bring the arrays that the task itself holds to the first device."""
        if nbytes_by_device.found_in(self.task).keys() - {*self._devices}:
            # The task is not changed: it may run again, on another device.
            self.task = Move(self._devices[0], guard_source=False).run(self.task)

    def _bring(self, store: Store) -> None:
        """Bring the inputs to the first device; those on several devices of the call stay there."""
        device, *others = devices = self._devices
        begun, before = perf_counter(), self.data
        self.data = dict(before)
        for key, whole in before.items():
            value = self._pinned.get(key) or store.looked_for(key, whole)
            if value is None:
                continue
            if not value.exact:
                value.nbytes, value.exact = nbytes_by_device(whole), True
            if others and value.nbytes.keys() <= {*devices}:
                for one in {device, *value.nbytes}:  # any may read it, and must find it there
                    value.work().hold_back(one)
                self._copies.append((value, whole))
                continue
            here = self.data[key] = store.copies.get(value, whole, device)  # type: ignore[union-attr]
            if here is not whole:
                self._copies.append((value, here))
                if key in self._pinned and device not in value.nbytes:
                    store.spill.unpin([self._pinned.pop(key)])  # all reads are of the copy now
        self.brought_s = perf_counter() - begun

    def returned(self, result: object) -> None:
        """Note the call's result: it counts from now on, in the place of the room for it."""
        store = self._store
        if store is None or not self._devices:
            return
        device, *others = self._devices
        if store.copies is not None:
            found = walk.find(result.__class__)
            plain, made = found is None or walk.is_plain(result), None
            if not plain:
                count = nbytes_by_device.find(result.__class__) if found is walk.LEAF else None
                places = (count or nbytes_by_device)(result)
                made = Stamp.of_devices(places, places) if places else None
            work = made
            if others:  # any of the devices may have made the value, wherever it is
                used = dict.fromkeys((*self._devices, *(made.devices if made else ())))
                work = Stamp.of_devices(used, made.places if made else None)
                made = work if made is not None else None
            elif self._copies and (made is None or device not in made.devices):
                # A result on the host does not show whether the device's work is done.
                work = Stamp.of_devices([device])
            if self._copies and work is not None:
                store.copies.used(self._copies, device, work)
                self._copies = []
            if made is not None and made.places:
                value = self.made = Value(self._key, result, made.places, made)
                value.fresh = True
                store.spill.add(value)
                if store.spill.accounts:
                    store.spill.expected[self._prefix] = made.places.get(device, 0)
            elif not plain:
                self.made = Value(self._key, result, {})  # so that it is not looked up again
        if self._reserved:
            store.spill.give_room(device, self._reserved)
            self._reserved = 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._copies:  # it raised: its work on the devices may still run
            copies = self._store.copies  # type: ignore[union-attr]
            with suppress(DevctxError):  # the device failed; the call's own exception counts
                stamp_ = Stamp.of_devices(self._devices)
                copies.used(self._copies, self._devices[0], stamp_)  # type: ignore[union-attr]
        if error is not None or self._reserved:
            self._leave(error)
            return
        self.data = {}  # most calls end here
        if self._pinned:
            self._store.spill.unpin([*self._pinned.values()])  # type: ignore[union-attr]
            self._pinned = {}

    def _leave(self, error: BaseException | None) -> None:
        self.data, self._copies = {}, []
        if self._store is None:
            return
        spill = self._store.spill
        if error is not None and self._devices and is_out_of_memory(error):
            spill.take_stock(error, self._devices[0])
        if self._pinned:
            spill.unpin([*self._pinned.values()])
            self._pinned = {}
        if self._reserved:
            spill.give_room(self._devices[0], self._reserved)
            self._reserved = 0


# -- the arguments that a task is given by value: dask keeps them in the nodes of its graph


def may_hold_arrays(task: Any) -> bool:
    """Return whether a task may hold arrays itself; fast if it holds containers of plain values."""
    find = walk.find
    todo = [task]
    for each in todo:
        found = find(type(each))
        if found is walk.LEAF:
            return True
        if found is None:
            continue
        try:
            parts = found(each)
        except Exception:  # the walk meets it again, and knows what to do
            return True
        if len(todo) + len(parts) > _AT_MOST:  # large values, and values that hold themselves
            return True
        for part in parts:  # faster than a call for a list
            if find(type(part)) is not None:
                todo.append(part)
    return False


def register_nodes() -> None:
    """Register dask's nodes, so that arrays in them are found."""
    for kind, parts in NODE_PARTS.items():
        register_copy(kind, parts)
