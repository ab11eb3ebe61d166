"""Values from another worker of this machine: they are read from its staging memory."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from distributed.comm import CommClosedError
from distributed.protocol.serialize import register_serialization_family

from dask_devctx.cuda.out_of_memory import allocated, is_out_of_memory
from dask_devctx.dask_internals.connections import UNREAD
from dask_devctx.errors import DevctxError, DriverError
from dask_devctx.transfer.ipc.parcel import Header, unpack
from dask_devctx.transfer.ipc.receiving import Receiving
from dask_devctx.worker.peers.local import FAMILY, QUICK_NBYTES, Local


class ReadThroughHostError(CommClosedError):  # type: ignore[misc]
    """Values cannot be read from staging memory, and are to be asked for again."""


class Arriving:
    """A value of which only the part in host memory has arrived."""

    def __init__(self, header: dict[str, Any], frames: Sequence[Any]) -> None:
        self._parts = slice(header["first"], header["first"] + header["count"])
        self._pickled, *buffers = frames
        self._buffers = [
            memoryview(buffer) if writeable else memoryview(buffer).toreadonly()
            for buffer, writeable in zip(buffers, header["writeable"], strict=True)
        ]

    def completed(self, parts: Sequence[Any]) -> Any:
        """Return the value, given all parts of its transfer."""
        return unpack(self._pickled, self._buffers, parts[self._parts])


def register() -> None:
    """Let distributed unpack staged values; this lasts as long as the process."""
    register_serialization_family(FAMILY, None, Arriving)


async def complete(local: Local, address: str, msg: dict[str, Any]) -> None:
    """Put the values of another worker's answer together.

    Raise `ReadThroughHostError` if they are to be asked for again, and `CommClosedError` if a
    device failed: dask asks again, or asks another worker.
    """
    data: dict[Hashable, Any] = msg["data"]
    arriving = {key: value for key, value in data.items() if isinstance(value, Arriving)}
    if not arriving:
        return
    begun = time.perf_counter()
    header: Header = pickle.loads(msg.pop(FAMILY))
    devices = {device.uuid: device for device in local.devices}
    device = devices.get(header.source, local.devices[0])
    receiving = Receiving(address, header, device, local.opened)
    unread: dict[Hashable, Exception] = {}

    def unpacked() -> None:
        with device:
            for key, value in arriving.items():
                try:
                    data[key] = value.completed(receiving.parts)
                except Exception as error:
                    unread[key] = error

    store = local.store()
    room = None if store is None or not store.spill.accounts else store.spill
    if room is not None and not room.make_room(device, receiving.nbytes, wait=False):
        room.give_room(device, receiving.nbytes)
        await local.run(room.make_room, device, receiving.nbytes)
    try:
        await _arrive(local, receiving, unpacked)
    except Exception as error:
        opening = isinstance(error, DriverError) and error.function == "cuIpcOpenMemHandle"
        no_memory = is_out_of_memory(error)
        if not opening and (no_memory or not isinstance(error, DevctxError | OSError)):
            unread = dict.fromkeys(arriving, error)
        elif local.failed(device, error) or isinstance(error, OSError):
            text = f"values from {address} could not be read: {error}"
            raise CommClosedError(text) from error
        else:
            reason = f"its memory cannot be {'opened' if opening else 'read'}: {error}"
            await local.refuse(address, reason, passes=no_memory)
            raise ReadThroughHostError from error
    finally:
        if room is not None:
            room.give_room(device, receiving.nbytes)
    for key, why in unread.items():
        del data[key]
        could_not_be_read(key, why, address, device_failed=local.has_failed())
    if len(unread) < len(arriving):
        took, ends = time.perf_counter() - begun, (header.source, device.uuid)
        local.traffic.arrived(*ends, receiving.nbytes, took, len(arriving))


async def _arrive(local: Local, receiving: Receiving, unpacked: Callable[[], None]) -> None:
    def all_at_once() -> None:  # each change of threads takes time
        room = lambda: local.make_room(receiving.device)  # noqa: E731
        allocated(receiving.allocate, room, room)
        if receiving.nbytes:
            receiving.start()
            receiving.finish()
        unpacked()

    quick = receiving.nbytes <= QUICK_NBYTES and receiving.is_quick()
    if quick:
        try:
            receiving.allocate()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            quick = False  # other values may have to leave
    if not quick:
        await local.run(all_at_once)
        return
    if receiving.nbytes:
        receiving.start()
        await local.copied(receiving)
    unpacked()


def could_not_be_read(key: Hashable, error: Exception, sender: str, *, device_failed: bool) -> None:
    """Note that a value could not be read, for the tasks that need it; else raise the error.

    If a device here failed, raise `CommClosedError`: another worker can read the value.
    """
    error = error.with_traceback(None)
    if device_failed:
        raise CommClosedError(f"{key!r} from {sender} could not be read: {error}") from error
    error.add_note(f"{key!r} could not be read when it arrived from {sender}")
    unread = UNREAD.get()
    if unread is None:  # no task asked
        raise error
    unread[key] = error
