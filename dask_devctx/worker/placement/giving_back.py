"""Tasks that wait for the end of an actor, given back to the scheduler, which sends them elsewhere.

dask counts a worker as idle although an actor keeps its device, and sends tasks there. The worker
tells the scheduler which parts of its devices actors keep. The scheduler then keeps such tasks away
(:mod:`dask_devctx.scheduler.actors`) and answers which of the worker's tasks others may run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any, Final

from distributed import Status, Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx.annotations import Unannotated, requested_device
from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals import tasks
from dask_devctx.scheduler.messages import KEEP
from dask_devctx.worker.leases.registration import ask, has_routing
from dask_devctx.worker.placement.claims import Claims
from dask_devctx.worker.placement.occupancy import WHOLE
from dask_devctx.worker.task import DeviceTask

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S: Final = 1.0
# dask starts further tasks in the place of those that were given back: look again after this time.
_NEXT_S: Final = 0.01
_MOST = 1_000  # the tasks that one message names

_Left = dict[str, tuple[float, int | None]]


class GivingBack:
    """Gives tasks that can never start while an actor lives back to the scheduler.

    Parameters
    ----------
    worker
        The worker.
    claims
        The claims of its tasks and actors.
    unannotated
        The rule for tasks that name no device.

    Notes
    -----
    Use it only on the worker's event loop. A task is given back only where the scheduler sends it
    to another worker, or where another device of this worker can run it.
    """

    def __init__(
        self,
        worker: Worker,
        claims: Claims,
        unannotated: Unannotated,
    ) -> None:
        self._worker = worker
        self._claims = claims
        self._placement = claims.placement
        self._unannotated = unannotated
        # The state that the scheduler knows. After another plugin of this worker, it is unknown.
        self._told: _Left | None = None if claims.has_earlier else {}
        self._asks = False

    def look(self) -> None:
        """Tell the scheduler if actors keep other devices than before, or if tasks wait for them.

        Without such actors, this costs nothing.
        """
        if self._claims.admission.idle and self._told == {}:
            return
        if self._asks or self._worker.status not in (Status.running, Status.paused):
            return
        left = self._left()
        waiting = list(self._waiting()) if left else []
        given_back = sum(self._give_back(key) for key in waiting if self._has_room_here(key))
        if (left != self._told or len(waiting) > given_back) and has_routing(self._worker):
            self._asks = True
            self._worker.loop.add_callback(self._ask, left, waiting[:_MOST])
        elif given_back:
            self._look_soon()

    def _look_soon(self) -> None:
        self._worker.loop.call_later(_NEXT_S, self.look)

    async def _ask(self, left: _Left, keys: list[Hashable]) -> None:
        elsewhere: tuple[Hashable, ...] = ()
        try:
            answer = await ask(
                self._worker,
                KEEP,
                unannotated=self._unannotated,
                place=self._claims.admission.occupancy.place / WHOLE,
                left=left,
                keys=keys,
            )
            if isinstance(answer, Mapping):
                self._told, elsewhere = left, answer.get("elsewhere", ())
        except Exception as error:  # the scheduler ends, or has no routing yet
            logger.debug("The scheduler was not told what actors keep: %r", error)
        finally:
            self._asks = False
        if sum(self._give_back(key) for key in elsewhere) or left != self._left():
            self._look_soon()

    def _left(self) -> _Left:
        """Return the share and the bytes that actors leave of each device where one lives."""
        admission, found = self._claims.admission, {}
        with admission.lock:
            for device in self._placement.devices:
                left = admission.occupancy.left(device)
                if left is not None:
                    share, room = left
                    found[device.uuid] = share / WHOLE, None if room == math.inf else int(room)
        return found

    def _waiting(self) -> Iterator[Hashable]:
        """Yield the tasks that can never start on their devices while the actors there live."""
        admission, now = self._claims.admission, monotonic()
        occupancy = admission.occupancy
        with admission.lock:
            left = {device: occupancy.left(device) for device in self._placement.devices}
            full = {device for device, one in left.items() if one and one[0] < occupancy.place}
            for claim in admission.waiting():
                if occupancy.expected_start(claim, now) == math.inf:
                    yield claim.key
        placed: Mapping[Hashable, Device] = self._placement.placed
        for key, device in placed.items():
            if device in full and key not in self._claims.by_key:
                yield key

    def _has_room_here(self, key: Hashable) -> bool:
        """Return whether other devices of this worker can run a task that names none."""
        ts, admission = self._worker.state.tasks.get(key), self._claims.admission
        if ts is None or not isinstance(ts.run_spec, DeviceTask):
            return False
        if tasks.makes_an_actor(self._worker, key):
            return False
        task: Any = ts.run_spec
        try:
            wanted = requested_device(ts.annotations, key, self._unannotated, task.task)
        except Exception:  # the worker has failed the task with it
            return False
        now, occupancy = monotonic(), admission.occupancy
        claim = self._claims.by_key.get(key)
        if claim is None:
            share, nbytes, number = occupancy.place, 0, 1
            named = task.asked_for
        elif not wanted.plain and wanted.any_device:
            share, nbytes, number, named = claim.share, claim.nbytes, len(claim.devices), False
        else:
            return False
        with admission.lock:
            fit = sum(
                occupancy.free_at(device, share, nbytes, now) != math.inf
                for device in self._placement.devices
            )
        return not named and fit >= number

    def _give_back(self, key: Hashable) -> bool:
        """Let the scheduler send a task again, if the task still waits for its place."""
        ts = self._worker.state.tasks.get(key)
        if ts is None or ts.state != "executing":
            return False
        claim = self._claims.by_key.get(key)
        if claim is not None:
            waits = claim.waits
            claim.withdraw()
            return waits
        device: Device | None = self._placement.placed.get(key)
        priority = getattr(ts.run_spec, "priority", None)
        if device is None or priority is None:
            return False
        return self._claims.admission.occupancy.queues[device].give_back(priority)


@contextmanager
def giving_back(worker: Worker, claims: Claims, unannotated: Unannotated) -> Iterator[None]:
    """While it is open, tasks that would wait for the end of an actor go to other workers."""
    giving = GivingBack(worker, claims, unannotated)
    looking = PeriodicCallback(giving.look, _LOOK_INTERVAL_S * 1000)
    looking.start()
    claims.on_actors = giving.look
    try:
        yield
    finally:
        claims.on_actors = None
        looking.stop()
