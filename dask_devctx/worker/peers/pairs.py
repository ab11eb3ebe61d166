"""A worker tells others who it is when it asks for values, and remembers whom it cannot read.

Nobody asks whether memory can be opened: the first transfer tries it. Where that fails, values come
through the host from then on.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
import uuid
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from dask_devctx.worker.peers.local import Local

logger = logging.getLogger(__name__)

# Workers with another number send each other values through the host. It changes with any message.
PROTOCOL: Final = 3
# The beginning of what a worker says of itself; a reason not to read begins otherwise.
_SAID: Final = "ipc:"
# A worker whose memory could not be read for a passing reason is asked again after this time.
_AGAIN_S: Final = 5.0
_MOST_OF_A_REASON: Final = 1000
_NAME: Final = uuid.uuid4().hex


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
