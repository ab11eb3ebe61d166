"""Values for another worker of this machine: they are staged, and that worker reads them."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from distributed.comm import CommClosedError
from distributed.protocol.serialize import Serialize

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import clear_frames, is_out_of_memory
from dask_devctx.transfer import Stamp, nbytes_by_device
from dask_devctx.transfer.events import is_captured, wait_for_captures
from dask_devctx.transfer.ipc.sending import Sending
from dask_devctx.transfer.parcel import Header, Parcel, pack
from dask_devctx.transfer.pieces import more_pieces
from dask_devctx.worker.packing import are_few, find, is_by_frames
from dask_devctx.worker.peers.transfers import NEXT, QUICK_NBYTES, STAGED, PeerTransfers
from dask_devctx.worker.peers.transport import FULL, SAYS
from dask_devctx.worker.values.host_form import Copying
from dask_devctx.worker.values.store import SENDING, Store
from dask_devctx.worker.values.value import Value, readable

logger = logging.getLogger(__name__)

# A transfer waits this long for others to release staging memory, then goes through the host.
_ROOM_TIMEOUT_S: Final = 10.0
_ROOM_LOOK_S: Final = 0.005
# After a connection ended, its receiver may still be in the middle of a copy. The staging memory is
# kept for this long.
_GRACE_S: Final = 5.0
_NO_ROOM: Final = "there was no staging memory for them (ipc_staging)"

Message = dict[str, Any]
Places = dict[Hashable, dict[Device, int]]
Parcels = dict[Hashable, Parcel]


class _NotStagedError(Exception):
    """Values are not staged, for this reason: dask sends them."""


def answering(local: PeerTransfers, get_data: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler of requests for values, around dask's own."""

    async def answer(comm: Any, keys: Any, who: str | None = None, serializers: Any = None) -> Any:
        asking = _Asking(local, comm, who or "")
        if asking.inside:
            await readable(local.store.values_of(keys))
        token = SENDING.set(not asking.inside)
        local.under_way += 1
        try:
            who = asking.address or None
            return await get_data(asking, keys=keys, who=who, serializers=serializers)
        except Exception as error:
            clear_frames(error)  # dask's log keeps the error: not the values with it
            raise
        finally:
            SENDING.reset(token)
            local.under_way -= 1
            asking.end()
            del asking  # dask's log keeps this frame with an error

    return answer


class _Asking:
    """The connection of a worker that asked for values, while it is answered."""

    def __init__(self, local: PeerTransfers, comm: Any, who: str) -> None:
        self._local, self._comm = local, comm
        self.address, takes_values, self.said = who.partition(SAYS)
        # Whether it takes a `Value` in host memory, which it restores on a device when needed.
        self.takes_values = bool(takes_values)
        # Within a process nothing is serialized: the receiver gets the objects that are read.
        self.inside = str(getattr(comm, "local_address", "")).startswith("inproc")
        self._sending: Sending | None = None
        self._was_read = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    async def write(self, msg: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(msg, dict) and "data" in msg:
            try:
                msg, self._sending = await _prepared(self._local, self, msg)
            except CommClosedError:
                self._comm.abort()
                raise
        written = await self._comm.write(msg, *args, **kwargs)
        if self._sending is not None:
            for begin in more_pieces(self._sending.nbytes):
                await self._local.run(self._sending.copy_piece, begin)
                await self._comm.write(NEXT)
        return written

    async def read(self, *args: Any, **kwargs: Any) -> Any:
        answer = await self._comm.read(*args, **kwargs)
        self._was_read = answer == "OK"
        return answer

    def end(self) -> None:
        if self._sending is not None and self._was_read:
            self._sending.close()
        elif self._sending is not None:
            self._local.worker.loop.call_later(_GRACE_S, self._sending.close)


async def _prepared(
    local: PeerTransfers, asking: _Asking, msg: Message
) -> tuple[Message, Sending | None]:
    """Return an answer: its values are staged, in host memory, or left for UCX to carry."""
    store, who, data = local.store, asking.address, msg["data"]
    reason, places = local.transport.why_not(asking.said), _on_devices(data, local.devices, store)
    work = {  # without values in host memory
        key: _work(store, key, there)
        for key, there in places.items()
        if data[key].data.__class__ is not Value
    }
    if places and not reason:
        local.readers.add(who)
        try:
            sending, parcels = await _staged(local, data, places, [*work.values()])
            return _message(msg, sending, parcels), sending
        except Exception as error:
            reason = _why_not_staged(local, error, who, next(iter(next(iter(places.values())))))
    by_dask = local.transport.by_dask
    if places and not asking.inside:
        there = await asyncio.to_thread(_in_host_memory, local, asking, data, places, work)
        msg = {**msg, "data": data | there}
    for device, nbytes in (one for each in places.values() for one in each.items()):
        if who and nbytes:  # a worker; torch's tensors in host memory have none on a device
            why = reason if by_dask == "host" else None
            local.traffic.sent(device.uuid, who, by_dask, nbytes, why)
    return msg, None


def _in_host_memory(
    local: PeerTransfers,
    asking: _Asking,
    data: Mapping[Hashable, Any],
    places: Places,
    work: Mapping[Hashable, Stamp],
) -> dict[Hashable, Any]:
    """Return the values of an answer in host memory, without those that dask sends as they are."""
    spill, found = local.store.spill, dict[Hashable, Any]()
    full = asking.takes_values and asking.said.startswith(FULL)
    for key, there in places.items():
        value, device = data[key].data, next(iter(there))
        if key not in work:
            found[key] = Serialize(value if asking.takes_values else value.host_form())
            continue
        try:
            with device:
                wait_for_captures()  # some types cannot be packed without spoiling one
            if not full and local.transport.by_dask == "ucx" and is_by_frames(type(value)):
                work[key].hold_back_readers()
                continue
            copying = partial(Copying, value, device, work[key], spill.pool.take, sent=True)
            form = spill.allocated(device, there[device], copying).finish()
            found[key] = Serialize(Value.away(key, form) if full else form)
        except Exception as error:
            if local.has_failed(device):
                raise CommClosedError(f"the device failed: {error}") from error
            logger.debug("%r goes as dask sends it", key, exc_info=True)
    return found


def _why_not_staged(local: PeerTransfers, error: Exception, who: str, device: Device) -> str:
    """Return the reason why dask sends some values; raise `CommClosedError` if a device failed."""
    if isinstance(error, _NotStagedError):
        return str(error)
    if local.has_failed(device):
        raise CommClosedError(f"the device failed: {error}") from error
    staging = local.stagings.get(device)
    if staging is None or not staging.refused:
        logger.warning("values go to %s through the host this time", who, exc_info=True)
        return f"their copies failed: {error!r}"
    refused = staging.refused
    if is_out_of_memory(error):  # it passes
        staging.refused = ""
    else:
        logger.warning("values go to other workers through the host: %s", refused)
    return refused


async def _staged(
    local: PeerTransfers, data: dict[Hashable, Any], places: Places, stamps: Sequence[Stamp]
) -> tuple[Sending, Parcels]:
    """Return values packed and staged, after the work of stamps; or raise."""
    total: Counter[Device] = Counter()
    for each in places.values():
        total.update(each)
    device = max(total, key=total.__getitem__)
    staging = local.stagings.get(device)
    if staging is None or staging.refused:
        raise _NotStagedError(_NO_ROOM if staging is None else staging.refused)
    values = {key: data[key].data for key in places}
    parcels: Parcels = {}
    quick = (
        0 < sum(total.values()) <= QUICK_NBYTES
        and not is_captured(device)
        and all(stamp.done() for stamp in stamps)
        and are_few(values.values(), QUICK_NBYTES)
    )

    def begin() -> Sending:
        parcels.update(_packed(values, device, stamps))
        parts = [part for parcel in parcels.values() for part in parcel.parts]
        gathered = any(parcel.gathered for parcel in parcels.values())
        made = Sending(parts, staging, stamps, gathered=gathered, on_one_device=len(total) == 1)
        # In one go: each change of threads takes time.
        return copy(made) if parcels and not quick else made

    def copy(sending: Sending) -> Sending:
        if sending.start():
            sending.finish()
        return sending

    sending: Sending = begin() if quick else await local.run(begin)
    if not parcels:
        raise _NotStagedError("their type goes through the host")
    # A view may be sent with all the memory under it.
    if quick and sending.nbytes <= QUICK_NBYTES and sending.start(grow=False):
        await local.copied(sending)
    elif quick:
        await local.run(copy, sending)
    until = time.monotonic() + _ROOM_TIMEOUT_S
    while sending.place is None:
        last = not staging.taken or time.monotonic() > until
        if staging.taken + sending.nbytes <= staging.limit:
            await local.give_back([staging])  # the room is in unused blocks that are too small
        await asyncio.sleep(_ROOM_LOOK_S)
        await local.run(copy, sending)
        if last and sending.place is None:
            raise _NotStagedError(_NO_ROOM)
    return sending, parcels


def _work(store: Store, key: Hashable, devices: Collection[Device]) -> Stamp:
    """Return the stamp of the work that makes a value on devices."""
    for value in store.values_of([key]):
        stamp = value.stamp  # once: it may leave meanwhile
        if stamp is not None and {*devices} <= {*stamp.devices}:
            return stamp
    return Stamp.of_devices(devices)


def _message(msg: Message, sending: Sending, parcels: Parcels) -> Message:
    assert sending.place is not None
    parts, (buffer, offset) = tuple(part.description for part in sending.parts), sending.place
    about = Header(sending.staging.device.uuid, parts, buffer.handle, offset)
    packed = {
        key: (len(parcel.parts), parcel.pickled, [*map(pickle.PickleBuffer, parcel.buffers)])
        for key, parcel in parcels.items()
    }
    data = {key: value for key, value in msg["data"].items() if key not in parcels}
    return {**msg, "data": data, STAGED: Serialize((about, packed))}


def _on_devices(data: Mapping[Hashable, Any], devices: Sequence[Device], store: Store) -> Places:
    """Return the values of an answer that are or belong on devices, with their bytes by device."""
    found: Places = {}
    for key, wrapped in data.items():
        value = wrapped.data
        if value.__class__ is Value:
            form = value.host_form()
            found[key] = {form.home: form.nbytes}
            continue
        if store.is_host_data(key) and find(type(value)) is None:
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


def _packed(values: Mapping[Hashable, Any], device: Device, stamps: Collection[Stamp]) -> Parcels:
    """Return the values that have parts on a device, packed."""
    parcels: Parcels = {}
    with device:
        wait_for_captures()  # some types cannot be packed without spoiling one
        if not all(stamp.done() for stamp in stamps):
            for stamp in stamps:
                stamp.hold_back_readers()  # for copies that the packing makes
        for key, value in values.items():
            parcel = value.host_form() if value.__class__ is Value else pack(value, find)
            if parcel.parts:
                parcels[key] = parcel
    return parcels
