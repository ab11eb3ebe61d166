"""The devices of a worker: the scheduler divides them, and locks keep other clusters away.

The worker announces them to the scheduler, or the reason why it has none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from time import monotonic
from typing import Final
from weakref import WeakKeyDictionary

from distributed import Status, Worker

from dask_devctx import driver
from dask_devctx.config.options import Options
from dask_devctx.cuda import discovery, naming
from dask_devctx.cuda.device import Device, named_devices
from dask_devctx.dask_internals.worker import is_joining
from dask_devctx.errors import DevicesInUseError, in_use, no_device
from dask_devctx.scheduler.messages import ANNOUNCE, CLAIM, REFUSE
from dask_devctx.scheduler.rows import LONGEST_TEXT
from dask_devctx.worker import registration
from dask_devctx.worker.leases.locks import held_devices, take

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
# A worker waits so long for devices that others of its cluster are about to release: those of a
# process that just ended, or whose plugin is just replaced.
_PATIENCE_S: Final = 1.0
_POLL_S: Final = 0.05

# The devices that a worker had, for a plugin that takes another one's place.
_before: WeakKeyDictionary[Worker, tuple[Device, ...]] = WeakKeyDictionary()
# The newest lease of a worker, which alone tells the scheduler of its devices, and a lock for that.
_newest: WeakKeyDictionary[Worker, weakref.ref[DeviceLease]] = WeakKeyDictionary()
_telling: WeakKeyDictionary[Worker, asyncio.Lock] = WeakKeyDictionary()


def _lost() -> str:
    """Return which GPUs NVML knows and cannot reach, in words; "" if there are none."""
    return "; ".join(discovery.inventory(driver.backend()).lost)


class DeviceLease:
    """The devices of one worker, used on its event loop; ``plugin`` is the name of its plugin."""

    def __init__(self, worker: Worker, options: Options, plugin: str) -> None:
        if options.devices is None and options.devices_per_worker is None:
            options = Options(shared=options.shared)  # by the configuration of this process
        self._worker, self._plugin = worker, plugin
        self._named, self._count = options.devices, options.devices_per_worker
        self._shared = options.shared
        self._of_cluster = f" of {worker.scheduler.address}"
        self._locks: dict[Device, ExitStack] = {}
        self._is_released = False
        self.before = _before.get(worker, ())  # the last devices that the worker had
        _newest[worker] = weakref.ref(self)

    def at_once(self) -> tuple[Device, ...]:
        """Take the devices of the plugin that this one replaces: its tasks keep them meanwhile."""
        with suppress(Exception):  # `settle` raises it
            again = [device for device in self._found() if device in self.before]
            if len(again) >= (self._count or 1):
                self._take(again[: self._count])
        return tuple(self._locks)

    async def settle(self) -> tuple[Device, ...]:
        """Return the devices, once the scheduler and the holders of locks agree, or raise."""
        found, count = self._found(), self._count
        await registration.install_routing(self._worker)
        if self._shared and count is None:
            return found
        others = [device for device in found if device not in self._locks]
        held = {} if self._shared else held_devices(others)
        # A holder without a name has just begun.
        foreign = {d: who for d, who in held.items() if who and not who.endswith(self._of_cluster)}
        free = [device for device in found if device not in foreign]
        all_named = self._named is not None and count is None
        if not free or (foreign and all_named):
            # Devices that the user named are all needed; of all others, the free ones are enough.
            left = [device for device in found if device not in held]
            raise self._in_use(len(found) if all_named else count or 0, left, foreign)
        if count and isinstance(n := self._worker.name, int):
            # The nth worker of a local cluster has the nth part, if it is free.
            free.sort(key=lambda device: found.index(device) // count != n)
        uuids = [device.uuid for device in free]
        claim = {"name": self._worker.name, "plugin": self._plugin, "candidates": uuids}
        answer = await registration.tell(self._worker, CLAIM, **claim, count=count)
        if count and not answer["uuids"] and (lost := _lost()):  # since they were divided
            logger.warning("%s; %s takes what that leaves", lost, self._worker.address)
            answer = await registration.tell(self._worker, CLAIM, **claim, count=None)
        if not answer["uuids"]:
            named = {device: answer["holders"].get(device.uuid) for device in free}
            ours = {device: f"{who}{self._of_cluster}" for device, who in named.items() if who}
            left = [device for device in free if device not in ours]
            raise self._in_use(count or 0, left, foreign | ours)
        mine = [device for device in found if device.uuid in answer["uuids"]][:count]
        self._give_up(set(self._locks).difference(mine))
        deadline = monotonic() + _PATIENCE_S
        while held := self._take(mine):
            if monotonic() > deadline:
                raise self._in_use(count or 0, (), held)
            await asyncio.sleep(_POLL_S)
        return tuple(mine)

    def release(self) -> None:
        """Release the devices for good."""
        self._is_released = True
        _before[self._worker] = tuple(self._locks) or self.before
        self._give_up(self._locks)

    def _take(self, devices: Iterable[Device]) -> dict[Device, str]:
        """Lock devices, unless they are released for good; return the holders of the others."""
        held: dict[Device, str] = {}
        for device in devices:
            if self._is_released or self._shared or device in self._locks:
                continue
            lock = take(device, f"worker {self._worker.name}{self._of_cluster}")
            if lock is None:
                held[device] = held_devices([device]).get(device, "")
            else:
                self._locks[device] = lock
        return held

    def _give_up(self, devices: Iterable[Device]) -> None:
        for device in list(devices):
            if lock := self._locks.pop(device, None):
                lock.close()

    def _found(self) -> tuple[Device, ...]:
        named, there = self._named, discovery.inventory(driver.backend())
        if named is not None and there.lost:
            read = [(one, naming.read(one)) for one in named]
            named = [n for n, it in read if it.kind != "uuid" or naming.among(it, there)] or named
        found = named_devices(named)
        if not found:
            raise no_device(
                "any",
                (),
                os.environ.get("CUDA_VISIBLE_DEVICES"),
                "The worker sees no GPU: check CUDA_VISIBLE_DEVICES and the option devices",
            )
        return found

    def _in_use(
        self, wanted: int, free: Iterable[Device], held: Mapping[Device, str]
    ) -> DevicesInUseError:
        texts = {d: who.replace(self._of_cluster, " of its own cluster") for d, who in held.items()}
        own = all(who.endswith(self._of_cluster) for who in held.values())
        who = "; ".join(filter(None, [_lost(), "this worker"]))
        return in_use(who, wanted, free, texts, own=own)

    # -- what the scheduler is told

    async def announce(self, used: Mapping[Device, int]) -> None:
        """Tell the scheduler which devices the worker has, and the bytes that tasks may reserve."""
        # The other devices that the worker sees are announced too: the ordinals need them.
        seen = [(one.uuid, one.pci_bus_id) for one in discovery.inventory(driver.backend()).devices]
        uuids = {one.uuid: nbytes for one, nbytes in used.items()}
        await self._tell(ANNOUNCE, seen=seen, used=uuids)

    def withdraw(self) -> None:
        """Tell the scheduler soon that the worker uses no devices from now on, but stays."""
        # If another plugin takes this one's place at once, no message is sent: between two
        # messages, tasks would go to workers that do not have their device.
        if self._worker.status in (Status.running, Status.paused):
            self._worker.loop.add_callback(self._no_devices, None)

    async def refuse(self, error: Exception, *, leaves: bool) -> bool:
        """Tell the scheduler that the worker has no devices; return whether it leaves for that.

        One that joins leaves if others hold its devices, and with ``leaves`` after any error. If it
        stays, a note on the error has the remedy and the tasks that fail: more if it had devices.
        """
        worker = self._worker
        if worker.status not in (Status.running, Status.paused):
            error.add_note(NOT_STARTED)  # the error ends the start
            return False
        others_have = isinstance(error, DevicesInUseError)
        if not (is_joining(worker) and (leaves or others_have)):
            others = "so do all others but those with device=None" if self.before else _ON_FIRST
            error.add_note(_WAY_OUT.format(worker.name, others))
            await self._no_devices({})
            return False
        text = str(error)
        if not others_have:
            why = f"{type(error).__name__}: {error}"[:LONGEST_TEXT]
            text = (
                f"the worker {worker.name} cannot use its devices, and leaves the cluster: {why}. "
                "The worker's log has the traceback"
            )
        with suppress(Exception):  # a scheduler that cannot be told has nothing to decide
            await self._tell(REFUSE, text=text, in_use=others_have)
        logger.error("This worker leaves the cluster because it cannot take its devices: %s", error)
        worker.loop.add_callback(worker.close, reason="devctx-setup-failed")
        return True

    async def _no_devices(self, used: Mapping[str, int] | None) -> None:
        """Announce no devices; with None, that tasks that ask for some do not belong there."""
        with suppress(Exception):  # without the routing there is nothing to withdraw from
            await self._tell(ANNOUNCE, seen=[], used=used)

    async def _tell(self, op: str, **what: object) -> None:
        """Send the scheduler a message and the routing, unless a newer plugin does so."""
        # Plugins may replace each other faster than the scheduler answers, and two messages that
        # are on their way at once arrive in any order.
        async with _telling.setdefault(self._worker, asyncio.Lock()):
            if _newest[self._worker]() is self:
                await registration.install_routing(self._worker)
                await registration.tell(self._worker, op, **what)
