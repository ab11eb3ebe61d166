"""Pairs of workers that can open each other's memory: each pair is tried once and remembered."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
import uuid
from contextlib import suppress
from typing import Any, Final

from distributed import Worker
from distributed.comm import get_address_host

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.errors import DevctxError
from dask_devctx.transfer.ipc.headers import (
    Description,
    MalformedHeaderError,
    read_description,
    text,
)
from dask_devctx.transfer.ipc.opened import OpenedBuffers
from dask_devctx.transfer.ipc.staging import Staged, Staging
from dask_devctx.worker.ipc.messages import AGREE, HELLO, REASON_LIMIT

logger = logging.getLogger(__name__)

# The size of the content that the receiver must find in the sender's memory.
_NBYTES: Final = 256
_TIMEOUT_S: Final = 10.0
# A worker that refused for a passing reason is asked again after the first of these, then after
# twice as long each time, up to the second.
_AGAIN_S: Final = (1.0, 60.0)
_NAME: Final = uuid.uuid4().hex


class Pairs:
    """Finds out which other workers can exchange values with one worker by CUDA IPC.

    Parameters
    ----------
    worker
        The worker.
    staging
        The staging memory of its first device.
    device
        The device on which it opens other workers' memory.
    opened
        The buffers of other workers that it has open.
    run
        Runs a function on a thread that may wait.

    Attributes
    ----------
    token
        The name of this worker's staging memory among all workers.
    receivers
        The workers that can read this memory, by address, each with its own token.
    reasons
        The reasons why other workers do not read this memory, by address.
    tokens
        The names of the workers' memory that was tried, by address.
    ways
        The reasons why this worker does not read other workers' memory, by address; None if it
        reads a worker's memory.
    """

    def __init__(
        self,
        worker: Worker,
        staging: Staging,
        device: Device,
        opened: OpenedBuffers,
        run: Any,
    ) -> None:
        self.token = uuid.uuid4().hex
        self.receivers: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.tokens: dict[str, str] = {}
        self.ways: dict[str, str | None] = {}
        self._worker = worker
        self._staging = staging
        self._device = device
        self._opened = opened
        self._run = run
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._again: dict[str, tuple[float, float]] = {}  # when, and how long that was to wait
        self._shown: dict[str, Staged] = {}

    def close(self) -> None:
        """Stop asking other workers, and release the memory shown to them."""
        for task in self._asking.values():
            task.cancel()
        self._staging.give(self._shown.values())
        self._shown.clear()

    # -- as the receiver

    async def settle(self, address: str) -> None:
        """Find out whether the memory of a worker can be read, unless it is known already.

        A worker that is asked again keeps nobody waiting: values come through the host meanwhile.
        """
        known = address in self.ways
        if known and (address not in self._again or time.monotonic() < self._again[address][0]):
            return
        task = self._asking.get(address)
        if task is None:
            task = self._asking[address] = asyncio.create_task(self._ask(address))
            task.add_done_callback(lambda _: self._asking.pop(address, None))
        if not known:
            await asyncio.wait([task])  # who asks for data goes on where this was cancelled

    def forget(self, address: str) -> None:
        """Forget a worker, and close its memory; another worker may have the address later."""
        if address in self._again:
            self._again[address] = 0.0, self._again[address][1]
        elif self.ways.get(address) is None:  # a final refusal stays
            self.ways.pop(address, None)
        token = self.tokens.pop(address, None)
        if token is not None:
            self._worker.loop.add_callback(self._close_later, token)

    async def _close_later(self, token: str) -> None:
        with suppress(RuntimeError):  # this worker ends, and has closed all that it had open
            await self._run(self._opened.close, token)

    def left(self, address: str) -> None:
        """Forget all about a worker that left the cluster; another may have the address later."""
        self.forget(address)
        for known in (self.ways, self.reasons, self._again):
            known.pop(address, None)
        asking = self._asking.get(address)
        if asking is not None:  # it learns soon that the worker is gone
            asking.add_done_callback(lambda _: self.left(address))

    async def refuse(self, address: str, reason: str) -> None:
        """Stop reading a worker's memory."""
        self._remember(address, reason)
        await self._close_memory(address)
        with suppress(OSError):  # one that cannot be told sends nothing either
            await self._agree(address, reason)

    async def _close_memory(self, address: str) -> None:
        """Close a worker's memory: one that is told a reason may free it without asking."""
        token = self.tokens.pop(address, None)
        if token is not None:
            await self._run(self._opened.close, token)

    async def _ask(self, address: str) -> None:
        own = self._worker.address
        if get_address_host(address) != get_address_host(own):
            self.ways[address] = "it is on another machine"
            return
        try:
            asked = {"address": own, "process": _process(), "host": _host()}
            said, asked_at = await self._call(address, HELLO, asked), time.monotonic()
            if not isinstance(said, dict):
                self._remember(address, "it does not run the plugin", again=True)
                return
            if said.get("error"):
                error = text(said["error"], "error", most=REASON_LIMIT)
                self._remember(address, error, again=bool(said.get("again")))
                return
            token, shown = text(said.get("token"), "token"), read_description(said.get("shown"))
            self.tokens[address] = token
            error, again = await self._run(self._try, token, shown, said.get("content"))
            if error is not None:
                await self._close_memory(address)
            await self._agree(address, error)
            if error is None and self.tokens.get(address) != token:  # it was forgotten meanwhile
                await self._run(self._opened.close, token)
                return
            too_late = time.monotonic() - asked_at > _TIMEOUT_S  # it shows its memory for so long
            self._remember(address, error, error is not None and (again or too_late))
        except MalformedHeaderError as error:
            logger.warning("The answer of %s about its memory was refused: %s", address, error)
            self._remember(address, f"its answer is malformed: {error}", again=True)
        except OSError as error:  # or it took too long
            self._remember(address, f"it does not answer: {error!r}", again=True)
        except Exception as error:
            logger.exception("the test of CUDA IPC with %s failed", address)
            self._remember(address, repr(error), again=True)

    def _try(self, token: str, shown: Description, content: object) -> tuple[str | None, bool]:
        """Read the memory that the other worker shows.

        Returns
        -------
        reason, passing
            The reason if that fails, and whether it passes.
        """
        device = self._device
        try:
            with device:
                opened = self._opened.begin(token, shown.number, shown.handle, device)
                try:
                    there = opened.place(shown.offset, _NBYTES)
                    found = device._backend.calls.work.copy_to_host(there, _NBYTES)
                finally:
                    self._opened.end(opened)
        except (DevctxError, MalformedHeaderError) as error:
            return f"its memory cannot be opened: {error}", is_out_of_memory(error)
        return (None, False) if found == content else ("its memory has other contents here", True)

    def _remember(self, address: str, reason: str | None, again: bool = False) -> None:
        self.ways[address] = reason
        _, waited = self._again.pop(address, (0.0, 0.0))
        if again:
            wait = min(2 * waited or _AGAIN_S[0], _AGAIN_S[1])
            self._again[address] = time.monotonic() + wait, wait
        if reason is None:
            logger.info("values on a device come from %s by CUDA IPC", address)
            return
        logger.info("values on a device come from %s through the host: %s", address, reason)

    async def _agree(self, address: str, error: str | None) -> None:
        error = error and error[:REASON_LIMIT]
        told = {"address": self._worker.address, "token": self.token, "error": error}
        await self._call(address, AGREE, told)

    async def _call(self, address: str, op: str, kwargs: dict[str, Any]) -> Any:
        call = getattr(self._worker.rpc(address), op)
        return await asyncio.wait_for(call(**kwargs), _TIMEOUT_S)

    # -- as the sender

    async def hello(self, address: str, process: str, host: str) -> dict[str, Any]:
        """Show another worker a piece of memory that it tries to read; called by that worker."""
        self.receivers.pop(address, None)
        said = await self._said(address, process, host)
        if "error" in said:
            self.reasons[address] = said["error"]
        return said

    async def _said(self, address: str, process: str, host: str) -> dict[str, Any]:
        if process == _process():
            return {"error": "it is in the same process"}
        if host != _host():
            return {"error": "it is on another machine, or in another container"}
        try:
            content = secrets.token_bytes(_NBYTES)
            shown = await self._run(self._show, content)
        except DevctxError as error:
            reason = f"its device cannot show its memory: {error}"[:REASON_LIMIT]
            return {"error": reason, "again": is_out_of_memory(error)}
        if shown is None:
            return {"error": "it has no memory left for staging", "again": True}
        self._hide(address)
        self._shown[address] = shown
        self._worker.loop.call_later(_TIMEOUT_S, self._hide, address, shown)
        return {"token": self.token, "shown": shown.description, "content": content}

    def _show(self, content: bytes) -> Staged | None:
        shown = self._staging.take(len(content))
        if shown is not None:
            try:
                with self._staging.device as device:
                    device._backend.calls.work.copy_from_host(shown.pointer, content)
            except BaseException:
                self._staging.give([shown])
                raise
        return shown

    async def agree(self, address: str, token: str, error: str | None) -> None:
        """Note whether another worker can read this one's memory; called by that worker."""
        self._hide(address)
        if error is None:
            self.receivers[address] = token
        else:
            self.receivers.pop(address, None)
            self.reasons[address] = error
            logger.info("values on a device go to %s through the host: %s", address, error)

    def _hide(self, address: str, only: Staged | None = None) -> None:
        shown = self._shown.get(address)
        if shown is not None and only in (None, shown):
            del self._shown[address]
            self._staging.give([shown])


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
