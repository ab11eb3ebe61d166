"""Values for another worker of this machine: they are staged, and that worker reads them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Final

from distributed import Worker
from distributed.comm import CommClosedError
from distributed.protocol.serialize import Serialized

from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.errors import DevctxError, DriverError
from dask_devctx.transfer import Stamp
from dask_devctx.transfer.ipc.frames import Part
from dask_devctx.transfer.ipc.parcel import Parcel, pack
from dask_devctx.transfer.ipc.sending import Sending
from dask_devctx.transfer.ipc.staging import Staging
from dask_devctx.worker.comms.device_types import are_few, find
from dask_devctx.worker.inputs.inputs import Inputs
from dask_devctx.worker.ipc.pairs import Pairs
from dask_devctx.worker.ipc.places import known_work, on_devices
from dask_devctx.worker.ipc.traffic import Traffic
from dask_devctx.worker.memory.kept import Kept

logger = logging.getLogger(__name__)

# The name of staged values among distributed's serializers, and of a message's entry about them.
FAMILY: Final = "devctx-ipc"
# Values up to this size are sent without another thread, if that takes only microseconds.
QUICK_NBYTES: Final = 2**20
QUICK_S: Final = 300e-6
# A transfer waits this long for other transfers to release staging memory, then goes through the
# host. It looks when a transfer of this worker gives memory back, and now and then by itself.
_ROOM_TIMEOUT_S: Final = 10.0
_ROOM_LOOK_S: Final = 0.05
# After a connection ended, its receiver may still be in the middle of a copy. The staging memory is
# kept for this long.
_GRACE_S: Final = 5.0

# A transfer that has begun, its values, and whether its first piece is staged.
Begun = tuple[Sending, dict[Hashable, Parcel], bool]


class Outgoing:
    """Stages the values that one worker sends to other workers of its machine.

    Parameters
    ----------
    worker
        The worker.
    stagings
        Staging memory of each of its devices.
    inputs
        Knows the work that makes each value; None if no work is known.
    pairs
        Knows the workers that can read that memory.
    run
        Runs a function on a thread that may wait.
    traffic
        Counts the values that go through the host.
    on_failure
        Called with a device that failed, and the driver's error.
    """

    def __init__(
        self,
        worker: Worker,
        stagings: dict[Device, Staging],
        inputs: Inputs | None,
        pairs: Pairs,
        run: Any,
        traffic: Traffic,
        on_failure: Callable[[Device, DriverError], object],
    ) -> None:
        self._worker = worker
        self._stagings = stagings
        self._inputs = inputs
        self._pairs = pairs
        self._run = run
        self._traffic = traffic
        self._on_failure = on_failure
        self._numbers = itertools.count(1)
        self._sendings: dict[int, Sending] = {}
        self._room = asyncio.Event()

    async def prepare(
        self, who: str | None, token: str, msg: dict[str, Any]
    ) -> tuple[dict[str, Any], Callable[[bool], None]] | None:
        """Return a message whose values are staged, and a function to call when the exchange ends.

        None where nothing in it is on a device, or the receiver does not say by its token that it
        can read it.
        """
        places = on_devices(msg["data"], self._stagings, self._inputs, staged=True)
        if not places:
            return None
        if who is None or not token or self._pairs.receivers.get(who) != token:
            if who is not None:
                reason = self._pairs.reasons.get(who, "it does not say that it can read them")
                self._traffic.sent_by_dask(places, who, reason)
            return None
        reason = "there was no staging memory for them, or their type goes through the host"
        try:
            begun = await self._begin(msg["data"], places)
        except Exception as error:
            device = next(iter(next(iter(places.values()))))
            if isinstance(error, DriverError) and has_failed(device, error):
                self._on_failure(device, error)
                raise CommClosedError(f"the device failed: {error}") from error
            logger.warning("values go to %s through the host this time", who, exc_info=True)
            begun, reason = None, f"their copies failed: {error!r}"
        if begun is None:
            self._traffic.sent_by_dask(places, who, reason)
            return None
        number, sending, parcels = begun
        self._sendings[number] = sending
        return self._message(msg, number, sending, parcels), lambda read: self._end(number, read)

    async def next(self, token: str, number: int, index: int, read: int) -> Any:
        """Stage a piece, and return where it is; called by the receiver.

        The receiver has read those before ``read``. False where there is no room while it reads
        another: it asks again when that gives its room to this. None where the transfer is given
        up.
        """
        sending = self._sendings.get(number)
        if sending is None or token not in self._pairs.receivers.values():
            return None
        if index >= sending.pieces:
            logger.warning("a transfer has %d pieces; refused a message about more", sending.pieces)
            return None
        sending.was_read(read)
        self._wake()
        if sending.is_staged(index):  # it was asked for before
            return sending.description(index)
        try:
            staged = await self._stage(sending, index, wait=read == index)
        except DriverError as error:  # ours: the receiver is to take it for nothing of its own
            if has_failed(sending.staging.device, error):
                self._on_failure(sending.staging.device, error)
            logger.warning("a transfer is given up", exc_info=True)
            return None
        if not staged:
            return None if read == index else False
        return sending.description(index)

    # -- the steps

    async def _begin(
        self, data: dict[Hashable, Any], places: dict[Hashable, dict[Device, int]]
    ) -> tuple[int, Sending, dict[Hashable, Parcel]] | None:
        values = {key: data[key].data for key in places}
        total: dict[Device, int] = {}
        for each in places.values():
            for device, nbytes in each.items():
                total[device] = total.get(device, 0) + nbytes
        device = max(total, key=total.__getitem__)
        staging = self._stagings.get(device)
        if staging is None:
            return None
        stamps = self._work_of(
            {key: each for key, each in places.items() if values[key].__class__ is not Kept}
        )
        nbytes = sum(total.values())

        def begin() -> Begun | None:
            with device:
                if not all(stamp.done() for stamp in stamps):
                    for stamp in stamps:
                        stamp.hold_back_readers()  # for copies that the packing makes
                parcels = {}
                for key, value in values.items():
                    if value.__class__ is Kept:
                        form, index = value.host_form()
                        parcel = form.parcel(index)
                    else:
                        parcel = pack(value, find)
                    if parcel.parts:
                        parcels[key] = parcel
                if not parcels:
                    return None
                parts: list[Part] = []
                for parcel in parcels.values():
                    parts += parcel.parts
                gathered = any(parcel.gathered for parcel in parcels.values())
                here = total.keys() == {device}
                sending = Sending(parts, staging, stamps, gathered=gathered, on_one_device=here)
                return sending, parcels, False

        quick = (
            0 < nbytes <= QUICK_NBYTES
            and all(stamp.done() for stamp in stamps)
            and are_few(values.values(), QUICK_NBYTES)
        )
        begun = begin() if quick else await self._run(_begin_and_stage, begin)
        if begun is None:
            return None
        sending, parcels, staged = begun
        # A view may be sent with all the memory under it.
        quick = quick and sending.nbytes <= QUICK_NBYTES and staging.has_room(sending.nbytes)
        try:
            staged = staged or await self._stage(sending, 0, quick=quick)
            if not staged and sending.piece > staging.piece:
                sending.in_pieces()
                staged = await self._stage(sending, 0)
        except BaseException:
            self._ended(sending)
            raise
        return (next(self._numbers), sending, parcels) if staged else None

    def _work_of(self, places: dict[Hashable, dict[Device, int]]) -> list[Stamp]:
        stamps: list[Stamp] = []
        unknown: set[Device] = set()
        for key, devices in places.items():
            after = known_work(self._inputs, key)
            if after is not None and all(device in after.devices for device in devices):
                stamps.append(after)
            else:
                unknown.update(devices)
        if unknown:
            stamps.append(Stamp.of_devices(unknown))
        return stamps

    async def _stage(
        self, sending: Sending, index: int, *, quick: bool = False, wait: bool = True
    ) -> bool:
        """Copy a piece into staging memory, and wait until it is there; False if there is none."""
        until = time.monotonic() + _ROOM_TIMEOUT_S
        while True:
            room = self._room
            if quick:
                lane = sending.start(index)
                if lane is not None:
                    if lane.done_soon(QUICK_S):
                        sending.finish(lane, is_done=True)
                    else:
                        await self._run(sending.finish, lane)
                    return True
            elif await self._run(_start_and_finish, sending, index):
                return True
            if not wait or sending.is_closed or not self._sendings or time.monotonic() > until:
                return False
            with suppress(TimeoutError):
                await asyncio.wait_for(room.wait(), _ROOM_LOOK_S)

    def _message(
        self,
        msg: dict[str, Any],
        number: int,
        sending: Sending,
        parcels: dict[Hashable, Parcel],
    ) -> dict[str, Any]:
        first = 0
        data = dict(msg["data"])
        for key, parcel in parcels.items():
            header = {
                "serializer": FAMILY,
                "first": first,
                "count": len(parcel.parts),
                "writeable": [not buffer.readonly for buffer in parcel.buffers],
            }
            data[key] = Serialized(header, [parcel.pickled, *parcel.buffers])
            first += len(parcel.parts)
        about = {
            "sender": self._pairs.token,
            "number": number,
            "source": sending.staging.device.uuid,
            "piece": sending.piece,
            "parts": [part.description for part in sending.parts],
            "shown": sending.description(0),
        }
        return {**msg, "data": data, FAMILY: about}

    def _end(self, number: int, was_read: bool) -> None:
        sending = self._sendings.pop(number)
        if was_read:
            self._ended(sending)
        else:
            self._worker.loop.call_later(_GRACE_S, self._ended, sending)

    def _ended(self, sending: Sending) -> None:
        sending.close()
        self._wake()

    def _wake(self) -> None:
        """Let the transfers look that wait for room."""
        self._room.set()
        self._room = asyncio.Event()


def has_failed(device: Device, error: DriverError) -> bool:
    """Return whether a call failed because its device, or CUDA in this process, has failed."""
    if error.code in statuses.STICKY:
        return True
    if error.code not in statuses.GONE:
        return False
    try:
        with device:
            device._backend.calls.work.probe()
    except DevctxError:
        return True
    return False


def _begin_and_stage(begin: Callable[[], Begun | None]) -> Begun | None:
    """Pack values and stage their first piece in one go: each change of threads takes time."""
    begun = begin()
    if begun is None:
        return None
    sending, parcels, _ = begun
    try:
        return sending, parcels, _start_and_finish(sending, 0)
    except BaseException:
        sending.close()
        raise


def _start_and_finish(sending: Sending, index: int) -> bool:
    lane = sending.start(index)
    if lane is None:
        return False
    sending.finish(lane)
    return True
