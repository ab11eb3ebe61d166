"""The worker's side of sharing: it takes and gives up devices as the scheduler says.

A worker takes what it uses, and others get the rest. The workers of one cluster that name no number
of devices share a machine's devices out evenly: the scheduler divides them
(:mod:`dask_devctx.scheduler.sharing`), and locks keep other clusters away
(:mod:`dask_devctx.worker.leases.lease`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from distributed import Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx import config
from dask_devctx.config.host_memory import fair_memory
from dask_devctx.config.options import Options
from dask_devctx.cuda.device import Device, devices, named_devices
from dask_devctx.dask_internals.connections import answering
from dask_devctx.errors import DeviceNotFoundError, DevicesInUseError
from dask_devctx.scheduler.announcements import CLAIM, SHARE, MalformedError, read_share
from dask_devctx.worker.leases import registration
from dask_devctx.worker.leases.lease import SIGN_INTERVAL_S, Lease, acquire, process_locks

logger = logging.getLogger(__name__)

# A worker waits so long for devices that others of its cluster are about to release: those of a
# process that just ended, or whose plugin is just replaced.
_PATIENCE_S = 1.0
_POLL_S = 0.05
# A task that was sent for a device that its worker gave up goes back for so long. Then the
# scheduler knows the worker's devices.
_GIVEN_UP_S = 30.0

_token = (0, "")
# The devices that a worker had, for a plugin that takes another one's place.
_before: WeakKeyDictionary[Worker, tuple[Device, ...]] = WeakKeyDictionary()


def _process() -> str:
    """Return the name of this process; processes of several containers may have the same id."""
    global _token
    if _token[0] != os.getpid():
        _token = (os.getpid(), uuid.uuid4().hex)
    return _token[1]


class DeviceShare:
    """The devices of one worker.

    Parameters
    ----------
    worker
        The worker, on whose event loop this is used.
    options
        The options of its plugin.
    on_change
        Called when the devices have changed, before others can take those that were given up.

    Attributes
    ----------
    error
        The reason why it has no devices, or None.
    is_settled
        Whether the scheduler and the holders of the devices agree. If not, :meth:`settle` asks.
    """

    def __init__(self, worker: Worker, options: Options, on_change: Callable[[], object]) -> None:
        named = options
        if options.devices is None and options.devices_per_worker is None:
            named = Options(shared=options.shared)  # by the configuration of this process
        self._worker = worker
        self._wanted = named.devices
        self._count = named.devices_per_worker
        self._shared = named.shared
        self._directory = config.get("lock-directory")
        self._on_change = on_change
        self._holder = f"worker {worker.name}{self._of_cluster}"
        self.error: Exception | None = None
        self.is_settled = False
        self._closed = False
        self._devices: tuple[Device, ...] = ()
        self._candidates: tuple[Device, ...] = ()
        self._lease: Lease | None = None
        self._version = 0
        self._uuids: frozenset[str] = frozenset()
        self._given_up: dict[Device, float] = {}
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

    @property
    def fair_memory(self) -> int:
        """The bytes of host memory for the worker, as its devices are a part of the machine's."""
        return fair_memory(len(self._devices))

    def gave_up(self, wanted: object) -> bool:
        """Return whether the worker gave up a device a moment ago, for other workers."""
        if not self._given_up:
            return False
        try:
            at = self._given_up.get(Device(wanted), float("-inf"))
        except Exception:  # it names no device
            return False
        return monotonic() - at < _GIVEN_UP_S

    async def settle(self) -> bool:
        """Agree with other workers on the devices; return whether they changed."""
        deadline, before = monotonic() + _PATIENCE_S, self._devices
        while not self._closed and not self.is_settled:
            try:
                if self._count is not None:
                    self._acquire()
                else:
                    await self._claim()
            except DevicesInUseError as error:
                if monotonic() > deadline or not self._may_get(error):
                    self._failed(error)
                    break
            except Exception as error:
                self._failed(error)
                break
            if not self.is_settled:
                await asyncio.sleep(_POLL_S)
        return self._devices != before

    def release(self) -> None:
        """Release the devices."""
        self._closed = True
        if self._lease is not None:
            self._lease.release()
        elif self._candidates:
            _before[self._worker] = self._devices
            process_locks.release(self._devices, self._directory)
        self._devices, self._lease = (), None
        self._steps.close()

    def _give_sign(self) -> None:
        """Show others that the worker lives; they read it when it has ended."""
        (self._lease or process_locks).touch()
        lacks = self._uuids.difference(device.uuid for device in self._devices)
        if lacks and self.is_settled and self.error is None:  # their holders released them late
            self._follow()

    # -- ways to get devices

    def _begin(self) -> None:
        """Take the devices, as far as no other worker must be asked."""
        found = named_devices(self._wanted)
        if not found:
            raise DeviceNotFoundError(
                "any",
                (),
                None,
                "The worker sees no GPU: check CUDA_VISIBLE_DEVICES and the option devices",
            )
        self._found = found
        if self._shared:
            self._devices = found[: self._count]
            self.is_settled = True
        elif self._count is not None:
            try:
                self._acquire()
            except DevicesInUseError as error:
                if not self._may_get(error):
                    raise
        else:
            self._candidates = found
            again = [device for device in _before.get(self._worker, ()) if device in found]
            if again:
                held = process_locks.try_take(again, self._holder, self._directory)
                self._devices = tuple(device for device in again if device not in held)

    def _acquire(self) -> None:
        assert self._count is not None
        n, found = self._worker.name, list(self._found)
        if isinstance(n, int):  # the worker n of a local cluster takes the nth share if it is free
            mine = found[n * self._count : (n + 1) * self._count]
            found = mine + [device for device in found if device not in mine]
        self._lease = acquire(found, self._count, holder=self._holder, directory=self._directory)
        self._devices, self.is_settled = self._lease.devices, True

    async def _claim(self) -> None:
        """Let the scheduler say which devices are this worker's, and take them."""
        free, held = self._not_of_other_clusters()
        answer: Mapping[str, Any]
        try:
            await registration.install_routing(self._worker)
            answer = await registration.ask(
                self._worker, CLAIM, process=_process(), candidates=[d.uuid for d in free]
            )
            read_share(answer)
        except Exception:  # the scheduler lacks this package: the locks alone decide
            mine = [d for d in free if str(d.info) not in held]
            answer = {"uuids": [d.uuid for d in mine], "version": 0, "holders": {}}
        if self._closed:
            return
        if not answer["uuids"]:
            for device in free:
                if holder := answer["holders"].get(device.uuid):
                    held.setdefault(str(device.info), f"the worker {holder}")
            raise DevicesInUseError(0, (), held)
        if answer["version"] >= self._version:
            self._version, self._uuids = answer["version"], frozenset(answer["uuids"])
        missing = self._follow()
        if missing:
            raise DevicesInUseError(
                0, (), {str(device.info): who for device, who in missing.items()}
            )
        self.is_settled, self.error = True, None

    def _not_of_other_clusters(self) -> tuple[list[Device], dict[str, str]]:
        """Return the devices that this cluster may use, and the holders of those in use."""
        others = [device for device in self._candidates if device not in self._devices]
        held = process_locks.try_take(others, self._holder, self._directory)
        process_locks.release([d for d in others if d not in held], self._directory)
        foreign = {d: who for d, who in held.items() if not who.endswith(self._of_cluster)}
        shown = {str(device.info): who for device, who in held.items()}
        free = [device for device in self._candidates if device not in foreign]
        if not free or (foreign and self._wanted is not None):
            # Devices that the user named are all needed; of all others, the free ones are enough.
            wanted = 0 if self._wanted is None else len(self._candidates)
            raise DevicesInUseError(
                wanted,
                [str(device.info) for device in self._candidates if device not in held],
                {str(device.info): who for device, who in foreign.items()},
            )
        return free, shown

    # -- changes

    async def _told(self, **message: Any) -> list[str]:
        """Take and give up devices, as the scheduler says; return those that the worker has."""
        try:
            uuids, version = read_share(message)
        except MalformedError as error:
            logger.warning("A message %s was refused: %s", SHARE, error)
            return [device.uuid for device in self._devices]
        if version > self._version and not self._closed:
            self._version, self._uuids = version, frozenset(uuids)
            if self.is_settled and self.error is None:
                self._follow()
        return [device.uuid for device in self._devices]

    def _follow(self) -> Mapping[Device, str]:
        """Have the devices that the scheduler named; return those that others hold."""
        mine = [device for device in self._candidates if device.uuid in self._uuids]
        more = [device for device in mine if device not in self._devices]
        missing = process_locks.try_take(more, self._holder, self._directory)
        now = tuple(device for device in mine if device not in missing)
        less = [device for device in self._devices if device not in now]
        if now and now != self._devices:
            self._devices = now
            self._given_up |= dict.fromkeys(less, monotonic())
            self._on_change()
            process_locks.release(less, self._directory)
        return missing

    def _may_get(self, error: DevicesInUseError) -> bool:
        """Return whether workers of this cluster, which may release devices, hold some."""
        return not error.holders or any(
            who.endswith(self._of_cluster) or who.startswith("the worker ")
            for who in error.holders.values()
        )

    @property
    def _of_cluster(self) -> str:
        return f" of {self._worker.scheduler.address}"

    def _failed(self, error: Exception) -> None:
        if isinstance(error, DevicesInUseError):
            own = {
                device: who.replace(self._of_cluster, " of its own cluster")
                for device, who in error.holders.items()
            }
            error = DevicesInUseError(error.wanted, error.free, own)
        self.error, self.is_settled = error, True
        if self._candidates and self._devices:
            process_locks.release(self._devices, self._directory)
        self._devices = ()
