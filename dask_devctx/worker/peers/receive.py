"""Values from another worker of this machine: they are read from its staging memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Hashable, Sequence
from typing import Any, Final

from distributed.comm import CommClosedError
from distributed.protocol.serialize import register_serialization_family

from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.errors import DevctxError
from dask_devctx.transfer.ipc.messages import Header, MalformedMessageError, Next, Place, read
from dask_devctx.transfer.ipc.parcel import unpack
from dask_devctx.transfer.ipc.receiving import Receiving
from dask_devctx.worker.peers.connections import could_not_be_read
from dask_devctx.worker.peers.local import FAMILY, QUICK_NBYTES, QUICK_S, Local
from dask_devctx.worker.peers.pairs import Pairs

logger = logging.getLogger(__name__)

NEXT: Final = "devctx_ipc_next"
# So often an arriving value finds no memory before it is given up.
_ATTEMPTS: Final = 2


class Arriving:
    """A value of which only the part in host memory has arrived."""

    def __init__(self, header: dict[str, Any], frames: Sequence[Any]) -> None:
        self._first = header["first"]
        self._count = header["count"]
        self._pickled, *buffers = frames
        self._buffers = [
            memoryview(buffer) if writeable else memoryview(buffer).toreadonly()
            for buffer, writeable in zip(buffers, header["writeable"], strict=True)
        ]

    def of(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Return this value's parts, of all parts of a transfer."""
        first, count = self._first, self._count
        if type(first) is not int or type(count) is not int:
            raise MalformedMessageError("the parts of a value are no numbers")
        if not 0 <= first <= first + count <= len(parts):
            raise MalformedMessageError("a value has other parts than its transfer")
        return parts[first : first + count]

    def completed(self, parts: Sequence[Any]) -> Any:
        """Return the value with its parts; or the error, in a :class:`_Unread`."""
        try:
            return unpack(self._pickled, self._buffers, self.of(parts))
        except Exception as error:
            return _Unread(error)


class _Unread:
    def __init__(self, error: Exception) -> None:
        self.error = error


def register() -> None:
    """Let distributed unpack staged values; this lasts as long as the process."""
    register_serialization_family(FAMILY, None, Arriving)


class Receiver:
    """Reads the values that other workers of the machine have staged for one worker."""

    def __init__(self, local: Local, pairs: Pairs) -> None:
        self._local = local
        self._pairs = pairs

    async def complete(self, address: str, msg: dict[str, Any]) -> None:
        """Put the values of another worker's answer together.

        If they cannot be read, raise `CommClosedError`: dask asks again, or asks another worker.
        """
        about = msg.pop(FAMILY, None)
        data: dict[Hashable, Any] = msg["data"]
        arriving = {key: value for key, value in data.items() if isinstance(value, Arriving)}
        if about == () and not arriving:  # its memory has another name now
            self._pairs.forget(address)
        elif about is not None or arriving:
            await self._complete(address, about, data, arriving)

    async def _complete(
        self, address: str, about: Any, data: dict[Hashable, Any], arriving: dict[Hashable, Any]
    ) -> None:
        begun = time.perf_counter()
        local = self._local
        try:
            header = read(Header, about)
            sizes = [part.nbytes for part in header.parts]
            if header.piece < 1 or sum(sizes) >= 2**48:
                raise MalformedMessageError("a transfer has more bytes than any device")
            nbytes = {key: sum(value.of(sizes)) for key, value in arriving.items()}
        except MalformedMessageError as error:
            raise await self._refused(address, error) from error
        devices = {device.uuid: device for device in local.devices}
        device = devices.get(header.source, local.devices[0])
        receiving = Receiving(header.memory, header.parts, header.piece, device, local.opened)
        store = local.store()
        room = None if store is None or not store.spill.accounts else store.spill
        if room is not None and not room.make_room(device, receiving.nbytes, wait=False):
            room.give_room(device, receiving.nbytes)
            await local.run(room.make_room, device, receiving.nbytes)
        try:
            found = await self._received(address, header, receiving, arriving)
        except MalformedMessageError as error:
            raise await self._refused(address, error) from error
        except Exception as error:
            if is_out_of_memory(error) or not isinstance(error, DevctxError | OSError):
                found = dict.fromkeys(arriving, _Unread(error))
            else:
                # A later attempt would fail too, but for one that a device's end or the sender's
                # ended.
                if not local.failed(device, error) and not isinstance(error, OSError):
                    await self._pairs.refuse(address, f"its memory cannot be read: {error}")
                text = f"values from {address} could not be read: {error}"
                raise CommClosedError(text) from error
        finally:
            if room is not None:  # the room is theirs until dask has them
                left = receiving.nbytes
                for key, size in nbytes.items():
                    room.hand_over(key, device, min(size, left))
                    left -= min(size, left)
                room.give_room(device, left)
        for key, value in found.items():
            if isinstance(value, _Unread):
                del data[key]
                could_not_be_read(key, value.error, address, device_failed=local.has_failed())
            else:
                data[key] = value
        took = time.perf_counter() - begun
        if any(key in data for key in arriving):
            ends = header.source, device.uuid
            local.traffic.count(*ends, "ipc", receiving.nbytes, took, copies=len(arriving))

    async def _refused(self, address: str, error: MalformedMessageError) -> CommClosedError:
        """Let a worker's values come through the host; return the error that ends its answer."""
        logger.warning("The header of a transfer from %s was refused: %s", address, error)
        await self._pairs.refuse(address, f"it sent a malformed header: {error}")
        return CommClosedError(f"values from {address} could not be read: {error}")

    async def _received(
        self, address: str, header: Header, receiving: Receiving, arriving: dict[Hashable, Arriving]
    ) -> dict[Hashable, Any]:
        run, place, last = self._local.run, header.place, receiving.pieces - 1

        def unpacked() -> dict[Hashable, Any]:
            with receiving.device:
                return {k: value.completed(receiving.parts) for k, value in arriving.items()}

        def all_at_once() -> dict[Hashable, Any]:
            self._allocate(receiving)
            if last == 0:
                _read(receiving, 0, place)
            return unpacked()

        if receiving.nbytes <= QUICK_NBYTES and receiving.is_quick(place):
            try:
                receiving.allocate()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                await run(self._allocate, receiving)  # other values may have to leave
            if last == 0:
                lane, opened = receiving.start(0, place)
                if lane.done_soon(QUICK_S):
                    receiving.finish(lane, opened, is_done=True)
                else:
                    await run(receiving.finish, lane, opened)
            return unpacked()
        if last < 1:
            return await run(all_at_once)  # type: ignore[no-any-return]
        await run(self._allocate, receiving)
        await self._pieces(address, header, receiving, last)
        return await run(unpacked)  # type: ignore[no-any-return]

    async def _pieces(self, address: str, header: Header, receiving: Receiving, last: int) -> None:
        """Read the pieces, each while the next one is staged."""

        async def ask(piece: int, have_read: int) -> Any:
            asked = Next(header.memory, header.number, piece, have_read)
            return await self._local.call(address, NEXT, asked)

        place, said = header.place, None
        for piece in range(last + 1):
            reading = asyncio.ensure_future(self._local.run(_read, receiving, piece, place))
            try:
                if piece < last:
                    said = await ask(piece + 1, piece)
            finally:
                await reading  # what a device says comes first
            if piece < last:
                if said is False:  # there is room where the piece was that was just read
                    said = await ask(piece + 1, piece + 1)
                if not said:
                    raise CommClosedError(f"{address} gave a transfer up")
                place = read(Place, said)

    def _allocate(self, receiving: Receiving) -> None:
        """Allocate memory for arriving values, on a thread; others make room for them."""
        for _ in range(_ATTEMPTS):
            try:
                receiving.allocate()
                return
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            self._local.make_room(receiving.device)
        receiving.allocate()


def _read(receiving: Receiving, piece: int, place: Place) -> None:
    receiving.finish(*receiving.start(piece, place))
