"""The devices of a worker: the scheduler divides them, and locks keep other clusters away."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from distributed import Worker

from dask_devctx import config
from dask_devctx.config.options import Options
from dask_devctx.cuda.device import Device, named_devices
from dask_devctx.errors import DeviceNotFoundError, DevicesInUseError
from dask_devctx.scheduler.messages import CLAIM
from dask_devctx.worker.leases import registration
from dask_devctx.worker.leases.lease import Lease, holders, in_use

# A worker waits so long for devices that others of its cluster are about to release: those of a
# process that just ended, or whose plugin is just replaced.
_PATIENCE_S = 1.0
_POLL_S = 0.05

# The devices that a worker had, for a plugin that takes another one's place.
_before: WeakKeyDictionary[Worker, tuple[Device, ...]] = WeakKeyDictionary()


class DeviceShare:
    """The devices of one worker, used on its event loop; ``plugin`` is the name of its plugin."""

    def __init__(self, worker: Worker, options: Options, plugin: str) -> None:
        if options.devices is None and options.devices_per_worker is None:
            options = Options(shared=options.shared)  # by the configuration of this process
        self._worker, self._plugin = worker, plugin
        self._named, self._count = options.devices, options.devices_per_worker
        self._shared = options.shared
        self._directory = config.get("lock-directory")
        self._of_cluster = f" of {worker.scheduler.address}"
        self._lease = Lease(f"worker {worker.name}{self._of_cluster}", self._directory)
        self._is_released = False

    def at_once(self) -> tuple[Device, ...]:
        """Take the devices of the plugin that this one replaces: its tasks keep them meanwhile."""
        before, count = _before.pop(self._worker, ()), self._count
        with suppress(Exception):  # `settle` raises it
            again = [device for device in self._found() if device in before]
            if not self._shared and len(again) >= (count or 1):
                self._lease.take(again, count, timeout_s=0)
        return self._lease.devices

    async def settle(self) -> tuple[Device, ...]:
        """Return the devices, once the scheduler and the holders of locks agree, or raise."""
        found, count, lease = self._found(), self._count, self._lease
        if self._shared:
            return found[:count]
        others = [device for device in found if device not in lease.devices]
        held = await asyncio.to_thread(holders, others, self._directory)
        foreign = {device: who for device, who in held.items() if not self._is_ours(who)}
        free = [device for device in found if device not in foreign]
        all_named = self._named is not None and count is None
        if not free or (foreign and all_named):
            # Devices that the user named are all needed; of all others, the free ones are enough.
            left = [device for device in found if device not in held]
            raise in_use(len(found) if all_named else count or 0, left, foreign)
        if count and isinstance(n := self._worker.name, int):
            # The nth worker of a local cluster has the nth part, if it is free.
            free.sort(key=lambda device: found.index(device) // count != n)
        try:
            answer = await self._claim(free)
        except Exception:  # the scheduler lacks this package: the locks alone decide
            if count is None or not lease.devices:
                held = await asyncio.to_thread(lease.take, others, count)
            if not lease.devices and not self._is_released:
                raise self._in_use((), held) from None
            return lease.devices
        if not answer["uuids"]:
            named = {device: answer["holders"].get(device.uuid) for device in free}
            ours = {device: f"{who}{self._of_cluster}" for device, who in named.items() if who}
            left = [device for device in free if device not in ours]
            raise self._in_use(left, foreign | ours)
        mine = [device for device in found if device.uuid in answer["uuids"]]
        lease.give_up(set(lease.devices).difference(mine))
        deadline = monotonic() + _PATIENCE_S
        while (more := [one for one in mine if one not in lease.devices]) and not self._is_released:
            held = await asyncio.to_thread(lease.take, more)
            if held and monotonic() > deadline:
                raise self._in_use((), held)
            await asyncio.sleep(_POLL_S if held else 0)
        return tuple(mine)

    def release(self) -> None:
        """Release the devices for good."""
        self._is_released = True
        _before[self._worker] = self._lease.devices
        self._lease.release()

    def _found(self) -> tuple[Device, ...]:
        found = named_devices(self._named)
        if not found:
            raise DeviceNotFoundError(
                "any",
                (),
                os.environ.get("CUDA_VISIBLE_DEVICES"),
                "The worker sees no GPU: check CUDA_VISIBLE_DEVICES and the option devices",
            )
        return found

    async def _claim(self, free: Sequence[Device]) -> Mapping[str, Any]:
        """Let the scheduler say which devices are this worker's."""
        await registration.install_routing(self._worker)
        answer = await registration.ask(
            self._worker,
            CLAIM,
            name=self._worker.name,
            plugin=self._plugin,
            candidates=[device.uuid for device in free],
            count=self._count,
        )
        return dict(answer)

    def _is_ours(self, who: str) -> bool:
        return who.endswith(self._of_cluster)

    def _in_use(self, free: Iterable[Device], held: Mapping[Device, str]) -> DevicesInUseError:
        own = {
            one: who.replace(self._of_cluster, " of its own cluster") for one, who in held.items()
        }
        return in_use(self._count or 0, free, own)
