"""A task with a claim: on several devices, on a part of one, or with a reservation of memory."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from distributed import Reschedule

from dask_devctx.cuda.device import Device
from dask_devctx.worker.failures.others import Others
from dask_devctx.worker.placement.admission import Claim
from dask_devctx.worker.task import DeviceTask


class Memory(Protocol):
    """The memory of a worker's devices, as reservations need it."""

    def make_room(self, device: Device, nbytes: int) -> bool:
        """Reserve bytes on a device, after others have left it; it may wait for them."""

    def give_room(self, device: Device, nbytes: int) -> None:
        """Undo a reservation."""


class ClaimedTask(DeviceTask):
    """A task that runs when its claim is granted, and then gives back what it had.

    Parameters
    ----------
    task, device
        As for :class:`~dask_devctx.worker.task.DeviceTask`; the device is the first of the claim.
    claim
        All that it takes on its devices.
    makes_actor
        Whether its result is an actor, which keeps the claim.
    room
        Makes room for the bytes that it reserves; None if there is no limit.
    **given
        As for :class:`~dask_devctx.worker.task.DeviceTask`.

    Notes
    -----
    The executor of its first device starts it when the claim is granted. A coroutine waits for that
    itself, and so does a task on threads of its user.
    """

    __slots__ = ("claim", "makes_actor", "room")

    def __init__(
        self,
        task: Any,
        device: Device,
        claim: Claim,
        *,
        makes_actor: bool = False,
        room: Memory | None = None,
        **given: Any,
    ) -> None:
        super().__init__(task, device, **given)
        self.claim = claim
        self.known = claim.devices
        self.makes_actor = makes_actor
        self.room = room

    def __call__(self, data: Any = ()) -> Any:
        claim = self.claim
        if self.task.is_coro:  # type: ignore[attr-defined]
            return self._in_turn(data)
        waits = not (claim.held or claim.void)
        if waits:
            claim.wait()
        try:
            self._refuse_void()
            self._make_room()
            result = super().__call__(data)
            claim.for_life = self.makes_actor
            return result
        finally:
            if waits:
                claim.ended()

    async def _in_turn(self, data: Any) -> Any:
        claim = self.claim
        try:
            await _granted(claim)
            self._refuse_void()
            if self.room is not None and claim.nbytes:
                await asyncio.to_thread(self._make_room)
            result = await super().__call__(data)
            claim.for_life = self.makes_actor
            return result
        finally:
            claim.withdraw()
            claim.ended()

    def _refuse_void(self) -> None:
        if self.claim.void:  # the task was cancelled while it waited
            raise Reschedule

    def _make_room(self) -> None:
        """Let values that dask keeps leave the devices, until the reserved bytes are free there."""
        claim, room = self.claim, self.room
        if room is not None and claim.nbytes:
            made: list[Device] = []
            claim.given_back = partial(_give_room, room, made, claim.nbytes)
            for device in claim.devices:
                room.make_room(device, claim.nbytes)
                made.append(device)

    def _all(self) -> Others:
        assert self.monitor is not None
        key: Hashable = self.task.key  # type: ignore[attr-defined]
        waits = self.monitor.synchronize or bool(self.watched)
        return Others(self.monitor, key, self.claim.devices, wait=waits)

    def _run(self, device: Device, data: Any) -> Any:
        with self._all():
            return super()._run(device, data)

    async def _run_coroutine(self, device: Device, data: Any) -> Any:
        with self._all():
            return await super()._run_coroutine(device, data)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a task with the annotation devices, device_share or device_memory runs in its "
            "worker's process, and its executor is of other processes. Leave out the annotation "
            "'executor', or name one device with dask.annotate(device=1)"
        )


def _give_room(room: Memory, devices: Sequence[Device], nbytes: int) -> None:
    for device in devices:
        room.give_room(device, nbytes)


async def _granted(claim: Claim) -> None:
    """Submit a claim and wait, on an event loop, until it is granted."""
    loop = asyncio.get_running_loop()
    there = asyncio.Event()

    def grant() -> None:
        with suppress(RuntimeError):  # the loop is closed, so no task waits
            loop.call_soon_threadsafe(there.set)

    claim.submit(grant)
    await there.wait()
