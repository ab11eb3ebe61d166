"""Tasks that wait long while other devices are idle: they go back, and run there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Final

from distributed import Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx.dask_internals.scheduler import SOME_IDLE, part_for_idle
from dask_devctx.dask_internals.shuffles import is_barrier
from dask_devctx.dask_internals.worker import replaced
from dask_devctx.scheduler.messages import LATE
from dask_devctx.worker.leases import registration

if TYPE_CHECKING:
    from dask_devctx.worker.placement.admission import Admission

# dask gives a worker tasks ahead, which wait for those before them. A wait that is shorter than
# this costs less than the way to another device.
_LATE_S: Final = 0.1
# While other workers are busy, the scheduler is asked so seldom, unless it says that one is idle.
_AGAIN_S: Final = 0.5
# The most tasks that it is asked for at once.
_MOST: Final = 64


@contextmanager
def giving_back(worker: Worker, admission: Admission) -> Iterator[None]:
    """While it is open, a worker gives late tasks back for devices that are idle.

    Its own come first; the scheduler knows those of other workers.
    """

    ask_at = 0.0

    def may_ask(**message: object) -> None:
        nonlocal ask_at
        ask_at = 0.0
        worker.loop.add_callback(look)

    async def look() -> None:
        nonlocal ask_at
        every = admission.late((now := perf_counter()) - _LATE_S)
        # Where the barrier of a P2P rechunk is scheduled again, dask ends the rechunk.
        late = {one.key: one for one in every if not is_barrier(one.key)}
        idle = sum(not one.tasks for one in admission.states.values())
        keys = [*late][: part_for_idle(len(late), idle)]
        if late and not keys and now >= ask_at:
            ask_at = now + _AGAIN_S
            with suppress(Exception):  # it is asked again
                keys = await registration.tell(worker, LATE, keys=[*late][:_MOST])
            if keys:
                ask_at = 0.0
        for key in keys:
            if admission.take_back(claim := late[key]):
                claim.call.future.cancel()  # the task is scheduled again
                claim.call = None  # it has the task's inputs

    looking = PeriodicCallback(look, _LATE_S * 1000)
    looking.start()
    try:
        with replaced(worker.stream_handlers, SOME_IDLE, may_ask):
            yield
    finally:
        looking.stop()
