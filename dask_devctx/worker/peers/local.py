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
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from distributed import Worker

from dask_devctx.config.options import is_ucx
from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.errors import DevctxError, DriverError
from dask_devctx.transfer.ipc.receiving import OpenedBuffers
from dask_devctx.transfer.ipc.sending import Staging
from dask_devctx.transfer.traffic import Traffic as Counts

if TYPE_CHECKING:
    from dask_devctx.worker.values.store import Store

logger = logging.getLogger(__name__)

# The name of staged values among distributed's serializers, and of a message's entry about them.
FAMILY: Final = "devctx-ipc"
# Values up to this size change no thread, if their copies take only microseconds.
QUICK_NBYTES: Final = 2**20
QUICK_S: Final = 300e-6

# Each thread waits for the devices of one transfer.
_THREADS: Final = 16
# Each heartbeat carries all rows. In a large cluster, a worker sends to a thousand others.
_MOST_ROWS: Final = 256
_OTHERS: Final = "other workers"

# Workers with another number send each other values through the host. It changes with any message.
PROTOCOL: Final = 4
# The beginning of what a worker says of itself; a reason not to read begins otherwise.
_SAID: Final = "ipc:"
# A worker whose memory could not be read for a passing reason is asked again after this time.
_AGAIN_S: Final = 5.0
_MOST_OF_A_REASON: Final = 1000
_NAME: Final = uuid.uuid4().hex


class Traffic:
    """Counts transfers between this worker and others, by source, destination and transport.

    ``by_dask`` is the transport of the values that dask sends: ``"host"``, or ``"ucx"``.
    """

    def __init__(self, by_dask: str = "host") -> None:
        self.by_dask = by_dask
        self.reasons: dict[str, str] = {}  # why values last went through the host, by destination
        # Called with the ends, the bytes, the seconds, the transport and the number of values.
        self.on_copy: Callable[[str, str, int, float, str, int], object] | None = None
        self._rows: dict[tuple[str, str, str], Counts] = {}

    def count(
        self,
        source: str,
        destination: str,
        transport: str,
        nbytes: int,
        seconds: float = 0.0,
        copies: int = 1,
    ) -> str:
        """Count a transfer between two ends, a device's UUID or a worker's address each.

        Return the destination in the row: the last workers of a large cluster share one.
        """
        ends = source, destination, transport
        if ends not in self._rows and transport == self.by_dask and len(self._rows) >= _MOST_ROWS:
            ends = source, _OTHERS, transport
        row = self._rows.setdefault(ends, Counts())
        row.nbytes += nbytes
        row.copies += copies
        if seconds:
            row.seconds = row.measured_s = row.seconds + seconds
            row.measured_nbytes += nbytes
        if self.on_copy is not None:
            self.on_copy(source, destination, nbytes, seconds, transport, copies)
        return ends[1]

    def sent_by_dask(
        self, places: Mapping[Hashable, Mapping[Device, int]], who: str, reason: str
    ) -> None:
        """Count values that dask sends to a worker, each with its bytes by device."""
        for each in places.values():
            for device, nbytes in each.items():
                self.reasons[self.count(device.uuid, who, self.by_dask, nbytes)] = reason

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each source, destination and transport, as plain data."""
        return [
            {
                "source": source,
                "destination": destination,
                "transport": transport,
                **vars(row),
                "reason": self.reasons.get(destination) if transport == "host" else None,
            }
            for (source, destination, transport), row in self._rows.items()
        ]


@dataclass(eq=False)
class Local:
    """One worker, its devices, and the memory that it shows to others and opens of them."""

    worker: Worker
    devices: Sequence[Device]
    store: Callable[[], Store | None]  # the values; None without devices
    make_room: Callable[[Device], object]  # called with a device that has no memory left
    on_failure: Callable[[Device, DriverError], object]
    has_failed: Callable[[], bool]  # whether a device of the worker has failed
    stagings: dict[Device, Staging] = field(default_factory=dict)
    opened: OpenedBuffers = field(default_factory=OpenedBuffers)

    def __post_init__(self) -> None:
        self.traffic = Traffic("ucx" if is_ucx(self.worker.address) else "host")
        self.name = uuid.uuid4().hex  # of its staging memory
        self.executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="devctx-ipc")

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on a thread that may wait."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *args)

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


@dataclass(eq=False)
class Peer:
    """Another worker, as it is known here."""

    memory: str = ""  # the name of its staging memory, of which buffers may be open here
    reason: str = ""  # why that is not read; empty if it is
    again: float = 0.0  # when it is read again


class Pairs:
    """Which other workers exchange values with one worker by CUDA IPC."""

    def __init__(self, local: Local) -> None:
        self.peers: dict[str, Peer] = defaultdict(Peer)  # by address
        # The workers that may have this one's memory open; some may have left the cluster.
        self.readers: set[str] = set()
        self._local = local

    # -- as the receiver

    def says(self, address: str) -> str:
        """Return what to say to a worker: the name of this process, or why it cannot be read."""
        peer = self.peers.get(address)
        if peer is not None and peer.reason and time.monotonic() < peer.again:
            return peer.reason
        return f"{_SAID}{PROTOCOL} {_host()} {_process()}"

    async def reads(self, address: str, memory: str) -> None:
        """Note the name of a worker's memory; one that it had before is closed."""
        peer = self.peers[address]
        if peer.memory != memory:
            await self._close_memory(peer)
            peer.memory, peer.reason = memory, ""
            logger.info("values on a device come from %s by CUDA IPC", address)

    async def refuse(self, address: str, reason: str, *, passes: bool) -> None:
        """Stop reading a worker's memory, for a while or for good."""
        peer = self.peers[address]
        peer.reason = reason[:_MOST_OF_A_REASON]
        peer.again = time.monotonic() + _AGAIN_S if passes else float("inf")
        logger.info("values on a device come from %s through the host: %s", address, reason)
        await self._close_memory(peer)

    def forget(self, address: str) -> None:
        """Forget a worker, and close its memory; another worker may have the address later."""
        peer = self.peers.pop(address, None)
        if peer is not None:
            self._local.worker.loop.add_callback(self._close_memory, peer)

    async def _close_memory(self, peer: Peer) -> None:
        memory, peer.memory = peer.memory, ""
        if memory:
            with suppress(RuntimeError):  # this worker ends, and has closed all that it had open
                await self._local.run(self._local.opened.close, memory)

    # -- as the sender

    def why_not(self, said: str) -> str:
        """Return why a worker that said this cannot read this one's memory; empty if it can."""
        if not said.startswith(_SAID):
            return said or "it does not say that it can read them"
        version, _, rest = said.removeprefix(_SAID).partition(" ")
        host, _, process = rest.partition(" ")
        if version != str(PROTOCOL):
            return "it has another version of dask-devctx"
        if process == _process():  # a handle cannot be opened in the process that made it
            return "it is in the same process"
        return "" if host == _host() else "it is on another machine, or in another container"


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
