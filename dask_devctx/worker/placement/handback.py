"""Tasks that wait for the end of an actor go to other workers, if any other may run them.

dask counts a worker as idle although an actor keeps its device, and sends tasks there. Once a
second, the worker asks the scheduler which of them workers without actors may run.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from distributed import Status, Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx.scheduler.messages import KEEP
from dask_devctx.worker.leases.registration import ask, has_routing
from dask_devctx.worker.placement.admission import Admission

if TYPE_CHECKING:
    from dask_devctx.worker.actors import DeviceActors

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S: Final = 1.0
_MOST: Final = 1_000  # the tasks that one message names


class Handback:
    """Hands tasks that can never start while an actor lives back to the scheduler."""

    def __init__(self, worker: Worker, admission: Admission) -> None:
        self._worker = worker
        self._admission = admission
        self._told = False  # what the scheduler knows
        self._asks = False

    def look(self) -> None:
        """Tell the scheduler whether actors keep devices, and which tasks wait for them."""
        if not (self._admission.has_actors or self._told) or self._asks:
            return
        for claim in self._admission.blocked():
            if self._admission.may_move(claim):
                self._admission.withdraw(claim)
        if self._worker.status in (Status.running, Status.paused) and has_routing(self._worker):
            kept, blocked = self._admission.has_actors, self._admission.blocked()
            if kept is not self._told or blocked:
                self._asks = True
                self._worker.loop.add_callback(self._ask, kept, [one.key for one in blocked])

    async def _ask(self, kept: bool, keys: list[Hashable]) -> None:
        try:
            answer = await ask(self._worker, KEEP, kept=kept, keys=keys[:_MOST])
            if isinstance(answer, Mapping):
                self._told = kept
                elsewhere = set(answer.get("elsewhere", ()))
                for claim in self._admission.blocked():
                    if claim.key in elsewhere:
                        self._admission.withdraw(claim)
        except Exception as error:  # the scheduler ends, or has no routing yet
            logger.debug("The scheduler was not told what actors keep: %r", error)
        finally:
            self._asks = False


@contextmanager
def handing_back(worker: Worker, actors: DeviceActors, admission: Admission) -> Iterator[None]:
    """While it is open, tasks that would wait for the end of an actor go to other workers."""
    handback = Handback(worker, admission)
    looking = PeriodicCallback(handback.look, _LOOK_INTERVAL_S * 1000)
    looking.start()
    actors.on_change = handback.look
    handback.look()
    try:
        yield
    finally:
        actors.on_change = lambda: None
        looking.stop()
