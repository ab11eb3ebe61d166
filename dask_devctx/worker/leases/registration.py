"""The announcement of a worker's devices, or of the reason why it has none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from distributed import Worker
from distributed.core import Status
from distributed.protocol.pickle import dumps

from dask_devctx import driver
from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.worker import is_joining
from dask_devctx.errors import DevctxError, DevicesInUseError
from dask_devctx.scheduler.messages import ANNOUNCE, PROTOCOL, REFUSE
from dask_devctx.scheduler.routing import DeviceRouting

logger = logging.getLogger(__name__)

NOT_STARTED = (
    "The worker does not start without the devices of its plugin. With --preload dask_devctx the "
    "plugin is made from the configuration devctx.*, such as DASK_DEVCTX__DEVICES; `dask devctx "
    "info` shows what this machine has"
)
_WAY_OUT = (
    "Worker {!r} continues without devices: tasks that ask for a device fail there with this "
    "error, and {}. But dask keeps the plugin, and gives it to workers that join later. Remove it "
    'with client.unregister_worker_plugin("devctx"), or register it again when the cause is mended,'
    " or with devices that exist: client.register_plugin(DevicePlugin(devices=[...]))"
)
_ON_FIRST = "all others run without one, where libraries use the first GPU"
# The longest text of an error that goes to the scheduler.
_TEXT = 2_000
# Sends a message about a worker's devices: `DeviceLease.tell`.
Tell = Callable[..., Awaitable[None]]
# A scheduler that could not be reached is asked again after this time.
_AGAIN_S: Final = 1.0


async def announce(used: Mapping[Device, int], tell: Tell) -> None:
    """Tell the scheduler which devices a worker has, and the bytes that tasks may reserve there."""
    # The other devices that the worker sees are announced too: the ordinals need them.
    seen = [(one.uuid, one.pci_bus_id) for one in discovery.inventory(driver.backend()).devices]
    await tell(ANNOUNCE, seen=seen, used={one.uuid: nbytes for one, nbytes in used.items()})


def withdraw(worker: Worker, tell: Tell) -> None:
    """Tell the scheduler soon that a worker uses no devices from now on, but stays."""
    # If another plugin takes this one's place at once, no message is sent: between two messages,
    # tasks would go to workers that do not have their device.
    if worker.status in (Status.running, Status.paused):
        worker.loop.add_callback(_no_devices, tell, None)


async def _no_devices(tell: Tell, used: Mapping[str, int] | None) -> None:
    """Announce no devices; with ``used=None``, that tasks that ask for some do not belong there."""
    with suppress(Exception):  # without the routing there is nothing to withdraw from
        await tell(ANNOUNCE, seen=[], used=used)


async def refuse(worker: Worker, error: Exception, tell: Tell, *, leaves: bool, had: bool) -> bool:
    """Tell the scheduler that a worker has no devices; return whether the worker leaves for that.

    One that joins leaves if others hold its devices, and with ``leaves`` after any error. If it
    stays, a note on the error has the remedy and the tasks that fail: more if it ``had`` some.
    """
    if worker.status not in (Status.running, Status.paused):
        error.add_note(NOT_STARTED)  # the error ends the start
        return False
    in_use = isinstance(error, DevicesInUseError)
    leaves = is_joining(worker) and (leaves or in_use)
    if not leaves:
        others = "so do all others but those with device=None" if had else _ON_FIRST
        error.add_note(_WAY_OUT.format(worker.name, others))
        await _no_devices(tell, {})
        return False
    told: Exception = error
    if not in_use:
        why = f"{type(error).__name__}: {error}"[:_TEXT]
        told = DevctxError(
            f"the worker {worker.name} cannot use its devices, and leaves the cluster: {why}. The "
            "worker's log has the traceback"
        )
    with suppress(Exception):  # a scheduler that cannot be told has nothing to decide
        await tell(REFUSE, kind=type(told).__name__, arguments=told.args)
    logger.error("This worker leaves the cluster because it cannot take its devices: %s", error)
    worker.loop.add_callback(worker.close, reason="devctx-setup-failed")
    return True


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
