"""The devices of a worker: the scheduler divides them, and locks keep other clusters away.

A lock's note names its process, its worker and its cluster.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, Final
from urllib.parse import quote
from weakref import WeakKeyDictionary

from distributed import Worker

from dask_devctx import config
from dask_devctx.config.options import Options
from dask_devctx.cuda.device import Device, named_devices
from dask_devctx.errors import DeviceNotFoundError, DevicesInUseError, LockDirectoryError
from dask_devctx.scheduler.messages import CLAIM
from dask_devctx.worker.leases import registration
from dask_devctx.worker.leases.locks import Lock, choosing, default_directory

# A worker waits so long for devices that others of its cluster are about to release: those of a
# process that just ended, or whose plugin is just replaced.
_PATIENCE_S: Final = 1.0
_POLL_S: Final = 0.05
# The choice takes well under a millisecond. A process that takes longer was stopped meanwhile.
_CHOOSING_TIMEOUT_S: Final = 10.0
# A cluster waits so long for one that starts just now.
_STARTING_TIMEOUT_S: Final = 30.0

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
        self._of_cluster = f" of {worker.scheduler.address}"
        self._locks: dict[Device, Lock] = {}
        self._is_released = False

    def at_once(self) -> tuple[Device, ...]:
        """Take the devices of the plugin that this one replaces: its tasks keep them meanwhile."""
        before, count = _before.pop(self._worker, ()), self._count
        with suppress(Exception):  # `settle` raises it
            again = [device for device in self._found() if device in before]
            if not self._shared and len(again) >= (count or 1):
                self._take(again, count, timeout_s=0)
        return tuple(self._locks)

    async def settle(self) -> tuple[Device, ...]:
        """Return the devices, once the scheduler and the holders of locks agree, or raise."""
        found, count = self._found(), self._count
        if self._shared:
            with suppress(OSError):  # `announce` does it later
                await registration.install_routing(self._worker)
            return found[:count]
        others = [device for device in found if device not in self._locks]
        held = await asyncio.to_thread(held_devices, others)
        foreign = {one: who for one, who in held.items() if not who.endswith(self._of_cluster)}
        free = [device for device in found if device not in foreign]
        all_named = self._named is not None and count is None
        if not free or (foreign and all_named):
            # Devices that the user named are all needed; of all others, the free ones are enough.
            left = [device for device in found if device not in held]
            raise _in_use(len(found) if all_named else count or 0, left, foreign)
        if count and isinstance(n := self._worker.name, int):
            # The nth worker of a local cluster has the nth part, if it is free.
            free.sort(key=lambda device: found.index(device) // count != n)
        try:
            answer = await self._claim(free)
        except OSError:  # the scheduler is not reached now: the locks alone decide
            if count is None or not self._locks:
                held = await asyncio.to_thread(self._take, others, count)
            if not self._locks and not self._is_released:
                raise self._in_use((), held) from None
            return tuple(self._locks)
        if not answer["uuids"]:
            named = {device: answer["holders"].get(device.uuid) for device in free}
            ours = {device: f"{who}{self._of_cluster}" for device, who in named.items() if who}
            left = [device for device in free if device not in ours]
            raise self._in_use(left, foreign | ours)
        mine = [device for device in found if device.uuid in answer["uuids"]]
        self._give_up(set(self._locks).difference(mine))
        deadline = monotonic() + _PATIENCE_S
        while (more := [one for one in mine if one not in self._locks]) and not self._is_released:
            held = await asyncio.to_thread(self._take, more)
            if held and monotonic() > deadline:
                raise self._in_use((), held)
            await asyncio.sleep(_POLL_S if held else 0)
        return tuple(mine)

    def release(self) -> None:
        """Release the devices for good."""
        self._is_released = True
        _before[self._worker] = tuple(self._locks)
        self._give_up(self._locks)

    def _take(
        self,
        devices: Iterable[Device],
        count: int | None = None,
        timeout_s: float = _CHOOSING_TIMEOUT_S,
    ) -> dict[Device, str]:
        name = f"worker {self._worker.name}{self._of_cluster}"
        taken, held = take(devices, count, name, timeout_s)
        self._locks |= taken
        if self._is_released:  # meanwhile, by another thread
            self._give_up(self._locks)
        return held

    def _give_up(self, devices: Iterable[Device]) -> None:
        for device in list(devices):
            if lock := self._locks.pop(device, None):
                lock.close()

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
        answer = await registration.tell(
            self._worker,
            CLAIM,
            name=self._worker.name,
            plugin=self._plugin,
            candidates=[device.uuid for device in free],
            count=self._count,
        )
        return dict(answer)

    def _in_use(self, free: Iterable[Device], held: Mapping[Device, str]) -> DevicesInUseError:
        own = {
            one: who.replace(self._of_cluster, " of its own cluster") for one, who in held.items()
        }
        return _in_use(self._count or 0, free, own)


# -- locks of devices; all of this may wait for other processes: not on an event loop


def take(
    devices: Iterable[Device],
    count: int | None,
    holder: str,
    timeout_s: float = _CHOOSING_TIMEOUT_S,
) -> tuple[dict[Device, Lock], dict[Device, str]]:
    """Lock devices, or the first ``count`` that are free; return these and the holders of others.

    It raises :class:`DevicesInUseError` and takes none where fewer than ``count`` are free.
    """
    taken: dict[Device, Lock] = {}
    held: dict[Device, str] = {}
    with choosing(_directory(), timeout_s) as opened, ExitStack() as taking:
        for device in devices:
            if len(taken) == count:
                break
            lock = _lock(opened, device)
            if not lock.is_held:
                held[device] = lock.note
                lock.close()
                continue
            taking.callback(lock.close)
            lock.claim(f"pid {os.getpid()} on {socket.gethostname()}, {holder}")
            taken[device] = lock
        if count is not None and len(taken) < count:
            raise _in_use(count, taken, held)
        taking.pop_all()
    return taken, held


def held_devices(devices: Iterable[Device]) -> dict[Device, str]:
    """Return the devices that workers on this machine hold, with the workers."""
    held: dict[Device, str] = {}
    with choosing(_directory(), _CHOOSING_TIMEOUT_S) as opened:
        for device in devices:
            lock = _lock(opened, device)
            if not lock.is_held:
                held[device] = lock.note
            lock.close()
    return held


@contextmanager
def starts_alone() -> Iterator[Callable[[], None]]:
    """Let this user's clusters start one after another; gives a function that ends the start.

    Each then sees which devices are held. Of two that start at once, each would get some devices,
    and both would fail.
    """
    with ExitStack() as alone:
        # A process that a cluster starts would wait for that cluster.
        if multiprocessing.parent_process() is None:
            with suppress(LockDirectoryError):  # the other one takes long, or it is raised later
                alone.enter_context(choosing(_directory(), _STARTING_TIMEOUT_S, "starting.lock"))
        yield alone.close


def _in_use(wanted: int, free: Iterable[Device], held: Mapping[Device, str]) -> DevicesInUseError:
    """Return the error of a worker that wants more devices than are free."""
    texts = {str(device.info): who for device, who in held.items()}
    return DevicesInUseError(wanted, [str(device.info) for device in free], texts)


def _lock(opened: Callable[[str], Lock], device: Device) -> Lock:
    return opened(quote(device.uuid, safe="") + ".lock")


def _directory() -> Path:
    configured = config.get("lock-directory")
    return Path(configured) if configured else default_directory()
