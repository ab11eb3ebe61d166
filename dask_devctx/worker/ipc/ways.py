"""The two ways of a value on a device to another worker: by CUDA IPC, or as dask sends it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from distributed import Status, Worker

from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.connections import answering
from dask_devctx.dask_internals.worker import larger_messages, told_who_leaves
from dask_devctx.errors import DriverError
from dask_devctx.transfer.ipc.opened import OpenedBuffers
from dask_devctx.transfer.ipc.staging import Staging
from dask_devctx.worker.inputs.inputs import Inputs
from dask_devctx.worker.ipc import messages
from dask_devctx.worker.ipc.connections import Connections, Message
from dask_devctx.worker.ipc.incoming import Incoming
from dask_devctx.worker.ipc.outgoing import Outgoing
from dask_devctx.worker.ipc.pairs import Pairs
from dask_devctx.worker.ipc.places import on_devices
from dask_devctx.worker.ipc.traffic import Traffic

if TYPE_CHECKING:
    from dask_devctx.worker.memory.manager import DeviceMemory

# Each thread waits for the devices of one transfer.
_THREADS: Final = 16
# Staging memory that was not used for this long goes back to its device.
_IDLE_S: Final = 60.0
# A fraction of a device's memory is at most the limit divided by this.
_OF_LIMIT: Final = 4
_LOOK_S: Final = 0.05
_CLOSE_TIMEOUT_S: Final = 5.0
_CONNECT_TIMEOUT_S: Final = 2.0
_SWITCHED_OFF: Final = "the option ipc is False"
# dask asks a worker for 50 MB at a time, and has one such question under way to each worker. A
# question takes milliseconds; between devices, 50 MB take a fifth of one.
_MESSAGE_NBYTES: Final = 10**9


class DasksWay:
    """Nothing is staged: dask sends all values. The methods are those of :class:`IpcWay`.

    Parameters
    ----------
    devices, inputs, traffic
        As for :class:`IpcWay`. Without devices, nothing is counted.
    """

    in_use = 0
    stagings: Mapping[Device, Staging] = MappingProxyType({})

    def __init__(self, devices: Sequence[Device], inputs: Inputs | None, traffic: Traffic) -> None:
        self._devices = devices
        self._inputs = inputs
        self._traffic = traffic

    async def settle(self, address: str) -> str | None:
        return None

    async def complete(self, address: str, msg: Message) -> None: ...

    async def prepare(self, who: str | None, token: str, msg: Message) -> None:
        if who is not None and self._devices:
            places = on_devices(msg["data"], self._devices, self._inputs, staged=False)
            self._traffic.sent_by_dask(places, who, _SWITCHED_OFF)

    def lost(self, address: str) -> None: ...

    async def look(self) -> None: ...

    def free_staging(self, device: Device) -> int:
        return 0

    def close(self, connections: Connections) -> None: ...


class IpcWay:
    """Values on devices are staged in memory that other workers open; their pickles go by dask.

    Parameters
    ----------
    worker
        The worker, on whose event loop this is called.
    devices
        Its devices; at least one.
    inputs
        Knows the work that makes each value; None if no work is known.
    staging
        How much of each device's memory may be used for staging: a fraction, or bytes.
    limits
        The limit of each device's memory; a fraction is at most a quarter of this limit.
    make_room
        Called with a device that has no memory left.
    on_failure
        Called with a device that failed, and the driver's error.
    memory
        Returns the manager of the device memory; None if there is none.
    has_failed
        Returns whether a device of the worker has failed, so that the worker ends.
    traffic
        Counts the transfers.
    """

    def __init__(
        self,
        worker: Worker,
        devices: Sequence[Device],
        inputs: Inputs | None,
        *,
        staging: float,
        limits: Mapping[Device, int],
        make_room: Callable[[Device], object],
        on_failure: Callable[[Device, DriverError], object],
        memory: Callable[[], DeviceMemory | None],
        has_failed: Callable[[], bool],
        traffic: Traffic,
    ) -> None:
        self._worker = worker
        self._opened = OpenedBuffers()
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="devctx-ipc")
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self.stagings = {
            device: Staging(device, _limit(device, staging, limits.get(device)))
            for device in devices
        }
        first = devices[0]
        self._pairs = Pairs(worker, self.stagings[first], first, self._opened, self._run)
        self._left: set[str] = set()  # the workers that may still have this one's memory open
        self._outgoing = Outgoing(
            worker, self.stagings, inputs, self._pairs, self._run, traffic, on_failure
        )
        self._incoming = Incoming(
            worker,
            devices,
            self._opened,
            self._pairs,
            has_failed,
            make_room,
            self._run,
            traffic,
            on_failure,
            memory,
        )
        with ExitStack() as steps:
            steps.enter_context(answering(worker, self._handlers()))
            steps.enter_context(told_who_leaves(worker, self._worker_left))
            one_piece = min(staging.one_piece for staging in self.stagings.values())
            steps.enter_context(larger_messages(worker, min(_MESSAGE_NBYTES, one_piece)))
            self._steps = steps.pop_all()

    def close(self, connections: Connections) -> None:
        """Begin no transfer any more; those under way on these connections are completed."""
        self._steps.close()
        self._pairs.close()
        self._opened.close()
        # A worker that closes frees no staging memory: it goes with its process.
        if self._worker.status is Status.closing:
            self._executor.shutdown(wait=False)
        else:
            self._worker.loop.add_callback(self._end, connections)

    async def _end(self, connections: Connections) -> None:
        try:
            while self.in_use or connections.under_way:
                await asyncio.sleep(_LOOK_S)
            self._opened.close()  # what arrived since
            await self.give_back()
        finally:
            self._executor.shutdown(wait=False)

    @property
    def in_use(self) -> int:
        """The bytes of staging memory that hold values on their way."""
        return sum(staging.in_use for staging in self.stagings.values())

    def _handlers(self) -> dict[str, Any]:
        acts: dict[str, Callable[..., Any]] = {
            messages.HELLO: self._pairs.hello,
            messages.AGREE: self._pairs.agree,
            messages.NEXT: self._outgoing.next,
            messages.CLOSE: self._close_opened,
        }
        return {op: messages.handler(op, act) for op, act in acts.items()}

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    # -- the callbacks of the connections

    async def settle(self, address: str) -> str | None:
        """Return the token of this worker if it can read another worker's memory, or None."""
        await self._pairs.settle(address)
        return None if self._pairs.ways.get(address, "") is not None else self._pairs.token

    async def complete(self, address: str, msg: Message) -> None:
        """Read the values of a worker's answer from its memory."""
        await self._incoming.complete(address, msg)

    async def prepare(self, who: str | None, token: str, msg: Message) -> Any:
        """Stage the values for another worker."""
        return await self._outgoing.prepare(who, token, msg)

    def lost(self, address: str) -> None:
        """Forget a worker whose connection ended."""
        self._pairs.forget(address)

    def _worker_left(self, address: str) -> None:
        """Forget a worker that left the cluster; its process may still be there."""
        self._pairs.left(address)
        if address in self._pairs.receivers:
            self._left.add(address)

    # -- staging memory that is not needed

    async def look(self) -> None:
        """Release the memory of workers that are gone, and staging memory that was long unused."""
        for address in {*self._pairs.tokens, *self._left}:
            if await self._ask_to_close(address, []) is None:
                self._pairs.forget(address)
        self._left &= self._pairs.receivers.keys()
        idle = [
            staging
            for staging in self.stagings.values()
            if staging.nbytes and time.monotonic() - staging.used_at > _IDLE_S
        ]
        if idle:
            await self.give_back(idle)

    def free_staging(self, device: Device) -> int:
        """Free the staging memory of a device that ran out of memory; return the freed bytes.

        Called on the thread of a task, which waits for it, or on the event loop, which does not
        wait.
        """
        staging = self.stagings.get(device)
        if staging is None or not staging.nbytes:
            return 0
        before = staging.nbytes
        done = asyncio.run_coroutine_threadsafe(self.give_back([staging]), self._loop)
        if threading.get_ident() != self._thread:
            with suppress(TimeoutError):
                done.result(_CLOSE_TIMEOUT_S)
        return before - staging.nbytes

    async def give_back(self, stagings: Sequence[Staging] | None = None) -> None:
        """Free staging memory that is not in use, once no other worker has it open."""
        found = [
            (staging, staging.retire())
            for staging in (self.stagings.values() if stagings is None else stagings)
        ]
        numbers = [buffer.number for _, buffers in found for buffer in buffers]
        if not numbers:
            return
        closed = await asyncio.gather(
            *[self._ask_to_close(address, numbers) for address in list(self._pairs.receivers)]
        )
        for staging, buffers in found:
            if False in closed:
                staging.use_again(buffers)
            else:
                await self._run(staging.free, buffers)

    async def _ask_to_close(self, address: str, numbers: list[int]) -> bool | None:
        """Return whether another worker has closed this worker's buffers; None if it is gone."""
        pool = self._worker.rpc
        call = getattr(pool(address), messages.CLOSE)
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                # dask tries for longer than this to connect to a process that is gone.
                pool.reuse(address, await pool.connect(address, timeout=_CONNECT_TIMEOUT_S))
                said = await call(token=self._pairs.token, numbers=numbers)
        except TimeoutError:
            return False
        except OSError as error:
            if isinstance(error.__cause__, TimeoutError):
                return False
            self._pairs.receivers.pop(address, None)  # its process is gone, with what it had open
            return None
        except RuntimeError:  # this worker is closing
            return False
        return said is not False  # who does not know the question has closed all

    async def _close_opened(self, token: str, numbers: list[int]) -> bool:
        return bool(await self._run(self._opened.close, token, numbers))


def _limit(device: Device, staging: float, limit: int | None) -> int:
    if staging > 1:
        return int(staging)
    total = device.memory_info.total
    most = int(total * staging)
    return min(most, limit // _OF_LIMIT) if limit else most
