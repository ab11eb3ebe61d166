"""Tasks that wait long: for a device, while others are idle, or for the results of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from distributed import Status, Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx.dask_internals.scheduler import SOME_IDLE, part_for_idle
from dask_devctx.dask_internals.shuffles import is_barrier
from dask_devctx.dask_internals.worker import let_secede, replaced, waits_for_tasks, workers_log
from dask_devctx.scheduler.messages import LATE
from dask_devctx.worker import registration

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
    """While it is open, late tasks go to idle devices; tasks that wait for tasks hold no slot.

    Tasks that are here at the end need each other's slots, too: these are given back to the last.
    """
    ask_at, told, ended = 0.0, False, False
    since: dict[Any, float] = {}  # when each task was first seen to wait for tasks

    def may_ask(**message: object) -> None:
        nonlocal ask_at
        ask_at = 0.0
        worker.loop.add_callback(look)

    def give_slots_of_waiting(now: float) -> None:
        nonlocal since, told
        before, since = since, {}
        full = len(worker.state.executing) >= worker.state.nthreads
        for state in admission.states.values():
            for thread, run in [*state.running.items()]:
                its = map(admission.states.__getitem__, run.devices if run.held else ())
                needed = run.until or (run.held and full) or any(o.waiting or o.ready for o in its)
                # Others might reserve the same memory: such tasks keep their slots.
                if not needed or run.nbytes or not waits_for_tasks(thread):
                    continue
                since[run] = before.get(run, now)
                if now - since[run] < _KEEPS_S:
                    continue
                admission.give_up(run, keeps_thread=True)
                let_secede(worker, run.key, now - run.began_at)
                say, told = (workers_log.debug if told else workers_log.warning), True
                say(_GIVEN, run.key, state.device)

    async def look() -> None:
        nonlocal ask_at
        give_slots_of_waiting(now := perf_counter())
        if ended:
            stop_if_unused()
            return
        every = admission.late(now - _LATE_S)
        # Where the barrier of a P2P rechunk is scheduled again, dask ends the rechunk.
        late = {one.key: one for one in every if not is_barrier(one.key)}
        idle = sum(not one.tasks for one in admission.states.values())
        keys = [*late][: part_for_idle(len(late), idle)]
        if late and not keys and now >= ask_at:
            ask_at = float("inf")  # the answer may take long
            with suppress(Exception):  # it is asked again
                keys = await registration.tell(worker, LATE, keys=[*late][:_MOST])
            ask_at = 0.0 if keys else now + _AGAIN_S
        for key in keys:
            if admission.withdraw(claim := late[key]):
                claim.call.future.cancel()  # the task is scheduled again
                claim.call = None  # it has the task's inputs

    def stop_if_unused() -> None:
        with admission.lock:  # between the line and its thread, a claim is held
            states = admission.states.values()
            used = any(one.holding or one.running or one.waiting for one in states)
        if not used or worker.status in (Status.closing, Status.closed):
            looking.stop()

    looking = PeriodicCallback(lambda: worker.loop.add_callback(look), _LATE_S * 1000)
    looking.start()
    try:
        with replaced(worker.stream_handlers, SOME_IDLE, may_ask):
            yield
    finally:
        ended = True
        stop_if_unused()
