"""Transfers of values on a device to other workers: by CUDA IPC inside a machine, with any comm.

dask's own messages name the place where the sender has staged the values. The receiver reads them
from there before it passes the answer on. So dask's "OK" means that the sender may use the staging
memory again. Where a pair of workers cannot do that, dask's comm carries the values.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

from distributed import Status, Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.connections import answering
from dask_devctx.dask_internals.worker import larger_messages, told_after
from dask_devctx.errors import DriverError
from dask_devctx.transfer.ipc.sending import Staging
from dask_devctx.transfer.traffic import TrafficCounts
from dask_devctx.worker.peers import receive
from dask_devctx.worker.peers.connections import connected
from dask_devctx.worker.peers.local import Local

if TYPE_CHECKING:
    from dask_devctx.worker.values.store import Store

__all__ = ["PeerTransfers"]

CLOSE: Final = "devctx_ipc_close"
# Staging memory that was not used for this long goes back to its device.
_IDLE_S: Final = 60.0
# A fraction of a device's memory is at most the limit divided by this.
_OF_LIMIT: Final = 4
_LOOK_EVERY_MS: Final = 5_000
_LOOK_S: Final = 0.05
_CLOSE_TIMEOUT_S: Final = 5.0
_CONNECT_TIMEOUT_S: Final = 2.0
# dask asks a worker for 50 MB at a time, and has one such question under way to each worker. A
# question takes milliseconds; between devices, 50 MB take a fifth of one.
_MESSAGE_NBYTES: Final = 10**9
# So many of them have room at a time.
_AT_A_TIME: Final = 4


class PeerTransfers:
    """While it is open, a worker sends and receives values on its devices without the host.

    ``staging`` of each device's memory, a fraction or bytes, may be used for it. With ``use``
    False, dask sends all values, which are counted.
    """

    def __init__(
        self,
        worker: Worker,
        devices: Sequence[Device],
        store: Callable[[], Store | None],
        traffic: TrafficCounts,
        *,
        staging: float,
        limits: Mapping[Device, int],
        use: object,
        make_room: Callable[[Device], object],
        on_failure: Callable[[Device, DriverError], object],
        has_failed: Callable[[], bool],
    ) -> None:
        receive.register()
        uses_ipc = bool(devices) and use is not False
        self._local = local = Local(
            worker, devices, store, traffic, uses_ipc, make_room, on_failure, has_failed
        )
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        with ExitStack() as steps:
            steps.callback(self._end)
            if uses_ipc:
                for device in devices:
                    limit = _limit(device, staging, limits.get(device))
                    local.stagings[device] = Staging(device, limit)
                steps.enter_context(answering(worker, {CLOSE: self._close_buffers}))
                steps.enter_context(told_after(worker, "remove-worker", local.forget))
                most = min(staging.limit for staging in local.stagings.values()) // _AT_A_TIME
                steps.enter_context(larger_messages(worker, min(_MESSAGE_NBYTES, most)))
            steps.enter_context(connected(local))
            looking = PeriodicCallback(self._look, _LOOK_EVERY_MS)
            steps.callback(looking.stop)
            looking.start()
            self._steps = steps.pop_all()

    def close(self) -> None:
        """Leave transfers to dask from now on; those under way are completed."""
        self._steps.close()

    def _end(self) -> None:
        self._local.opened.close()
        # A worker that closes frees no staging memory: it goes with its process.
        if self._local.worker.status is Status.closing:
            self._local.executor.shutdown(wait=False)
        else:
            self._local.worker.loop.add_callback(self._end_later)

    async def _end_later(self) -> None:
        try:
            while self.in_use or self._local.under_way:
                await asyncio.sleep(_LOOK_S)
            self._local.opened.close()  # what arrived since
            await self.give_back()
        finally:
            self._local.executor.shutdown(wait=False)

    async def _close_buffers(self, said: Any, **_: object) -> bool:
        """Close buffers of another worker, which tells their handles."""
        return bool(await self._local.run(self._local.opened.close, None, said))

    # -- staging memory

    @property
    def stagings(self) -> Mapping[Device, Staging]:
        """The staging memory of each device."""
        return self._local.stagings

    @property
    def in_use(self) -> int:
        """The bytes of staging memory that hold values on their way."""
        return sum(staging.taken for staging in self.stagings.values())

    def staging_nbytes(self, device: Device) -> int:
        """Return the bytes of a device that are allocated as staging memory."""
        staging = self._local.stagings.get(device)
        return 0 if staging is None else staging.nbytes

    def free_staging(self, device: Device) -> int:
        """Free the staging memory of a device that ran out of memory; return the freed bytes.

        The thread of a task waits for it, the event loop does not.
        """
        before = self.staging_nbytes(device)
        if not before:
            return 0
        again = self.give_back([self.stagings[device]])
        done = asyncio.run_coroutine_threadsafe(again, self._loop)
        if threading.get_ident() != self._thread:
            with suppress(TimeoutError):
                done.result(_CLOSE_TIMEOUT_S)
        return before - self.staging_nbytes(device)

    async def _look(self) -> None:
        """Release staging memory that was long unused."""
        now = time.monotonic()
        idle = [one for one in self.stagings.values() if one.nbytes and now - one.used_at > _IDLE_S]
        await self.give_back(idle)

    async def give_back(self, stagings: Sequence[Staging] | None = None) -> None:
        """Free staging memory that is not in use, once no other worker has it open."""
        stagings = list(self.stagings.values()) if stagings is None else stagings
        found = [(staging, staging.retire()) for staging in stagings]
        handles = tuple(buffer.handle for _, buffers in found for buffer in buffers)
        if not handles:
            return
        readers = list(self._local.readers)
        closed = await asyncio.gather(*[self._ask_to_close(one, handles) for one in readers])
        for staging, buffers in found:
            if all(closed):
                await self._local.run(staging.free, buffers)
            else:
                staging.use_again(buffers)

    async def _ask_to_close(self, address: str, handles: tuple[bytes, ...]) -> bool:
        """Return whether another worker has closed this worker's buffers, or is gone."""
        pool = self._local.worker.rpc
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                # dask tries for longer than this to connect to a process that is gone.
                pool.reuse(address, await pool.connect(address, timeout=_CONNECT_TIMEOUT_S))
                close = getattr(self._local.worker.rpc(address), CLOSE)
                said = await close(said=handles)
        except OSError as error:
            if isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError):
                return False
            self._local.readers.discard(address)  # with what its process had open
            return True
        except RuntimeError:  # this worker is closing
            return False
        return said is not False  # who does not know the question has closed all


def _limit(device: Device, staging: float, limit: int | None) -> int:
    if staging > 1:
        return int(staging)
    most = int(device.memory_info.total * staging)
    return min(most, limit // _OF_LIMIT) if limit else most
