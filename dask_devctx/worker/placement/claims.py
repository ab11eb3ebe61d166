"""The claims of a worker's tasks, from the request to the end of the task or its actor."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from dask_devctx.annotations import Request
from dask_devctx.cuda.device import Device
from dask_devctx.worker.inputs.one_input import Input
from dask_devctx.worker.memory.limits import limit_nbytes
from dask_devctx.worker.placement.admission import Admission, Claim
from dask_devctx.worker.placement.claimed import ClaimedTask, Memory
from dask_devctx.worker.placement.no_devices import NoDevices
from dask_devctx.worker.placement.occupancy import WHOLE, share_units
from dask_devctx.worker.placement.placement import Placement
from dask_devctx.worker.threads.executors import DeviceThreadPoolExecutor

logger = logging.getLogger(__name__)

# The claims of actors, by the state of the task that made the actor: an actor keeps its claim while
# it lives, also when the plugin is registered again.
_of_actors: weakref.WeakKeyDictionary[Any, Claim] = weakref.WeakKeyDictionary()


def reservable(devices: Sequence[Device], limit: float | str | None) -> dict[Device, int]:
    """Return the bytes that tasks may reserve on each device.

    Parameters
    ----------
    devices
        The worker's devices.
    limit
        The option ``device_memory_limit``. Without a limit, all memory of a device counts.
    """
    return {one: limit_nbytes(one, limit) or limit_nbytes(one, 1.0) or 0 for one in devices}


class Claims:
    """The claims of the tasks of one worker.

    Parameters
    ----------
    placement
        Chooses the devices.
    tasks_per_device
        How many tasks that say nothing run on a device at a time.
    limits
        The bytes that tasks may reserve, by device.

    Attributes
    ----------
    admission
        Decides which claims are granted.
    by_key
        The claims of tasks that wait or run, and of actors.
    placement
        The devices of tasks.
    pools
        The executor of each device.
    memory
        Makes room for reservations; None if the devices have no limit.
    on_actors
        Called when an actor begins or ceases to keep devices.

    Notes
    -----
    Use it only on the worker's event loop.
    """

    def __init__(
        self,
        placement: Placement | NoDevices,
        tasks_per_device: int,
        limits: Mapping[Device, int],
    ) -> None:
        self.by_key: dict[Hashable, Claim] = {}
        self.pools: Mapping[Device, DeviceThreadPoolExecutor] = {}
        self.memory: Memory | None = None
        self.on_actors: Callable[[], None] | None = None
        self.placement = placement
        self.admission = Admission(
            placement.devices, tasks_per_device, placement.durations_s, limits=limits
        )

    @property
    def has_earlier(self) -> bool:
        """Whether actors of an earlier plugin may keep devices."""
        return bool(_of_actors)

    def close(self) -> None:
        """Let the tasks that still wait for an actor's devices have them."""
        self.admission.forget_actors()

    def make(
        self, ts: Any, request: Request, inputs: Sequence[Input], urgency: tuple[Any, ...]
    ) -> Claim:
        """Return the claim of a task, which is not submitted yet; count the task on its devices.

        Raises
        ------
        Exception
            As :meth:`Placement.place_group` raises it.
        """
        devices = self.placement.place_group(ts.key, ts.prefix, request, inputs)
        by_user, _, *others = urgency
        return Claim(
            self.admission,
            ts.key,
            ts.prefix,
            devices,
            share_units(self.placement.share_of(request, devices[0])),
            request.nbytes or 0,
            urgency,
            # Tasks that come later and use up an input would pass it endlessly otherwise.
            (by_user, 0, *others),
        )

    def stand_in(self, ts: Any, claim: Claim, makes_actor: bool) -> Callable[..., ClaimedTask]:
        """Return a function that makes the stand-in of a task with a claim.

        Parameters
        ----------
        ts, claim
            The state of the task, and its claim.
        makes_actor
            Whether its result is an actor.

        Returns
        -------
        callable
            Its arguments are those of :class:`~dask_devctx.worker.task.DeviceTask`.
        """
        self.by_key[ts.key] = claim
        if makes_actor:
            _of_actors[ts] = claim
        return partial(ClaimedTask, claim=claim, makes_actor=makes_actor, room=self.memory)

    def follow(self, key: Hashable, finish: str, ts: Any) -> None:
        """Withdraw or release the claim of a task that does not need it any more."""
        claim = self.by_key.get(key)
        if claim is None:
            return
        if finish == "long-running":
            claim.release()
        if ts is None or ts.state != "executing":
            claim.withdraw()
            if ts is not None and ts.state == "memory" and claim.for_life:
                self.placement.keep(key, claim.devices, claim.share / WHOLE)
                self._actors_changed()
            elif ts is None or ts.state not in ("cancelled", "resumed"):
                del self.by_key[key]
                if claim.for_life:
                    claim.release()
                    self.placement.drop(key)
                    self._actors_changed()

    def _actors_changed(self) -> None:
        if self.on_actors is not None:
            self.on_actors()

    def take_again(self, tasks: Mapping[Hashable, Any]) -> None:
        """Let the actors that live keep their devices under this plugin too."""
        mine = set(self.placement.devices)
        for ts in tasks.values():
            claim = _of_actors.get(ts) if _of_actors else None
            if claim is not None and claim.for_life and mine.issuperset(claim.devices):
                self.admission.keep(claim)
                self.by_key[ts.key] = claim
                self.placement.keep(ts.key, claim.devices, claim.share / WHOLE)
