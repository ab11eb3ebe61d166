"""Pairs of workers that can open each other's memory: each pair is tried once and remembered."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
import uuid
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from distributed.comm import get_address_host

from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.errors import DevctxError
from dask_devctx.transfer.ipc.messages import PROTOCOL, Hello, Place, Refused, Shown
from dask_devctx.transfer.ipc.sending import Staged
from dask_devctx.worker.peers.local import Local

logger = logging.getLogger(__name__)

HELLO: Final = "devctx_ipc_hello"
# The size of the content that the receiver must find in the sender's memory.
_NBYTES: Final = 256
_TIMEOUT_S: Final = 10.0
# A worker that refused for a passing reason is asked again after this time.
_AGAIN_S: Final = 5.0
_MOST_OF_A_REASON: Final = 1000
_NO_PLUGIN: Final = "it does not run this version of the plugin"
_NAME: Final = uuid.uuid4().hex


@dataclass(eq=False)
class Peer:
    """What is known of another worker."""

    reason: str | None = None  # why its memory is not read; empty if it is, None if not known
    again: float = float("inf")  # when to ask again
    memory: str = ""  # the name of its memory, if that may be open here
    asking: asyncio.Task[None] | None = None
    shown: Staged | None = None  # memory of this worker that it tries to read


class Pairs:
    """Finds out which other workers can exchange values with one worker by CUDA IPC."""

    def __init__(self, local: Local) -> None:
        self.peers: dict[str, Peer] = defaultdict(Peer)  # by address
        # The workers that may have this one's memory open; some may have left the cluster.
        self.readers: set[str] = set()
        self._local = local

    def close(self) -> None:
        """Stop asking other workers, and release the memory shown to them."""
        for peer in self.peers.values():
            if peer.asking is not None:
                peer.asking.cancel()
            self.hide(peer)

    # -- as the receiver

    async def settle(self, address: str) -> str:
        """Return the name of a worker's memory if this one can read it, else the reason.

        A worker that is asked again keeps nobody waiting: values come through the host meanwhile.
        """
        peer = self.peers[address]
        if peer.reason is None or time.monotonic() > peer.again:
            asking = peer.asking = peer.asking or asyncio.create_task(self._ask(address, peer))
            if peer.reason is None:
                await asyncio.wait([asking])  # who asks for data goes on where this was cancelled
        if peer.reason == _NO_PLUGIN:  # it would not understand
            return ""
        return peer.reason or peer.memory

    async def refuse(self, address: str, reason: str) -> None:
        """Stop reading a worker's memory."""
        peer = self.peers[address]
        self._remember(address, peer, reason, passes=False)
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

    async def _ask(self, address: str, peer: Peer) -> None:
        try:
            reason, passes = await self._tried(address, peer)
        except OSError as error:  # or it took too long
            reason, passes = f"it does not answer: {error!r}", True
        except Exception as error:
            logger.exception("the test of CUDA IPC with %s failed", address)
            reason, passes = repr(error), True
        finally:
            peer.asking = None
        if reason or self.peers.get(address) is not peer:  # it has left meanwhile
            await self._close_memory(peer)
        self._remember(address, peer, reason, passes)

    async def _tried(self, address: str, peer: Peer) -> tuple[str, bool]:
        """Return why a worker's memory is not to be read, if so, and whether that passes."""
        own = self._local.worker.address
        if get_address_host(address) != get_address_host(own):
            return "it is on another machine", False
        hello = Hello(PROTOCOL, own, _process(), _host())
        answer = await asyncio.wait_for(self._local.call(address, HELLO, hello), _TIMEOUT_S)
        if not isinstance(answer, list | tuple):
            return _NO_PLUGIN, True
        if len(answer) == len(Refused._fields):
            refused = Refused(*answer)
            return refused.reason, refused.passes
        peer.memory, place, content = answer
        try:
            found = await self._local.run(self._read, peer.memory, Place.read(place))
        except (DevctxError, ValueError) as error:
            return f"its memory cannot be opened: {error}", is_out_of_memory(error)
        return ("", False) if found == content else ("its memory has other contents here", True)

    def _read(self, memory: str, place: Place) -> bytes:
        device, opened = self._local.devices[0], self._local.opened
        with device:
            buffer = opened.begin(memory, place, device)
            try:
                there = buffer.address(place, _NBYTES)
                return device._backend.calls.work.copy_to_host(there, _NBYTES)
            finally:
                opened.end(buffer)

    def _remember(self, address: str, peer: Peer, reason: str, passes: bool) -> None:
        peer.reason = reason[:_MOST_OF_A_REASON]
        peer.again = time.monotonic() + _AGAIN_S if passes else float("inf")
        how = f"through the host: {reason}" if reason else "by CUDA IPC"
        logger.info("values on a device come from %s %s", address, how)

    # -- as the sender

    async def hello(self, said: Hello) -> tuple[Any, ...]:
        """Show another worker a piece of memory that it tries to read; called by that worker."""
        if said.protocol != PROTOCOL:
            return Refused("it has another version of dask-devctx", passes=False)
        if said.process == _process():
            return Refused("it is in the same process", passes=False)
        if said.host != _host():
            return Refused("it is on another machine, or in another container", passes=False)
        try:
            content = secrets.token_bytes(_NBYTES)
            shown = await self._local.run(self._show, content)
        except DevctxError as error:
            reason = f"its device cannot show its memory: {error}"[:_MOST_OF_A_REASON]
            return Refused(reason, is_out_of_memory(error))
        if shown is None:
            return Refused("it has no memory left for staging", passes=True)
        peer = self.peers[said.address]
        self.hide(peer)
        peer.shown = shown
        self._local.worker.loop.call_later(_TIMEOUT_S, self.hide, peer, shown)
        self.readers.add(said.address)
        return Shown(self._local.name, shown.place, content)

    def _show(self, content: bytes) -> Staged | None:
        staging = self._local.stagings[self._local.devices[0]]
        shown = staging.take(len(content))
        if shown is not None:
            try:
                with staging.device as device:
                    device._backend.calls.work.copy_from_host(shown.pointer, content)
            except BaseException:
                staging.give(shown)
                raise
        return shown

    def hide(self, peer: Peer, only: Staged | None = None) -> None:
        """Release the memory that was shown to a worker."""
        shown = peer.shown
        if shown is not None and only in (None, shown):
            peer.shown = None
            self._local.stagings[self._local.devices[0]].give(shown)


def _process() -> str:
    """Return a name for this process. A handle cannot be opened in the process that made it."""
    return f"{_NAME} {os.getpid()}"  # one that was forked has the same module


def _host() -> str:
    """Return a name for this machine and, in a container, for the container."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/ipc').st_ino}"
    except OSError:
        return socket.gethostname()
