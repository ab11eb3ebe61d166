"""Transfers of values on a device to another worker of this machine by CUDA IPC, with any comm.

dask's own messages name the place where the sender has staged the values. The receiver reads them
from there before it passes the answer on. So dask's "OK" means that the sender may use the staging
memory again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

from distributed import Status, Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.connections import answering
from dask_devctx.dask_internals.worker import larger_messages, metric
from dask_devctx.errors import DriverError
from dask_devctx.transfer.ipc.opened import OpenedBuffers
from dask_devctx.transfer.ipc.staging import Staging
from dask_devctx.worker.inputs import Inputs
from dask_devctx.worker.ipc import incoming, outgoing, pairs
from dask_devctx.worker.ipc.connections import Connections
from dask_devctx.worker.ipc.incoming import Incoming
from dask_devctx.worker.ipc.outgoing import Outgoing
from dask_devctx.worker.ipc.pairs import Pairs
from dask_devctx.worker.ipc.traffic import Traffic
from dask_devctx.worker.ipc.unreadable import UnreadableValues

if TYPE_CHECKING:
    from dask_devctx.worker.memory.manager import DeviceMemory

logger = logging.getLogger(__name__)

__all__ = ["PeerTransfers"]

_CLOSE: Final = "devctx_ipc_close"
# Each thread waits for the devices of one transfer.
_THREADS: Final = 16
# Staging memory that was not used for this long goes back to its device.
_IDLE_S: Final = 60.0
_LOOK_EVERY_MS: Final = 5_000
_LOOK_S: Final = 0.05
_CLOSE_TIMEOUT_S: Final = 5.0
_CONNECT_TIMEOUT_S: Final = 2.0
# dask asks a worker for 50 MB at a time, and has one such question under way to each worker. A
# question takes milliseconds; between devices, 50 MB take a fifth of one.
_MESSAGE_NBYTES: Final = 10**9


class PeerTransfers:
    """While it is open, a worker sends and receives values on its devices without the host.

    Parameters
    ----------
    worker
        The worker, on whose event loop this is called.
    devices
        Its devices; without devices, dask sends all values.
    inputs
        Knows the work that makes each value; None if no work is known.
    staging
        How much of each device's memory may be used for staging: a fraction, or bytes.
    use
        False for never, True for always, or ``"auto"`` for always except with a UCX comm, which
        makes such transfers itself.
    make_room
        Called with a device that has no memory left.
    on_failure
        Called with a device that failed, and the driver's error.
    memory
        Returns the manager of the device memory; None if there is none.

    Attributes
    ----------
    metric
        The name of the counts that the worker's heartbeat carries.
    unreadable
        The values that arrived and could not be read.
    """

    metric: Final = "devctx-ipc"

    def __init__(
        self,
        worker: Worker,
        devices: Sequence[Device],
        inputs: Inputs | None,
        *,
        staging: float,
        use: object = "auto",
        make_room: Callable[[Device], object] = lambda device: None,
        on_failure: Callable[[Device, DriverError], object] = lambda device, error: None,
        memory: Callable[[], DeviceMemory | None] = lambda: None,
    ) -> None:
        self._worker = worker
        self._steps = ExitStack()
        self.unreadable = UnreadableValues(worker)
        self.traffic = Traffic()
        self._opened = OpenedBuffers()
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="devctx-ipc")
        self._stagings = {device: Staging(device, _limit(device, staging)) for device in devices}
        self._pairs: Pairs | None = None
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        incoming.register()
        by_ucx = worker.address.partition("://")[0].startswith("ucx")
        self._used = bool(devices) and use is not False and not (use == "auto" and by_ucx)
        if self._used:
            first = devices[0]
            reasons = self.traffic.reasons
            self._pairs = Pairs(
                worker,
                self._stagings[first],
                first,
                self._opened,
                self._run,
                reasons,
            )
            self._outgoing = Outgoing(
                worker,
                self._stagings,
                inputs,
                self._pairs.receivers,
                self._pairs.token,
                self._run,
                self.traffic,
                on_failure,
            )
            self._incoming = Incoming(
                worker,
                devices,
                self._opened,
                self._pairs,
                self.unreadable,
                make_room,
                self._run,
                self.traffic,
                on_failure,
                memory,
            )
            self._steps.enter_context(answering(worker, self._handlers()))
            one_piece = min(staging.one_piece for staging in self._stagings.values())
            self._steps.enter_context(larger_messages(worker, min(_MESSAGE_NBYTES, one_piece)))
        self._connections = Connections(
            worker,
            self.unreadable,
            settle=self._settle,
            complete=self._complete,
            prepare=self._prepare,
            lost=self._lost,
            takes_host_forms=lambda: memory() is not None,
        )
        self._steps.callback(self._connections.close)
        rows = metric(worker, self.metric, lambda worker: self.traffic.rows())
        self._steps.enter_context(rows)
        self._looking = PeriodicCallback(self._look, _LOOK_EVERY_MS)
        self._looking.start()

    def close(self) -> None:
        """Leave transfers to dask from now on."""
        self._looking.stop()
        self._steps.close()
        if self._pairs is not None:
            self._pairs.close()
            self._opened.close()
        # A worker that closes frees no staging memory: it goes with its process.
        if self._pairs is None or self._worker.status is Status.closing:
            self._executor.shutdown(wait=False)
        else:
            self._worker.loop.add_callback(self._end)

    async def _end(self) -> None:
        try:
            while self.in_use or self._connections.under_way:
                await asyncio.sleep(_LOOK_S)
            self._opened.close()  # what arrived since
            await self.give_back()
        finally:
            self._executor.shutdown(wait=False)

    @property
    def in_use(self) -> int:
        """The bytes of staging memory that hold values on their way."""
        return sum(staging.in_use for staging in self._stagings.values())

    def staging_nbytes(self, device: Device) -> int:
        """Return the bytes of a device that are allocated as staging memory."""
        staging = self._stagings.get(device)
        return 0 if staging is None else staging.nbytes

    def _handlers(self) -> dict[str, Any]:
        assert self._pairs is not None
        return {
            pairs.HELLO: self._pairs.hello,
            pairs.AGREE: self._pairs.agree,
            outgoing.NEXT: self._outgoing.next,
            _CLOSE: self._close_opened,
        }

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    def free_staging(self, device: Device) -> int:
        """Free the staging memory of a device that ran out of memory; return the freed bytes.

        Called on the thread of a task, which waits for it, or on the event loop, which does not
        wait.
        """
        staging = self._stagings.get(device)
        if self._pairs is None or staging is None or not staging.nbytes:
            return 0
        before = staging.nbytes
        done = asyncio.run_coroutine_threadsafe(self.give_back([staging]), self._loop)
        if threading.get_ident() != self._thread:
            with suppress(TimeoutError):
                done.result(_CLOSE_TIMEOUT_S)
        return before - staging.nbytes

    # -- the callbacks of the connections

    async def _settle(self, address: str) -> str | None:
        if self._pairs is None:
            return None
        await self._pairs.settle(address)
        return None if self._pairs.ways.get(address, "") is not None else self._pairs.token

    async def _complete(self, address: str, msg: dict[str, Any]) -> None:
        if self._pairs is not None:
            await self._incoming.complete(address, msg)

    async def _prepare(self, who: str | None, token: str, msg: dict[str, Any]) -> Any:
        if self._pairs is not None:
            return await self._outgoing.prepare(who, token, msg)
        return None

    def _lost(self, address: str) -> None:
        if self._pairs is not None:
            self._pairs.forget(address)

    # -- staging memory that is not needed

    async def _look(self) -> None:
        """Release the memory of workers that are gone, and staging memory that was long unused."""
        if self._pairs is None:
            return
        for address in list(self._pairs.tokens):
            if await self._ask_to_close(address, []) is None:
                self._pairs.forget(address)
        idle = [
            staging
            for staging in self._stagings.values()
            if staging.nbytes and time.monotonic() - staging.used_at > _IDLE_S
        ]
        if idle:
            await self.give_back(idle)

    async def give_back(self, stagings: Sequence[Staging] | None = None) -> None:
        """Free staging memory that is not in use, once no other worker has it open."""
        assert self._pairs is not None
        found = [
            (staging, staging.retire())
            for staging in (self._stagings.values() if stagings is None else stagings)
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
        assert self._pairs is not None
        pool = self._worker.rpc
        call = getattr(pool(address), _CLOSE)
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


def _limit(device: Device, staging: float) -> int:
    if staging > 1:
        return int(staging)
    return int(device.memory_info.total * staging)
