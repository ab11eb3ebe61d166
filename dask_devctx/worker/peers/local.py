"""What a worker's transfers share: its memory, its counts, and what it knows of other workers.

A worker tells others who it is when it asks for values, and remembers whom it cannot read. Nobody
asks whether memory can be opened: the first transfer tries it. Where that fails, values come
through the host from then on.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from distributed import Worker

from dask_devctx.config.options import is_ucx
from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.errors import DevctxError, DriverError
from dask_devctx.transfer.ipc.receiving import OpenedBuffers, Receiving
from dask_devctx.transfer.ipc.sending import Sending, Staging
from dask_devctx.transfer.traffic import TrafficCounts

if TYPE_CHECKING:
    from dask_devctx.worker.values.store import Store

logger = logging.getLogger(__name__)

# The name of staged values among distributed's serializers, and of a message's entry about them.
FAMILY: Final = "devctx-ipc"
# Values up to this size change no thread, if their copies take only microseconds.
QUICK_NBYTES: Final = 2**20
_QUICK_S: Final = 300e-6

# Each thread waits for the devices of one transfer.
_THREADS: Final = 16

# Workers with another number send each other values through the host. It changes with any message.
PROTOCOL: Final = 5
# The beginning of what a worker says of itself; a reason not to read begins otherwise.
_SAID: Final = "ipc:"
# A worker whose memory could not be read for a passing reason is asked again after this time.
_AGAIN_S: Final = 5.0
_MOST_OF_A_REASON: Final = 1000
_NAME: Final = uuid.uuid4().hex


@dataclass(eq=False)
class Local:
    """One worker, its devices, and the memory that it shows to others and opens of them."""

    worker: Worker
    devices: Sequence[Device]
    store: Callable[[], Store | None]  # the values; None without devices
    traffic: TrafficCounts
    uses_ipc: bool  # if not, dask sends all values
    make_room: Callable[[Device], object]  # called with a device that has no memory left
    on_failure: Callable[[Device, DriverError], object]
    has_failed: Callable[[], bool]  # whether a device of the worker has failed
    stagings: dict[Device, Staging] = field(default_factory=dict)
    opened: OpenedBuffers = field(default_factory=OpenedBuffers)
    # Why the memory of other workers is not read, and until when, by address.
    refused: dict[str, tuple[str, float]] = field(default_factory=dict)
    # The workers that may have this one's memory open; some may have left the cluster.
    readers: set[str] = field(default_factory=set)

    is_open: bool = False
    under_way: int = 0  # requests without an answer; they are completed after the end, too

    def __post_init__(self) -> None:
        self.by_dask = "ucx" if is_ucx(self.worker.address) else "host"
        self.executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="devctx-ipc")

    async def run(self, function: Callable[..., Any], *args: Any, undo: Any = None) -> Any:
        """Run a function on a thread that may wait.

        If nobody waits for it any more when it ends, ``undo`` is called with its result.
        """
        future = self.executor.submit(function, *args)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            if undo is not None:
                future.add_done_callback(functools.partial(_undone, undo))
            raise

    async def copied(self, transfer: Sending | Receiving, undo: Any = None) -> None:
        """Wait for a copy that has started: for a moment here, then on a thread."""
        if transfer.lane.done_soon(_QUICK_S):
            transfer.finish(is_done=True)
        else:
            await self.run(transfer.finish, undo=undo)

    def failed(self, device: Device, error: Exception) -> bool:
        """Return whether an error means that a device, or CUDA here, has failed; then say so."""
        if not isinstance(error, DriverError):
            return False
        if error.code not in statuses.STICKY:
            if error.code not in statuses.GONE:
                return False
            try:
                with device:
                    device._backend.calls.work.probe()
                return False
            except DevctxError:
                pass
        self.on_failure(device, error)
        return True

    # -- as the receiver

    def says(self, address: str) -> str:
        """Return what to say to a worker: the name of this process, or why it cannot be read."""
        if not self.uses_ipc:
            return ""
        reason, until = self.refused.get(address, ("", 0.0))
        if time.monotonic() < until:
            return reason
        return f"{_SAID}{PROTOCOL} {_host()} {_process()}"

    async def refuse(self, address: str, reason: str, *, passes: bool) -> None:
        """Stop reading a worker's memory, for a while or for good."""
        until = time.monotonic() + _AGAIN_S if passes else float("inf")
        self.refused[address] = reason[:_MOST_OF_A_REASON], until
        logger.info("values on a device come from %s through the host: %s", address, reason)
        await self.close_memory_of(address)

    def forget(self, worker: str, **message: object) -> None:
        """Forget a worker, and close its memory; another worker may have the address later."""
        self.refused.pop(worker, None)
        self.worker.loop.add_callback(self.close_memory_of, worker)

    async def close_memory_of(self, address: str) -> None:
        """Close the memory of another worker."""
        with suppress(RuntimeError):  # this worker ends, and has closed all that it had open
            await self.run(self.opened.close, address)

    # -- as the sender

    def why_not(self, said: str) -> str:
        """Return why a worker that said this cannot read this one's memory; empty if it can."""
        if not self.uses_ipc:
            return "the option ipc is False"
        if not said.startswith(_SAID):
            return said or "it does not say that it can read them"
        version, _, rest = said.removeprefix(_SAID).partition(" ")
        host, _, process = rest.partition(" ")
        if version != str(PROTOCOL):
            return "it has another version of dask-devctx"
        if process == _process():  # a handle cannot be opened in the process that made it
            return "it is in the same process"
        return "" if host == _host() else "it is on another machine, or in another container"


def _undone(undo: Callable[[Any], object], future: Future[Any]) -> None:
    if not future.cancelled() and future.exception() is None:
        undo(future.result())


def _process() -> str:
    return f"{_NAME}-{os.getpid()}"  # one that was forked has the same module


@functools.cache
def _host() -> str:
    """Return a name for this machine and, in a container, for the container."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}-{os.stat('/proc/self/ns/ipc').st_ino}"
    except OSError:
        return socket.gethostname()
