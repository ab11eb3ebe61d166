"""A worker's messages to the scheduler, and the plugin there that answers them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from distributed import Worker
from distributed.core import Status
from distributed.protocol.pickle import dumps

from dask_devctx.errors import DevctxError
from dask_devctx.scheduler.messages import PROTOCOL
from dask_devctx.scheduler.routing import DeviceRouting

logger = logging.getLogger(__name__)

# A scheduler that could not be reached is asked again after this time.
_AGAIN_S: Final = 1.0


async def install_routing(worker: Worker) -> None:
    """Send the scheduler this package's plugin, if it lacks it; raise if it cannot have it."""
    plugin = dumps(DeviceRouting())
    register = worker.scheduler.register_scheduler_plugin
    try:
        await _reached(worker, register, plugin=plugin, name=DeviceRouting.name, idempotent=True)
    except OSError:
        raise
    except Exception as error:
        install = ". Install dask-devctx where the scheduler runs; it needs no GPU there"
        raise DevctxError(
            f"the scheduler at {worker.scheduler.address} did not accept the plugin of dask-devctx "
            f"({error!r}){'' if isinstance(error, ValueError) else install}"
        ) from error


async def tell(worker: Worker, op: str, **what: object) -> Any:
    """Send the scheduler a message of a worker; return its answer, or raise if it refuses it."""
    address = worker.contact_address or worker.address
    message = {"address": address, "protocol": PROTOCOL, **what}
    said = await _reached(worker, getattr(worker.scheduler, op), **message)
    if isinstance(said, str) and said != "OK":
        raise DevctxError(f"the scheduler answers {op} with {said!r}")
    return said


async def _reached(worker: Worker, ask: Callable[..., Awaitable[Any]], **what: object) -> Any:
    """Return the scheduler's answer; while it cannot be reached, ask again."""
    while True:
        try:
            return await ask(**what)
        except OSError as error:  # also a closed connection, and no answer in time
            if worker.status not in (Status.init, Status.running, Status.paused):
                raise
            logger.info("The scheduler was not reached: %r. It is asked again", error)
            await asyncio.sleep(_AGAIN_S)
