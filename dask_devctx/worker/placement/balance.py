"""Tasks that wait long: for a device, while others are idle, or for the results of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Final

from distributed import Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx.dask_internals.scheduler import SOME_IDLE, part_for_idle
from dask_devctx.dask_internals.shuffles import is_barrier
from dask_devctx.dask_internals.tasks import secede_if_waiting
from dask_devctx.dask_internals.worker import replaced, workers_log
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
# A task that waits for others, while tasks wait for its slot, keeps the slot for so long.
_KEEPS_S: Final = 0.5
_GIVEN: Final = (
    "%r waits for results of tasks, and others get its slot of %s (this is told once). When it "
    "goes on, both compute there. To take a slot again then, wait under 'with worker_client():'"
)


@contextmanager
def giving_back(worker: Worker, admission: Admission) -> Iterator[None]:
    """While it is open, late tasks go to idle devices, and tasks that wait for tasks hold no slot.

    Its own devices come first; the scheduler knows those of other workers.
    """

    ask_at, told = 0.0, False

    def may_ask(**message: object) -> None:
        nonlocal ask_at
        ask_at = 0.0
        worker.loop.add_callback(look)

    def give_slots_of_waiting(now: float) -> None:
        nonlocal told
        for state in admission.states.values():
            for thread, run in [*state.running.items()]:
                ran_s = now - run.began_at
                if not run.held or ran_s < _KEEPS_S:
                    continue
                if secede_if_waiting(worker, run.key, thread, ran_s):
                    state.grow(state.threads + 1)
                    state.left(thread)
                    if not told:
                        workers_log.warning(_GIVEN, run.key, state.device)
                    told = True

    async def look() -> None:
        nonlocal ask_at
        now = perf_counter()
        if worker.state.ready or any(state.waiting for state in admission.states.values()):
            give_slots_of_waiting(now)
        every = admission.late(now - _LATE_S)
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
