"""A scheduler's messages, transitions and restrictions, and a cluster of local workers."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Final, Self

from dask.utils import parse_bytes
from distributed import LocalCluster, Scheduler, SchedulerPlugin, WorkerPlugin
from distributed.core import Status
from distributed.deploy.spec import SpecCluster
from distributed.metrics import time
from distributed.protocol.pickle import dumps

from dask_devctx.dask_internals.worker import replaced

# A device's tasks run on the device's own threads. So a worker's `nthreads` only limits how many
# tasks dask sends it ahead. If it is small, threads wait for the scheduler; if it is large, results
# pile up before they are used.
LOOK_AHEAD: Final = 8
# The message to a worker with late tasks that another one is idle.
SOME_IDLE: Final = "devctx-some-idle"
# A worker that does not answer within this time is stopped, or a task there keeps the GIL.
_ANSWER_S: Final = 5.0


def registered_plugin(scheduler: Scheduler, name: str) -> object:
    """Return the plugin that all workers get, another object after each registration; or None."""
    return scheduler.worker_plugins.get(name)


def warn_clients(scheduler: Scheduler, text: str) -> None:
    """Let all clients of a scheduler warn, as :meth:`distributed.Worker.warn` of a worker does."""
    scheduler.log_event("warn", {"message": dumps(text), "category": dumps(UserWarning)})


async def ask(scheduler: Scheduler, address: str, op: str, **content: Any) -> Any:
    """Send a message to a worker, and return its answer; raise without one in time."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await getattr(scheduler.rpc(address), op)(**content)
    except TimeoutError as error:
        raise TimeoutError(f"none within {_ANSWER_S:g} s") from error


def resolved(scheduler: Scheduler, address: str) -> str:
    """Return an address as the scheduler writes it."""
    return scheduler.coerce_address(address)  # type: ignore[no-any-return]


def addresses_at(scheduler: Scheduler, host: str) -> set[str]:
    """Return the addresses of the workers on a host."""
    found = scheduler.host_info.get(scheduler.coerce_hostname(host))
    return set(found["addresses"]) if found else set()


def restrict(
    ts: Any, workers: set[str] | None, hosts: Set[str] | None, *, loose: bool = False
) -> None:
    """Restrict a task to certain workers and hosts; ``loose`` makes this a preference.

    An empty set of workers restricts nothing. dask never changes the set: many tasks may share one,
    and a change to it holds for all of them.
    """
    ts.worker_restrictions, ts.host_restrictions = workers, hosts
    ts.loose_restrictions = loose


def restrictions(ts: Any) -> tuple[set[str] | None, set[str] | None, bool]:
    """Return the workers and the hosts that a task is restricted to, and whether loosely."""
    return ts.worker_restrictions, ts.host_restrictions, bool(ts.loose_restrictions)


def annotate(ts: Any, name: str, value: object) -> None:
    """Add an annotation to a task; None removes it."""
    # A new dictionary, because the old one may belong to many tasks.
    annotations = {**(ts.annotations or {}), name: value}
    if value is None:
        del annotations[name]
    ts.annotations = annotations or None


def idle_workers_hear_at_once(scheduler: Scheduler) -> AbstractContextManager[None]:
    """While it is open, a worker with nothing to run gets a task less than 5 ms after a message."""
    send_all, streams = scheduler.send_all, scheduler.stream_comms

    def send(client_msgs: Any, worker_msgs: Any) -> None:
        for address, msgs in worker_msgs.items():
            ws = scheduler.workers.get(address)
            given = "compute-task" in (msgs[0]["op"], msgs[-1]["op"])
            if given and ws is not None:
                stream = streams[address]
                if len(ws.processing) <= len(stream.buffer) + len(msgs):  # none of them is there
                    stream.next_deadline = None
        send_all(client_msgs, worker_msgs)

    return replaced(vars(scheduler), "send_all", send)


def threads_beyond(scheduler: Scheduler, slots: Mapping[str, int]) -> int:
    """Return how many threads workers have beyond their slots, by address."""
    workers = ((scheduler.workers.get(one), n) for one, n in slots.items())
    return sum(max(ws.nthreads - n, 0) for ws, n in workers if ws is not None)


def comparing_slots(scheduler: Scheduler, cluster: Any) -> AbstractContextManager[None]:
    """While it is open, dask compares a group of tasks with inputs with the slots, not the threads.

    It spreads a group of more than twice as many; a smaller one goes where its input is.
    """

    def is_rootish(ts: Any) -> bool:
        nthreads = scheduler.total_nthreads  # it is in a slot
        scheduler.total_nthreads -= cluster.ahead if ts.dependencies else 0
        try:
            return bool(Scheduler.is_rootish(scheduler, ts))
        finally:
            scheduler.total_nthreads = nthreads

    return replaced(vars(scheduler), "is_rootish", is_rootish)


def part_for_idle(late: int, idle: int) -> int:
    """Return how many late tasks go to idle ones, so that each of them gets as many as remain."""
    return math.ceil(late * idle / (idle + 1))


def moved_to_idle(
    scheduler: Scheduler, cluster: Any, address: str, keys: Sequence[Hashable]
) -> list[Hashable]:
    """Send a part of a worker's tasks to idle workers, once it gives them back; return the keys."""
    busy = scheduler.workers.get(address)
    found = ((scheduler.workers.get(one), n) for one, n in cluster.slots.items())
    idle = [ws for ws, n in found if ws and len(ws.processing) - len(ws.long_running) < n]
    most, moved = part_for_idle(len(keys), len(idle)), list[Hashable]()
    for key in keys:
        if len(moved) == most:
            break
        ts = scheduler.tasks.get(key)
        if ts is None or busy is None or ts.processing_on is not busy:
            continue
        ws = idle[len(moved) % len(idle)]
        # To another machine, its inputs may take longer than it waits here.
        far = ws.host != busy.host and scheduler.get_comm_cost(ts, ws) > busy.occupancy
        if not (far or ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions):
            restrict(ts, {ws.address}, None, loose=True)
            moved.append(key)
    cluster.late.add(address)
    return moved


def tell_late(scheduler: Scheduler, cluster: Any, address: str | None) -> None:
    """If a worker has nothing to do, tell the busiest one that had late tasks."""
    ws = scheduler.workers.get(address)
    if ws is None or ws.processing or address not in cluster.present:
        return
    late = [one for one in map(scheduler.workers.get, cluster.late) if one is not None]
    cluster.late = {one.address for one in late if one.processing}
    if cluster.late:
        busy = max(late, key=lambda one: len(one.processing)).address
        cluster.late.remove(busy)
        scheduler.stream_comms[busy].send({"op": SOME_IDLE})


def schedule_again(scheduler: Scheduler, tasks: Iterable[Any]) -> None:
    """Let dask look again for a worker for each task that waits, the most urgent task first."""
    moves: dict[Hashable, str] = {}
    for ts in sorted(tasks, key=attrgetter("priority"), reverse=True):  # dask takes the last first
        if ts.state == "no-worker":
            moves[ts.key] = "processing"
        elif ts.state == "queued" and (ts.worker_restrictions or ts.host_restrictions):
            moves[ts.key] = "released"  # only tasks without restrictions may be queued
    if moves:
        scheduler.transitions(moves, stimulus_id=f"devctx-{time()}")


def has_dashboard(scheduler: Scheduler) -> bool:
    """Return whether a scheduler shows dask's dashboard; without Bokeh there is none."""
    bokeh = sys.modules.get("bokeh.server.tornado")
    http = getattr(scheduler, "http_application", None)
    return bokeh is not None and any(
        isinstance(app, bokeh.BokehTornado) for app in getattr(http, "applications", ())
    )


# -- a cluster of local workers


class WatchedCluster(LocalCluster):  # type: ignore[misc]
    """A ``LocalCluster`` with two plugins from the start, of its scheduler and of its workers.

    ``_scaling`` of the subclass is a context manager, open while workers are started and closed.
    """

    _routing: SchedulerPlugin
    _plugin: WorkerPlugin

    def _workers_for(self, n: int, memory: str | int | None, cores: int | None) -> int:
        """Return how many workers have this memory and these threads together, at least ``n``."""
        if memory is not None:
            n = max(n, math.ceil(parse_bytes(memory) / self._memory_per_worker()))
        return n if cores is None else max(n, math.ceil(cores / self._threads_per_worker()))

    # -- dask's own

    def _update_worker_status(self, op: str, msg: Any) -> None:
        # Some time after a worker was lost, dask closes its nanny if no worker of this name is
        # there at that moment. But the worker may have come back and been lost again just now. A
        # nanny that runs starts another worker by itself, so it stays open.
        if op == "remove":
            if msg not in self.scheduler_info["workers"]:
                return  # dask has newer data from the scheduler, and would stop listening here
            name = self.scheduler_info["workers"][msg]["name"]
            if getattr(self.workers.get(name), "status", None) == Status.running:
                super(SpecCluster, self)._update_worker_status(op, msg)
                return
        super()._update_worker_status(op, msg)

    async def _start(self) -> None:
        await super()._start()
        # Both replace those of the same name, such as one of a preload.
        await self.scheduler.register_scheduler_plugin(self._routing, idempotent=False)
        name, sent = self._plugin.name, dumps(self._plugin)
        await self.scheduler.register_worker_plugin(None, sent, name=name, idempotent=False)

    async def _correct_state_internal(self) -> None:
        closed = [n for n, one in self.workers.items() if one.status is Status.closed]
        for name in closed:  # dask counts them as there, such as the nanny of a retired worker
            del self.workers[name]
        with self._scaling():
            await super()._correct_state_internal()

    def __await__(self) -> Generator[Any, Any, Self]:
        starting = self.status is Status.created  # a client also awaits a cluster that runs
        try:
            return (yield from super().__await__())  # type: ignore[no-any-return]
        except BaseException:
            if starting:
                yield from self._close().__await__()  # dask leaves the others running
            raise
