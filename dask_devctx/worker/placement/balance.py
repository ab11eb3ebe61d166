"""Tasks that wait long while other devices are idle: they go back, and run there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Final

from distributed import Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx.dask_internals.scheduler import part_for_idle
from dask_devctx.scheduler.messages import LATE
from dask_devctx.worker.leases import registration

if TYPE_CHECKING:
    from dask_devctx.worker.placement.admission import Admission

# dask gives a worker tasks ahead, which wait for those before them. A wait that is shorter than
# this costs less than the way to another device.
_LATE_S: Final = 0.5
# The most tasks that the scheduler is asked for at once, while other workers may be busy.
_MOST: Final = 64


@contextmanager
def giving_back(worker: Worker, admission: Admission) -> Iterator[None]:
    """While it is open, a worker gives late tasks back for devices that are idle.

    Its own come first; the scheduler knows those of other workers.
    """

    async def look() -> None:
        late = {one.key: one for one in admission.late(perf_counter() - _LATE_S)}
        idle = sum(not one.tasks for one in admission.states.values())
        keys = [*late][: part_for_idle(len(late), idle)]
        if late and not keys:
            with suppress(Exception):  # it is asked again
                keys = await registration.tell(worker, LATE, keys=[*late][:_MOST])
        for key in keys:
            if admission.take_back(claim := late[key]):
                claim.call.future.cancel()  # the task is scheduled again
                claim.call = None  # it has the task's inputs

    looking = PeriodicCallback(look, _LATE_S * 1000)
    looking.start()
    try:
        yield
    finally:
        looking.stop()
