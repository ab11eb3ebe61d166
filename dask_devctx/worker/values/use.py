"""A call's use of values: its inputs are on its devices while it runs, and its result has room."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.worker.memory.kept import AWAY, Kept

if TYPE_CHECKING:
    from dask_devctx.transfer import Stamp
    from dask_devctx.transfer.lifetime import Lifetime
    from dask_devctx.worker.inputs.inputs import Copies, Inputs
    from dask_devctx.worker.memory.manager import DeviceMemory


class Use:
    """One call's inputs on its devices, and room for its result; a ``with`` block around the call.

    Before it is entered, :meth:`wait` brings what is in host memory and makes room: a coroutine
    calls it on another thread. It is entered and left where the call runs, in its device's scope.
    """

    __slots__ = (
        *("_away", "_copies", "_devices", "_inputs", "_key", "_lifetimes", "_memory", "_pinned"),
        *("_prefix", "_reserved", "_wanted", "brought_s", "data", "made", "task", "waited_s"),
    )

    def __init__(
        self,
        inputs: Inputs | None,
        memory: DeviceMemory | None,
        task: Any,
        key: Hashable,
        prefix: str,
        data: Any,
        lifetimes: Mapping[Hashable, Lifetime],
        devices: tuple[Device, ...],
    ) -> None:
        self._inputs = inputs
        self._memory = memory
        self._key = key
        self._prefix = prefix
        self._lifetimes = lifetimes
        self._devices = devices
        self._reserved = self._wanted = 0
        self._copies: Copies = []
        self._pinned: list[Kept] = []
        self._away: list[Kept] = []
        # The stamp of the work that makes the result; None for a result that holds no arrays.
        self.made: Stamp | None = None
        self.brought_s = self.waited_s = 0.0
        self.task = task
        self.data: Any = data
        if memory is not None:
            if devices:
                self._wanted = memory.reservations.expected(prefix)
            if data:
                self._pin(memory, data)

    def _pin(self, memory: DeviceMemory, data: Mapping[Hashable, Any]) -> None:
        self.data = {}
        for key, value in data.items():
            if value.__class__ is Kept:
                kept, value = value, memory.pin_if_here(value)
                (self._away if value is AWAY else self._pinned).append(kept)
            self.data[key] = value

    @property
    def waits(self) -> bool:
        """Whether :meth:`wait` has something to do."""
        return bool(self._away or self._wanted)

    def wait(self) -> None:
        """Bring the inputs that are in host memory, and make room for the result; any thread."""
        begun, memory = perf_counter(), self._memory
        assert memory is not None
        device = self._devices[0] if self._devices else None
        try:
            while self._away:
                kept = self._away[-1]
                self.data[kept.key] = memory.pin(kept, device)
                self._pinned.append(self._away.pop())
            if self._wanted and device is not None:
                memory.reservations.make_room(device, self._wanted)
                self._reserved, self._wanted = self._wanted, 0
        except BaseException as error:
            self._leave(error)
            raise
        finally:
            self.waited_s += perf_counter() - begun

    def __enter__(self) -> Self:
        try:
            for kept in self._pinned:
                if kept.after is not None:
                    kept.after.hold_back_readers()
            if self._inputs is not None and self._devices:
                self._bring(self._inputs)
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def _bring(self, inputs: Inputs) -> None:
        self.task = inputs.bring_arguments(self.task, *self._devices)
        if not self.data:
            return
        begun, before = perf_counter(), self.data
        self.data, self._copies = inputs.bring(before, self._lifetimes, *self._devices)
        if self._copies and self._pinned and self._memory is not None:
            # Those may leave whose copies have all that is still to be read.
            copied = [
                kept
                for kept in self._pinned
                if self.data[kept.key] is not before[kept.key]
                and kept.places.keys().isdisjoint(self._devices)
            ]
            self._pinned = [kept for kept in self._pinned if kept not in copied]
            self._memory.unpin(copied)
        self.brought_s = perf_counter() - begun

    def returned(self, result: object) -> None:
        """Note the call's result, and keep the room for it until dask has it."""
        memory = self._memory
        if self._inputs is not None and self._devices:
            made = self.made = self._inputs.made(result, self._copies, *self._devices)
            self._copies = []
            if memory is not None and made is not None and made.places:
                memory.reservations.made(self._prefix, made.places.get(self._devices[0], 0))
        if self._reserved and memory is not None:
            memory.reservations.hand_over(self._key, self._devices[0], self._reserved)
            self._reserved = 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._copies and self._inputs is not None:
            self._inputs.gave_up(self._copies, *self._devices)
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        self.data = {}
        memory = self._memory
        if memory is None:
            return
        if error is not None and self._devices and is_out_of_memory(error):
            memory.take_stock(self._key, self._devices[0])
        if self._pinned:
            memory.unpin(self._pinned)
            self._pinned = []
        if self._reserved:
            memory.reservations.give_room(self._devices[0], self._reserved)
            self._reserved = 0
