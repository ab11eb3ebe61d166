"""A call's use of values: its inputs are on its devices while it runs, and its result has room."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from contextlib import suppress
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.on_device import OF_THIS_TASK
from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.dask_internals.tasks import NODE_PARTS
from dask_devctx.errors import DevctxError
from dask_devctx.transfer import Stamp, nbytes_by_device, walk
from dask_devctx.transfer.move import Move
from dask_devctx.worker.values.value import AWAY, Value, readable

if TYPE_CHECKING:
    from dask_devctx.worker.values.store import Store


class Use:
    """One call's inputs on its devices, and room for its result; a ``with`` block around the call.

    Before it is entered, :meth:`wait` restores what is in host memory and makes room: a coroutine
    calls it on another thread. It is entered and left where the call runs, in its device's scope.
    Without devices, the inputs stay where they are.
    """

    __slots__ = (
        *("_copies", "_devices", "_pinned", "_run", "_store"),
        *("away", "data", "task", "wanted"),
    )

    def __init__(self, run: Any, data: Any) -> None:
        self._run = run
        self._store: Store = run.runs.store
        self._devices: tuple[Device, ...] = run.devices
        self._copies: list[Any] = []  # among the inputs
        self._pinned: dict[Hashable, Value] = {}
        # The inputs in host memory, and the bytes of room: as many as the task reserves, or as the
        # last result of its kind had. With neither, :meth:`wait` does nothing.
        self.away: list[Value] = []
        self.wanted = 0
        self.task = run.task
        self.data: Any = data
        spill = self._store.spill
        if self._devices:
            self.wanted = run.nbytes or spill.expected.get(run.prefix, 0)
            if run.attempts:
                run.memory_s = perf_counter() - run.began_at  # for the attempt before
        if data:
            self.data = {}
            for one, value in data.items():
                if value.__class__ is Value:
                    pinned, value = value, spill.pin_if_here(value)
                    if value is AWAY:
                        self.away.append(pinned)
                    else:
                        self._pinned[one] = pinned
                self.data[one] = value

    def wait(self) -> None:
        """Bring the inputs that are in host memory, and make room for the result; any thread."""
        begun, spill = perf_counter(), self._store.spill
        device = self._devices[0] if self._devices else None
        try:
            while self.away:
                value = self.away[-1]
                self.data[value.key] = spill.pin(value, device)
                self._pinned[value.key] = self.away.pop()
            if self.wanted:
                devices = self._devices if self._run.nbytes else self._devices[:1]
                spill.reserve(self._run, dict.fromkeys(devices, self.wanted))
                for one in devices:
                    spill.make_room(one, 0)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        finally:
            self._run.memory_s += perf_counter() - begun

    async def wait_elsewhere(self) -> None:
        """Do as :meth:`wait` on another thread: this one runs the worker's event loop."""
        if self.away or self.wanted:
            await asyncio.to_thread(self.wait)
        await readable(self._pinned.values())

    def __enter__(self) -> Self:
        run, store, pinned, devices = self._run, self._store, self._pinned, {*self._devices}
        try:
            if run.theirs:  # dask gives its context to known kinds of executors only
                OF_THIS_TASK.set(run.known)
            if not (devices and store.moves_inputs):
                for held in pinned.values():
                    if held.stamp is not None:
                        held.stamp.hold_back_readers()
                return self
            device = self._devices[0]
            if run.may_hold_arrays and nbytes_by_device.found_in(self.task)[0].keys() - devices:
                # It is not changed: it may run elsewhere again.
                self.task = Move(device, guard_source=False).run(self.task)
            begun = perf_counter()
            # The inputs come to the first device; those on several devices of the call stay there.
            for key, whole in self.data.items() if self.data else ():
                value = pinned.get(key) or store.looked_for(key, whole)
                if value is None:
                    continue
                if value.nbytes.keys() <= devices:
                    for one in {device, *value.nbytes}:  # any may read it, and must find it there
                        (value.stamp or value.work()).hold_back(one)
                    if len(devices) > 1:
                        self._copies.append(whole)
                    continue
                here = self.data[key] = store.copies.get(value, whole, device)
                if here is not whole:  # else its type is known, and not how to move it
                    self._copies.append(here)
                    if key in pinned and device not in value.nbytes:
                        store.spill.unpin([pinned.pop(key)])  # all reads are of the copy now
            if self.data:
                run.inputs_s = perf_counter() - begun
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def returned(self, result: Any) -> Any:
        """Note the call's result, which has its room until dask stores it."""
        store, devices, run = self._store, self._devices, self._run
        if devices and store.moves_inputs:
            found = walk.find(result.__class__)
            places: dict[Device, int] = {}
            if found is walk.LEAF:
                places = (nbytes_by_device.find(result.__class__) or nbytes_by_device)(result)
            elif found is not None:
                places = nbytes_by_device(result)
            # The call's own mark is the stamp of a result of one device. Several devices may have
            # made it together, and copies that the call reads live until its work is done.
            work, involved = None, {*places, *devices}
            if self._copies or (places and len(involved) > 1):
                work = Stamp.of_devices(involved)
                if self._copies:
                    store.copies.used(self._copies, devices[0], work)
                    self._copies = []
            if places:
                run.made = Value(run.key, result, places, work)
                if store.spill.open:
                    nbytes = places.get(devices[0], 0)
                    is_small = nbytes < store.spill.accounts[devices[0]].small
                    store.spill.expected[run.prefix] = 0 if is_small else nbytes
                    if not is_small or run.room:
                        store.spill.reserve(run, places)
            elif found is not None:
                run.made = Value(run.key, result, {})  # so that it is not looked up again
        return result

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.data = {}
        spill, devices = self._store.spill, self._devices
        if self._copies:  # it raised: its work on the devices may still run
            with suppress(DevctxError):  # the device failed; the call's own exception counts
                work = Stamp.of_devices(devices)
                self._store.copies.used(self._copies, devices[0], work)
            self._copies = []
        if error is not None and devices and is_out_of_memory(error):
            self._run.stayed = spill.accounts[devices[0]].reasons()
        if self._pinned:
            spill.unpin(self._pinned.values())
            self._pinned = {}
        if error is not None and self._run.room:
            spill.reserve(self._run, {})


# A task's arguments that are given by value: dask keeps them in the nodes of its graph.
for _kind, _parts in NODE_PARTS.items():
    walk.register_parts(_kind, _parts)
