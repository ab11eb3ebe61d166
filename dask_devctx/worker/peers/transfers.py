"""One worker's side of its transfers: the memory that it shows to others, and opens of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from distributed import Status, Worker

from dask_devctx.config.options import Options, is_ucx
from dask_devctx.cuda.device import Device
from dask_devctx.transfer.ipc.receiving import OpenedBuffers, Receiving
from dask_devctx.transfer.ipc.sending import Sending, Staging
from dask_devctx.transfer.traffic import TrafficCounts
from dask_devctx.worker.peers.transport import Transport
from dask_devctx.worker.values.accounting import limit_nbytes

if TYPE_CHECKING:
    from dask_devctx.worker.values.store import Store

# The entry of a message with its staged values: where they are, and what of them is in host memory.
STAGED: Final = "devctx-ipc"
# The message that the next piece of them is staged, too.
NEXT: Final = "devctx-ipc-next"
# Values up to this size change no thread, if their copies take only microseconds.
QUICK_NBYTES: Final = 2**20
_QUICK_S: Final = 300e-6
# Each thread waits for the devices of one transfer.
_THREADS: Final = 16

# A worker closes buffers of another one, which frees them.
CLOSE: Final = "devctx_ipc_close"
_CLOSE_TIMEOUT_S: Final = 5.0
_CONNECT_TIMEOUT_S: Final = 1.0
# Staging memory that was not used for this long goes back to its device.
_IDLE_S: Final = 60.0
# A fraction of a device's memory is at most the limit divided by this.
_OF_LIMIT: Final = 4
_LOOK_S: Final = 0.05


@dataclass(eq=False)
class PeerTransfers:
    """The state that all transfers of a worker share; ``limits`` are its devices' memory limits.

    On each device, the option ``ipc_staging`` bounds the staging memory: a fraction, or bytes.
    """

    worker: Worker
    devices: Sequence[Device]
    options: Options
    limits: Mapping[Device, int]
    store: Store  # the values; only with devices
    traffic: TrafficCounts
    has_failed: Callable[..., bool]  # whether a device of the worker has failed
    opened: OpenedBuffers = field(default_factory=OpenedBuffers)
    # The workers that may have this one's memory open; some may have left the cluster.
    readers: set[str] = field(default_factory=set)
    under_way: int = 0  # requests and answers; they are completed after the end, too

    def __post_init__(self) -> None:
        uses_ipc = bool(self.devices) and self.options.ipc is not False
        self.transport = Transport(uses_ipc, "ucx" if is_ucx(self.worker.address) else "host")
        self.stagings = {
            device: Staging(device, self._limit(device))
            for device in (self.devices if uses_ipc else ())
        }
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="devctx-ipc")
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

    def _limit(self, device: Device) -> int:
        staging = self.options.ipc_staging
        most = limit_nbytes(device, staging) or 0
        return most if staging > 1 else min(most, self.limits[device] // _OF_LIMIT)

    def end(self) -> None:
        """Close other workers' memory, and free this one's when no transfer uses it any more."""
        self.opened.close()
        # A worker that closes frees no staging memory: it goes with its process.
        if self.worker.status is Status.closing:
            self._executor.shutdown(wait=False)
        else:
            self.worker.loop.add_callback(self._end_later)

    async def _end_later(self) -> None:
        try:
            while self.in_use or self.under_way or not await self.give_back():
                if self.worker.status is Status.closed:
                    break
                await asyncio.sleep(_LOOK_S)
                self.opened.close()  # what arrived since
        finally:
            self.opened.close()
            self._executor.shutdown(wait=False)

    # -- for one transfer

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on a thread that may wait."""
        # dask cancels its waiter only where the worker closes: its staging memory is not freed.
        return await self._loop.run_in_executor(self._executor, function, *args)

    async def copied(self, transfer: Sending | Receiving) -> None:
        """Wait for a copy that has started: for a moment here, then on a thread."""
        if transfer.stream.done_soon(_QUICK_S):
            transfer.finish(is_done=True)
        else:
            await self.run(transfer.finish)

    # -- other workers' memory

    async def close_memory_of(self, address: str) -> None:
        """Close the memory of another worker."""
        with suppress(RuntimeError):  # this worker ends, and has closed all that it had open
            await self.run(self.opened.close, address)

    async def close_buffers(self, said: Any, **_: object) -> bool:
        """Close buffers of another worker, which tells their handles."""
        return bool(await self.run(self.opened.close, None, said))

    def forget(self, worker: str, **message: object) -> None:
        """Forget a worker that left, and close its memory."""
        self.transport.forget(worker)
        self.worker.loop.add_callback(self.close_memory_of, worker)

    # -- this worker's staging memory

    @property
    def in_use(self) -> int:
        """The bytes of staging memory that hold values on their way."""
        return sum(staging.taken for staging in self.stagings.values())

    def free_staging(self, device: Device) -> None:
        """Free the staging memory of a device that ran out of memory.

        The thread of a task waits for it, the event loop does not.
        """
        if (staging := self.stagings.get(device)) is not None and staging.nbytes:
            done = asyncio.run_coroutine_threadsafe(self.give_back([staging]), self._loop)
            if threading.get_ident() != self._thread:
                with suppress(TimeoutError):
                    done.result(_CLOSE_TIMEOUT_S)

    async def give_back_unused(self) -> None:
        """Free staging memory that was long unused."""
        now = time.monotonic()
        idle = [one for one in self.stagings.values() if one.nbytes and now - one.used_at > _IDLE_S]
        await self.give_back(idle)

    async def give_back(self, stagings: Sequence[Staging] | None = None) -> bool:
        """Free staging memory that is not in use; return False if another worker has it open."""
        some = self.stagings.values() if stagings is None else stagings
        found = [(staging, staging.retire()) for staging in some]
        handles = tuple(buffer.handle for _, buffers in found for buffer in buffers)
        if not handles:
            return True
        closed = await asyncio.gather(*[self._ask_to_close(one, handles) for one in self.readers])
        for staging, buffers in found:
            if all(closed):
                await self.run(staging.free, buffers)
            else:
                staging.use_again(buffers)
        return all(closed)

    async def _ask_to_close(self, address: str, handles: tuple[bytes, ...]) -> bool:
        """Return whether another worker has closed this worker's buffers, or is gone."""
        pool = self.worker.rpc
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                # dask tries for longer than this to connect to a process that is gone.
                pool.reuse(address, await pool.connect(address, timeout=_CONNECT_TIMEOUT_S))
                said = await getattr(pool(address), CLOSE)(said=handles)
        except OSError as error:
            # dask's last try may have had no time left to hear that nobody is there: once more.
            if isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError):
                return False
            self.readers.discard(address)  # with what its process had open
            return True
        except Exception:  # this worker is closing, or the other one's answer is an error
            return False
        return said is not False  # who does not know the question has closed all
