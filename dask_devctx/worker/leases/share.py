"""The worker's side of sharing: it takes and gives up devices as the scheduler says.

The workers of one cluster that name no number of devices share a machine's devices out evenly: the
scheduler divides them (:mod:`dask_devctx.scheduler.sharing`). Locks keep other clusters away
(:mod:`dask_devctx.worker.leases.lease`); they are taken on a thread, not on the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from time import monotonic
from weakref import WeakKeyDictionary

from distributed import Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx import config
from dask_devctx.config.options import Options
from dask_devctx.cuda.device import Device, devices, named_devices
from dask_devctx.dask_internals.connections import answering
from dask_devctx.errors import DeviceNotFoundError, DevicesInUseError, LockDirectoryError
from dask_devctx.scheduler.messages import CLAIM, SHARE
from dask_devctx.worker.leases import registration
from dask_devctx.worker.leases.lease import SIGN_INTERVAL_S, Lease, holders

# A worker waits so long for devices that others of its cluster are about to release: those of a
# process that just ended, or whose plugin is just replaced.
_PATIENCE_S = 1.0
_POLL_S = 0.05
# A task that was sent for a device that its worker gave up goes back for so long. Then the
# scheduler knows the worker's devices.
_GIVEN_UP_S = 30.0

# The devices that a worker had, for a plugin that takes another one's place.
_before: WeakKeyDictionary[Worker, tuple[Device, ...]] = WeakKeyDictionary()


@functools.cache
def _process(pid: int) -> str:
    """Return the name of a process; processes of several containers may have the same id."""
    return uuid.uuid4().hex


class DeviceShare:
    """The devices of one worker, used on its event loop.

    ``on_change`` is called when they have changed, before others can take those that it gave up.
    """

    def __init__(self, worker: Worker, options: Options, on_change: Callable[[], object]) -> None:
        named = options
        if options.devices is None and options.devices_per_worker is None:
            named = Options(shared=options.shared)  # by the configuration of this process
        self._worker = worker
        self._wanted, self._count = named.devices, named.devices_per_worker
        self._shared = named.shared
        self._directory = config.get("lock-directory")
        self._on_change = on_change
        self._of_cluster = f" of {worker.scheduler.address}"
        self.error: Exception | None = None  # the reason why it has no devices
        # Whether the scheduler and the holders of the devices agree. If not, `settle` asks.
        self.is_settled = False
        self._closed = False
        self._devices: tuple[Device, ...] = ()
        self._found: tuple[Device, ...] = ()
        self._version, self._uuids = 0, frozenset[str]()  # as the scheduler said last
        self._given_up: dict[Device, float] = {}
        self._following = asyncio.Lock()
        self._lease = Lease(
            f"worker {worker.name}{self._of_cluster}",
            self._directory,
            alone=self._count is not None,
        )
        self._steps = ExitStack()
        self._steps.enter_context(answering(worker, {SHARE: self._told}))
        signs = PeriodicCallback(self._give_sign, SIGN_INTERVAL_S * 1000)
        self._steps.callback(signs.stop)
        signs.start()
        try:
            self._begin()
        except Exception as error:
            self._failed(error)
        except BaseException:
            self.release()
            raise

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the worker; raises the reason why it has none."""
        if self.error is not None:
            raise self.error
        return self._devices

    @property
    def can_start(self) -> bool:
        """Whether the devices, or the reason why there are none, are known."""
        return bool(self._devices) or self.is_settled

    @property
    def part(self) -> float:
        """The part of the machine's devices that the worker has, from 0 to 1."""
        return len(self._devices) / max(len(devices()), 1) if self._devices else 1.0

    def gave_up(self, wanted: object) -> bool:
        """Return whether the worker gave up a device a moment ago, for other workers."""
        with suppress(Exception):  # it names no device
            return bool(self._given_up) and (
                monotonic() - self._given_up[Device(wanted)] < _GIVEN_UP_S
            )
        return False

    async def settle(self) -> None:
        """Agree with other workers on the devices, or fail."""
        deadline = monotonic() + _PATIENCE_S
        while not (self._closed or self.is_settled):
            try:
                await (self._claim() if self._count is None else self._acquire(self._count))
            except DevicesInUseError as error:
                if monotonic() > deadline or not self._may_get(error):
                    self._failed(error)
                else:
                    await asyncio.sleep(_POLL_S)
            except Exception as error:
                self._failed(error)
            else:
                self.is_settled = True

    def release(self) -> None:
        """Release the devices."""
        self._closed = True
        _before[self._worker] = self._devices
        self._devices = ()
        self._lease.release()
        self._steps.close()

    async def _give_sign(self) -> None:
        """Show others that the worker lives; they read it when it has ended."""
        self._lease.touch()
        if self._count is None and self.is_settled and self.error is None:
            await self._follow()  # the holders of a device may have released it late

    # -- ways to get devices

    def _begin(self) -> None:
        """Take the devices, as far as no other process must be waited for."""
        self._found = named_devices(self._wanted)
        if not self._found:
            raise DeviceNotFoundError(
                "any",
                (),
                None,
                "The worker sees no GPU: check CUDA_VISIBLE_DEVICES and the option devices",
            )
        if self._shared:
            self._devices, self.is_settled = self._found[: self._count], True
            return
        again = [one for one in _before.pop(self._worker, ()) if one in self._found]
        if again and (self._count is None or self._count <= len(again)):
            # A plugin takes another one's place: its tasks keep their devices meanwhile.
            with suppress(DevicesInUseError, LockDirectoryError):
                self._lease.take(again, self._count, timeout_s=0)
                self._devices = self._lease.devices
                self.is_settled = self._count is not None

    async def _acquire(self, count: int) -> None:
        n, found = self._worker.name, self._found
        if isinstance(n, int):  # the worker n of a local cluster takes the nth share if it is free
            mine = found[n * count : (n + 1) * count]
            found = (*mine, *(device for device in found if device not in mine))
        await asyncio.to_thread(self._lease.take, found, count)
        self._devices = self._lease.devices

    async def _claim(self) -> None:
        """Let the scheduler say which devices are this worker's, and take them."""
        free, held = await self._not_of_other_clusters()
        try:
            await registration.install_routing(self._worker)
            answer = dict(
                await registration.ask(
                    self._worker,
                    CLAIM,
                    process=_process(os.getpid()),
                    candidates=[device.uuid for device in free],
                )
            )
        except Exception:  # the scheduler lacks this package: the locks alone decide
            mine = [device.uuid for device in free if device not in held]
            answer = {"uuids": mine, "version": 0, "holders": {}}
        if self._closed:
            return
        if not answer["uuids"]:
            for device in free:
                if holder := answer["holders"].get(device.uuid):
                    held.setdefault(device, f"the worker {holder}")
            raise DevicesInUseError(0, (), _texts(held))
        if answer["version"] >= self._version:
            self._version, self._uuids = answer["version"], frozenset(answer["uuids"])
        if missing := await self._follow():
            raise DevicesInUseError(0, (), _texts(missing))
        self.error = None

    async def _not_of_other_clusters(self) -> tuple[list[Device], dict[Device, str]]:
        """Return the devices that this cluster may use, and the holders of those in use."""
        others = [device for device in self._found if device not in self._devices]
        cluster = self._of_cluster.removeprefix(" of ")
        held = await asyncio.to_thread(holders, others, self._directory, cluster, in_process=True)
        foreign = {d: who for d, who in held.items() if not who.endswith(self._of_cluster)}
        free = [device for device in self._found if device not in foreign]
        if not free or (foreign and self._wanted is not None):
            # Devices that the user named are all needed; of all others, the free ones are enough.
            wanted = 0 if self._wanted is None else len(self._found)
            left = [str(device.info) for device in self._found if device not in held]
            raise DevicesInUseError(wanted, left, _texts(foreign))
        return free, held

    # -- changes

    async def _told(self, uuids: Sequence[str], version: int) -> list[str]:
        """Take and give up devices, as the scheduler says; return those that the worker has."""
        if version > self._version and not self._closed:
            self._version, self._uuids = version, frozenset(uuids)
            if self.is_settled and self.error is None:
                await self._follow()
        return [device.uuid for device in self._devices]

    async def _follow(self) -> dict[Device, str]:
        """Have the devices that the scheduler named; return those that others hold."""
        async with self._following:
            while True:
                version = self._version
                mine = [device for device in self._found if device.uuid in self._uuids]
                more = [device for device in mine if device not in self._devices]
                held = await asyncio.to_thread(self._lease.take, more) if more else {}
                if version == self._version or self._closed:
                    break
                self._lease.give_up(set(self._lease.devices).difference(self._devices))
            now = tuple(device for device in mine if device not in held)
            if now and now != self._devices and not self._closed:
                less = [device for device in self._devices if device not in now]
                self._devices = now
                self._given_up |= dict.fromkeys(less, monotonic())
                self._on_change()
                self._lease.give_up(less)
            return held

    def _may_get(self, error: DevicesInUseError) -> bool:
        """Return whether workers of this cluster, which may release devices, hold some."""
        return not error.holders or any(
            who.endswith(self._of_cluster) or who.startswith("the worker ")
            for who in error.holders.values()
        )

    def _failed(self, error: Exception) -> None:
        if isinstance(error, DevicesInUseError):
            own = {
                device: who.replace(self._of_cluster, " of its own cluster")
                for device, who in error.holders.items()
            }
            error = DevicesInUseError(error.wanted, error.free, own)
        self.error, self.is_settled = error, True
        self._lease.give_up(self._lease.devices)
        self._devices = ()


def _texts(held: Mapping[Device, str]) -> dict[str, str]:
    return {str(device.info): who for device, who in held.items()}
