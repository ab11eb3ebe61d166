"""The choice of a transport between two workers: CUDA IPC, or dask's own comm.

This is the only place that decides whether two workers read each other's memory, for values of any
size; :mod:`.send` decides for one answer, of which it knows the values. A worker that asks for
values says in its request who it is, or why it cannot read the other's memory; the worker that has
the values compares. Nobody asks whether memory can be opened: the first transfer tries it, and
where it fails, values come through dask from then on.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
import uuid
from typing import Final

from dask_devctx.dask_internals.worker import workers_log
from dask_devctx.scheduler.messages import PROTOCOL

logger = logging.getLogger(__name__)

# In a request, between the address of the worker that asks and what it says, in a field that dask
# only logs: each request says for itself whether its answer can be read.
SAYS: Final = "#"
# The beginning of what a worker says of itself; a reason not to read begins otherwise.
_SAID: Final = "ipc:"
# The beginning of a reason not to read that passes: the values are to arrive in host memory.
FULL: Final = "the receiver's device is full"
# A worker whose memory could not be read for such a reason is asked again after this time.
_AGAIN_S: Final = 5.0
_NAME: Final = uuid.uuid4().hex


class Transport:
    """Which transport a worker's values take to each other worker, and from it.

    With ``uses_ipc`` False, dask sends all values; ``by_dask`` is what the counts call this.
    """

    def __init__(self, uses_ipc: bool, by_dask: str) -> None:
        self.uses_ipc, self.by_dask = uses_ipc, by_dask
        # Why the memory of other workers is not read, and until when, by address.
        self._refused: dict[str, tuple[str, float]] = {}

    # -- as the receiver

    def says(self, address: str) -> str:
        """Return what to say to a worker: the name of this process, or why it cannot be read."""
        if not self.uses_ipc:
            return ""
        reason, until = self._refused.get(address, ("", 0.0))
        if time.monotonic() < until:
            return reason
        return f"{_SAID}{PROTOCOL} {_host()} {_process()}"

    def refuse(self, address: str, reason: str) -> None:
        """Read no more of a worker's memory, for a while or for good."""
        until = time.monotonic() + _AGAIN_S if reason.startswith(FULL) else float("inf")
        self._refused[address] = reason, until
        logger.info("values on a device come from %s through the host: %s", address, reason)

    def forget(self, address: str) -> None:
        """Forget a worker that left; another worker may have its address later."""
        self._refused.pop(address, None)

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
        if host == _host():
            return ""
        if self.by_dask == "host":
            _advise()
        return "it is on another machine, or in another container"


@functools.cache
def _advise() -> None:
    workers_log.info(
        "Values on GPUs go to other machines through host memory; protocol='ucxx' is far faster"
    )


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
