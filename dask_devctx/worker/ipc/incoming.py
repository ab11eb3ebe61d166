"""Values from another worker of this machine: they are read from its staging memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from distributed import Worker
from distributed.comm import CommClosedError
from distributed.protocol.serialize import register_serialization_family

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.errors import DevctxError, DriverError
from dask_devctx.transfer.ipc.headers import (
    Description,
    Header,
    MalformedHeaderError,
    count,
    read_description,
    read_header,
)
from dask_devctx.transfer.ipc.lanes import Lane
from dask_devctx.transfer.ipc.opened import Opened, OpenedBuffers
from dask_devctx.transfer.ipc.parcel import unpack
from dask_devctx.transfer.ipc.receiving import Receiving
from dask_devctx.worker.ipc.messages import NEXT
from dask_devctx.worker.ipc.outgoing import FAMILY, QUICK_NBYTES, QUICK_S, has_failed
from dask_devctx.worker.ipc.pairs import Pairs
from dask_devctx.worker.ipc.traffic import Traffic
from dask_devctx.worker.ipc.unreadable import could_not_be_read

if TYPE_CHECKING:
    from dask_devctx.worker.memory.manager import DeviceMemory

# So often an arriving value finds no memory before it is given up.
_ATTEMPTS: Final = 2

logger = logging.getLogger(__name__)


class Arriving:
    """A value of which only the part in host memory has arrived."""

    def __init__(self, header: dict[str, Any], frames: Sequence[Any]) -> None:
        self.first = header["first"]
        self.count = header["count"]
        self._pickled, *buffers = frames
        self._buffers = [
            memoryview(buffer) if writeable else memoryview(buffer).toreadonly()
            for buffer, writeable in zip(buffers, header["writeable"], strict=True)
        ]

    def check(self, parts: int) -> None:
        """Raise :class:`MalformedHeaderError` if it is not made of these parts."""
        first = count(self.first, "first", most=parts + 1)
        count(self.count, "count", most=parts - first + 1)

    def complete(self, memory: Sequence[Any]) -> Any:
        """Return the value, given the memory of its parts."""
        return unpack(self._pickled, self._buffers, memory)


def register() -> None:
    """Let distributed unpack staged values; this lasts as long as the process."""
    register_serialization_family(FAMILY, None, Arriving)


class Incoming:
    """Reads the values that other workers of the machine have staged for one worker.

    Parameters
    ----------
    worker
        The worker.
    devices
        Its devices.
    opened
        The buffers of other workers that it has open.
    pairs
        Knows the workers whose memory it can read.
    has_failed
        Returns whether a device of the worker has failed, so that the worker ends.
    make_room
        Called with a device that has no memory left.
    run
        Runs a function on a thread that may wait.
    traffic
        Counts the values that arrive.
    on_failure
        Called with a device that failed, and the driver's error.
    memory
        Returns the manager of the device memory; None if there is none.
    """

    def __init__(
        self,
        worker: Worker,
        devices: Sequence[Device],
        opened: OpenedBuffers,
        pairs: Pairs,
        has_failed: Callable[[], bool],
        make_room: Callable[[Device], object],
        run: Any,
        traffic: Traffic,
        on_failure: Callable[[Device, DriverError], object],
        memory: Callable[[], DeviceMemory | None],
    ) -> None:
        self._worker = worker
        self._devices = {device.uuid: device for device in devices}
        self._first = devices[0]
        self._opened = opened
        self._pairs = pairs
        self._has_failed = has_failed
        self._make_room = make_room
        self._run = run
        self._traffic = traffic
        self._on_failure = on_failure
        self._memory = memory

    async def complete(self, address: str, msg: dict[str, Any]) -> None:
        """Put the values of another worker's answer together.

        Raises
        ------
        CommClosedError
            The staged values cannot be read. dask asks again, or asks another worker.
        """
        about = msg.pop(FAMILY, None)
        data: dict[Hashable, Any] = msg["data"]
        arriving = {key: value for key, value in data.items() if isinstance(value, Arriving)}
        if about is None and not arriving:
            return
        begun = time.perf_counter()
        try:
            header = read_header(about)
            for value in arriving.values():
                value.check(len(header.parts))
        except MalformedHeaderError as error:
            raise await self._refused(address, error) from error
        device = self._devices.get(header.source, self._first)
        receiving = Receiving(header.sender, header.parts, header.piece, device, self._opened)
        memory = self._memory()
        room = None if memory is None else memory.reservations
        if room is not None and not room.make_room(device, receiving.nbytes, wait=False):
            room.give_room(device, receiving.nbytes)
            await self._run(room.make_room, device, receiving.nbytes)
        try:
            found = await self._received(address, header, receiving, arriving)
            data.update(found)
            for key, value in found.items():
                if isinstance(value, _Unread):
                    self._fail(data, {key: arriving[key]}, value.error, address)
        except (DevctxError, OSError) as error:
            if is_out_of_memory(error):
                self._fail(data, arriving, error, address)
                return
            if isinstance(error, DriverError) and has_failed(receiving.device, error):
                self._on_failure(receiving.device, error)
            elif not isinstance(error, OSError):  # a later attempt would fail too
                await self._pairs.refuse(address, f"its memory cannot be read: {error}")
            raise CommClosedError(f"values from {address} could not be read: {error}") from error
        except MalformedHeaderError as error:
            raise await self._refused(address, error) from error
        except Exception as error:
            self._fail(data, arriving, error, address)
            return
        finally:
            if room is not None:  # the room is theirs until dask has them
                sizes = [nbytes for _, nbytes, _ in header.parts]
                left = receiving.nbytes
                for key, value in arriving.items():
                    nbytes = min(sum(sizes[value.first : value.first + value.count]), left)
                    room.hand_over(key, device, nbytes)
                    left -= nbytes
                room.give_room(device, left)
        took = time.perf_counter() - begun
        where = (header.source, receiving.device.uuid)
        self._traffic.count(*where, "ipc", receiving.nbytes, took, copies=len(arriving))

    async def _refused(self, address: str, error: MalformedHeaderError) -> CommClosedError:
        """Let a worker's values come through the host; return the error that ends its answer."""
        logger.warning("The header of a transfer from %s was refused: %s", address, error)
        await self._pairs.refuse(address, f"it sent a malformed header: {error}")
        return CommClosedError(f"values from {address} could not be read: {error}")

    def _fail(
        self, data: dict[Hashable, Any], keys: Iterable[Hashable], error: Exception, address: str
    ) -> None:
        for key in keys:
            del data[key]
            could_not_be_read(key, error, address, device_failed=self._has_failed())

    async def _received(
        self,
        address: str,
        header: Header,
        receiving: Receiving,
        arriving: dict[Hashable, Arriving],
    ) -> dict[Hashable, Any]:
        where = header.shown
        if receiving.nbytes <= QUICK_NBYTES and receiving.is_quick(where):
            try:
                receiving.allocate()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                await self._run(self._allocate, receiving)  # other values may have to leave
            if receiving.pieces:
                lane, opened = receiving.start(0, where)
                if lane.done_soon(QUICK_S):
                    receiving.finish(lane, opened, is_done=True)
                else:
                    await self._run(receiving.finish, lane, opened)
            return self._unpacked(receiving, arriving)
        last = receiving.pieces - 1
        found: dict[Hashable, Any]
        if last < 1:
            # All in one go: each change of threads takes time.
            found = await self._run(self._read_and_unpacked, receiving, where, arriving)
            return found
        await self._run(self._allocate, receiving)
        await self._pieces(address, header.number, receiving, where, last)
        found = await self._run(self._unpacked, receiving, arriving)
        return found

    async def _pieces(
        self, address: str, number: int, receiving: Receiving, where: Description, last: int
    ) -> None:
        """Read the pieces, two at a time, while the one after them is staged."""
        reads: list[asyncio.Task[None]] = []
        try:
            for index in range(last + 1):
                reads.append(asyncio.create_task(self._run(_read, receiving, index, where)))
                if index < last:
                    where = await self._staged(address, number, index + 1, reads)
                if index:
                    await reads[index - 1]
            await reads[last]
        except BaseException as error:
            # They write to memory that is freed next; and what a device says comes first.
            ends = await asyncio.gather(*reads, return_exceptions=True)
            raise next((end for end in ends if isinstance(end, DriverError)), error) from None

    async def _staged(
        self, address: str, number: int, index: int, reads: Sequence[asyncio.Task[None]]
    ) -> Description:
        """Return where the next piece is."""
        is_read = [read.done() for read in reads]
        first_unread = is_read.index(False) if False in is_read else index
        said = await self._ask(address, number, index, first_unread)
        if said is False:  # there is room where the pieces were that are read now
            await asyncio.gather(*reads)
            said = await self._ask(address, number, index, index)
        if not said:
            raise CommClosedError(f"{address} gave a transfer up")
        return read_description(said)

    async def _ask(self, address: str, number: int, index: int, read: int) -> Any:
        call = getattr(self._worker.rpc(address), NEXT)
        return await call(token=self._pairs.token, number=number, index=index, read=read)

    # -- on a thread

    def _allocate(self, receiving: Receiving) -> None:
        for _ in range(_ATTEMPTS):
            try:
                receiving.allocate()
                return
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            self._make_room(receiving.device)
        receiving.allocate()

    def _read_and_unpacked(
        self, receiving: Receiving, where: Description, arriving: dict[Hashable, Arriving]
    ) -> dict[Hashable, Any]:
        self._allocate(receiving)
        if receiving.pieces:
            _read(receiving, 0, where)
        return self._unpacked(receiving, arriving)

    def _unpacked(
        self, receiving: Receiving, arriving: dict[Hashable, Arriving]
    ) -> dict[Hashable, Any]:
        found: dict[Hashable, Any] = {}
        with receiving.device:
            for key, value in arriving.items():
                memory = receiving.memory[value.first : value.first + value.count]
                try:
                    found[key] = value.complete(memory)
                except Exception as error:
                    found[key] = _Unread(error)
        return found


class _Unread:
    def __init__(self, error: Exception) -> None:
        self.error = error


def _read(receiving: Receiving, index: int, where: Description) -> None:
    begun: tuple[Lane, Opened] = receiving.start(index, where)
    receiving.finish(*begun)
