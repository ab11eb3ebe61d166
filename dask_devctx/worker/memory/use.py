"""The values in a task's inputs that may leave their devices: they stay while the task runs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import TracebackType
from typing import Any, Self

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.worker.memory.kept import AWAY, Kept
from dask_devctx.worker.memory.manager import DeviceMemory


class Use:
    """One task's use of device memory: its inputs on a device, and room for its result.

    It is a ``with`` block, at whose end the inputs may leave again. Before it is entered,
    :meth:`wait` brings what is not there: a coroutine calls it on another thread.

    Parameters
    ----------
    key
        The task's key.
    memory
        The manager of the device memory.
    data
        The task's inputs, as the worker passes them to its stand-in.
    device
        The task's device; None leaves each input on the device where it is, or was.
    expected
        The bytes of the result, as far as they are known.

    Attributes
    ----------
    data
        The inputs themselves.
    """

    __slots__ = ("_away", "_device", "_expected", "_key", "_memory", "_pinned", "_room", "data")

    def __init__(
        self,
        key: Hashable,
        memory: DeviceMemory,
        data: Mapping[Hashable, Any],
        device: Device | None,
        expected: int = 0,
    ) -> None:
        self._key = key
        self._memory = memory
        self._device = device
        self._room = expected if device is not None else 0
        self._expected = 0
        self._pinned: list[Kept] = []
        self._away: list[tuple[Hashable, Kept]] = []
        self.data: dict[Hashable, Any] = {}
        for key, value in data.items():
            if value.__class__ is Kept:
                kept, value = value, memory.pin_if_here(value)
                if value is AWAY:
                    self._away.append((key, kept))
                    continue
                self._pinned.append(kept)
            self.data[key] = value

    @property
    def waits(self) -> bool:
        """Whether :meth:`wait` has something to do."""
        return bool(self._away or self._room)

    def wait(self) -> None:
        """Bring the inputs that are not on a device, and make room for the result."""
        try:
            while self._away:
                key, kept = self._away.pop()
                self.data[key] = self._memory.pin(kept, self._device)
                self._pinned.append(kept)
            if self._room and self._device is not None:
                self._memory.reservations.make_room(self._device, self._room)
                self._expected, self._room = self._room, 0
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def brought(self, inputs: Mapping[Hashable, Any], devices: Device | tuple[Device, ...]) -> None:
        """Let the values leave whose copies on the task's devices the task gets."""
        devices = devices if isinstance(devices, tuple) else (devices,)
        copied = [
            kept
            for kept in self._pinned
            if inputs[kept.key] is not self.data[kept.key]
            and kept.places.keys().isdisjoint(devices)
        ]
        if copied:
            for kept in copied:
                self._pinned.remove(kept)
                del self.data[kept.key]  # the copies have all that is still to be read
            self._memory.unpin(copied)

    def returned(self) -> None:
        """Keep the room for the result until dask has it."""
        if self._expected and self._device is not None:
            self._memory.reservations.hand_over(self._key, self._device, self._expected)
            self._expected = 0

    def __enter__(self) -> Self:
        """Let this thread's further work come after the copies that bring the inputs."""
        for kept in self._pinned:
            if kept.after is not None:
                kept.after.hold_back_readers()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self._device is not None and is_out_of_memory(error):
            self._memory.take_stock(self._key, self._device)
        self.data = {}
        if self._pinned:
            self._memory.unpin(self._pinned)
            self._pinned = []
        if self._expected and self._device is not None:
            self._memory.reservations.give_room(self._device, self._expected)
            self._expected = 0
