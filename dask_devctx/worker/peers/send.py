"""Values for another worker of this machine: they are staged, and that worker reads them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from distributed.comm import CommClosedError
from distributed.protocol.serialize import Serialize, Serialized

from dask_devctx.cuda.device import Device
from dask_devctx.driver.relaxed import LEGACY_STREAM
from dask_devctx.errors import DriverError
from dask_devctx.transfer import Stamp, nbytes_by_device
from dask_devctx.transfer.ipc.messages import Header, Next
from dask_devctx.transfer.ipc.parcel import Parcel, pack
from dask_devctx.transfer.ipc.sending import Sending
from dask_devctx.worker.comms.device_types import are_few, find
from dask_devctx.worker.peers.local import FAMILY, QUICK_NBYTES, QUICK_S, Local
from dask_devctx.worker.values.store import Store
from dask_devctx.worker.values.value import Value

logger = logging.getLogger(__name__)

# A transfer waits this long for other transfers to release staging memory, then goes through the
# host. It looks when a transfer of this worker gives memory back, and now and then by itself.
_ROOM_TIMEOUT_S: Final = 10.0
_ROOM_LOOK_S: Final = 0.05
# After a connection ended, its receiver may still be in the middle of a copy. The staging memory is
# kept for this long.
_GRACE_S: Final = 5.0
# The end of the capture of a graph is waited for, but no longer than this.
_LONGEST_CAPTURE_S: Final = 60.0
_POLL_S: Final = 0.001

Places = dict[Hashable, dict[Device, int]]
Parcels = dict[Hashable, Parcel]
# Each exchange that ends is told whether the values were read.
Prepared = tuple[dict[str, Any], Callable[[bool], None]]


class Sender:
    """Stages the values that one worker sends to other workers of its machine."""

    def __init__(self, local: Local) -> None:
        self._local = local
        self._numbers = itertools.count(1)
        self._sendings: dict[int, Sending] = {}
        self._room = asyncio.Event()

    async def prepare(self, who: str, msg: dict[str, Any], places: Places) -> Prepared | str:
        """Return a message whose values are staged and what to call at its end; else the reason."""
        try:
            begun = await self._begun(msg["data"], places)
        except Exception as error:
            device = next(iter(next(iter(places.values()))))
            if self._local.failed(device, error):
                raise CommClosedError(f"the device failed: {error}") from error
            logger.warning("values go to %s through the host this time", who, exc_info=True)
            return f"their copies failed: {error!r}"
        if begun is None:
            return "there was no staging memory for them, or their type goes through the host"
        sending, parcels = begun
        number = next(self._numbers)
        self._sendings[number] = sending
        return self._message(msg, number, sending, parcels), lambda read: self._end(number, read)

    async def next(self, asked: Next) -> Any:
        """Stage a piece, and return where it is; called by the receiver.

        False where there is no room while it reads another piece: it asks again after that. None
        where the transfer is given up.
        """
        sending, piece = self._sendings.get(asked.number), asked.piece
        if sending is None or asked.memory != self._local.name:
            return None
        if not asked.read <= piece < sending.pieces:
            logger.warning("a transfer has %d pieces; refused %s", sending.pieces, asked)
            return None
        sending.was_read(asked.read)
        self._wake()
        alone = asked.read == piece
        try:
            if sending.place(piece) is None and not await self._staged(sending, piece, wait=alone):
                return None if alone else False
        except DriverError as error:  # the receiver is to take it for nothing of its own
            self._local.failed(sending.staging.device, error)
            logger.warning("a transfer is given up", exc_info=True)
            return None
        return sending.place(piece)

    async def _begun(self, data: dict[Hashable, Any], places: Places) -> Any:
        """Return values packed, with their first piece staged; None if they cannot be."""
        total: dict[Device, int] = {}
        for each in places.values():
            for device, nbytes in each.items():
                total[device] = total.get(device, 0) + nbytes
        device = max(total, key=total.__getitem__)
        staging = self._local.stagings.get(device)
        if staging is None:
            return None
        values = {key: data[key].data for key in places}
        stamps = self._work_of(values, places)
        quick = (
            0 < sum(total.values()) <= QUICK_NBYTES
            and not _is_captured(device)
            and all(stamp.done() for stamp in stamps)
            and are_few(values.values(), QUICK_NBYTES)
        )

        def begin() -> tuple[Sending, Parcels, bool] | None:
            parcels = _packed(values, device, stamps)
            if not parcels:
                return None
            parts = [part for parcel in parcels.values() for part in parcel.parts]
            gathered = any(parcel.gathered for parcel in parcels.values())
            here = len(total) == 1
            sending = Sending(parts, staging, stamps, gathered=gathered, on_one_device=here)
            try:  # in one go: each change of threads takes time
                return sending, parcels, not quick and _start_and_finish(sending, 0)
            except BaseException:
                sending.close()
                raise

        begun = begin() if quick else await self._local.run(begin)
        if begun is None:
            return None
        sending, parcels, staged = begun
        try:
            # A view may be sent with all the memory under it.
            quick = quick and sending.nbytes <= QUICK_NBYTES
            staged = staged or await self._staged(sending, 0, quick=quick)
            if not staged and sending.piece > staging.piece:
                sending.in_pieces()
                staged = await self._staged(sending, 0)
        except BaseException:
            self._ended(sending)
            raise
        return (sending, parcels) if staged else None

    def _work_of(self, values: Mapping[Hashable, Any], places: Places) -> list[Stamp]:
        stamps: list[Stamp] = []
        unknown: set[Device] = set()
        for key, devices in places.items():
            if values[key].__class__ is Value:
                continue
            after = _known_work(self._local.store(), key)
            if after is not None and all(device in after.devices for device in devices):
                stamps.append(after)
            else:
                unknown.update(devices)
        if unknown:
            stamps.append(Stamp.of_devices(unknown))
        return stamps

    async def _staged(
        self, sending: Sending, index: int, *, quick: bool = False, wait: bool = True
    ) -> bool:
        """Copy a piece into staging memory, and wait until it is there; False if there is none."""
        if quick and (lane := sending.start(index, grow=False)) is not None:
            if lane.done_soon(QUICK_S):
                sending.finish(index, lane, is_done=True)
            else:
                await self._local.run(sending.finish, index, lane)
            return True
        until = time.monotonic() + _ROOM_TIMEOUT_S
        room = self._room
        while not await self._local.run(_start_and_finish, sending, index):
            if not wait or sending.is_closed or not self._sendings or time.monotonic() > until:
                return False
            with suppress(TimeoutError):
                await asyncio.wait_for(room.wait(), _ROOM_LOOK_S)
            room = self._room
        return True

    def _message(
        self, msg: dict[str, Any], number: int, sending: Sending, parcels: Parcels
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
        place = sending.place(0)
        assert place is not None
        uuid, parts = sending.staging.device.uuid, tuple(part.description for part in sending.parts)
        about = Header(self._local.name, number, uuid, sending.piece, parts, place)
        return {**msg, "data": data, FAMILY: about}

    def _end(self, number: int, was_read: bool) -> None:
        sending = self._sendings.pop(number)
        if was_read:
            self._ended(sending)
        else:
            self._local.worker.loop.call_later(_GRACE_S, self._ended, sending)

    def _ended(self, sending: Sending) -> None:
        sending.close()
        self._wake()

    def _wake(self) -> None:
        """Let the transfers look that wait for room."""
        self._room.set()
        self._room = asyncio.Event()


def on_devices(
    data: Mapping[Hashable, Any], devices: Sequence[Device], store: Store | None, *, staged: bool
) -> Places:
    """Return the values of an answer that are on devices, each with its bytes by device.

    With ``staged``, values in host memory that belong on a device are staged there, and so count.
    """
    found: Places = {}
    for key, wrapped in data.items():
        if not isinstance(wrapped, Serialize):
            continue
        value = wrapped.data
        if value.__class__ is Value:
            if staged:
                form, _ = value.host_form()
                home = form.home if form.home in devices else devices[0]
                found[key] = {home: form.nbytes}
            continue
        if store is not None and store.is_host_data(key) and find(type(value)) is None:
            continue
        try:
            places = nbytes_by_device(value)
        except Exception:  # of a user's type; dask sends the value
            continue
        if not places and find(type(value)) is not None:
            places = {devices[0]: 0}
        if places:
            found[key] = dict(places)
    return found


def _known_work(store: Store | None, key: Hashable) -> Stamp | None:
    value = None if store is None else store.peek(key)
    return value.stamp if isinstance(value, Value) else None


def _packed(values: Mapping[Hashable, Any], device: Device, stamps: Collection[Stamp]) -> Parcels:
    """Return the values that have parts on a device, packed."""
    parcels: Parcels = {}
    until = time.monotonic() + _LONGEST_CAPTURE_S
    while _is_captured(device) and time.monotonic() < until:
        time.sleep(_POLL_S)
    with device:
        if not all(stamp.done() for stamp in stamps):
            for stamp in stamps:
                stamp.hold_back_readers()  # for copies that the packing makes
        for key, value in values.items():
            if value.__class__ is Value:
                form, index = value.host_form()
                parcel = form.parcel(index)
            else:
                parcel = pack(value, find)
            if parcel.parts:
                parcels[key] = parcel
    return parcels


def _is_captured(device: Device) -> bool:
    """Return whether some types could not be packed without spoiling a graph under capture."""
    with device:
        return device._backend.calls.work.is_capturing(LEGACY_STREAM)


def _start_and_finish(sending: Sending, index: int) -> bool:
    lane = sending.start(index)
    if lane is None:
        return False
    sending.finish(index, lane)
    return True
