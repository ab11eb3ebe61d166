"""dask's own scheduler, with stand-ins for workers: they join, announce devices, and do nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import dask
from dask._task_spec import Task
from distributed import Scheduler, SchedulerPlugin
from distributed.comm import CommClosedError
from distributed.metrics import time as now

from dask_devctx.scheduler.messages import ANNOUNCE, PROTOCOL
from dask_devctx.scheduler.routing import DeviceRouting

N_DEVICES = 8
# dask reads these metrics when a worker joins.
METRICS: dict[str, Any] = {
    "bandwidth": {"total": 1e8, "workers": {}, "types": {}},
    "digests_total_since_heartbeat": {},
    "event_loop_interval": 0.02,
    "memory": 0,
    "spilled_bytes": {"memory": 0, "disk": 0},
    "transfer": {},
    "managed_bytes": 0,
}


@contextlib.contextmanager
def scale(n_workers: int, n_tasks: int, naming: str) -> Iterator[Scale]:
    loop = asyncio.new_event_loop()  # never closed: a thousand workers leave slowly
    made = Scale(n_workers, n_tasks, naming, loop)
    for cluster in made.clusters.values():
        loop.run_until_complete(cluster.start())
    yield made


class _Nothing(SchedulerPlugin):  # type: ignore[misc]
    """A plugin that does nothing, in place of the routing."""


class StandInComm:
    """A worker's connection, which accepts all messages and sends nothing until it is closed."""

    peer_address = local_address = "tcp://stand-in"
    name = "stand-in"

    def __init__(self) -> None:
        self.joined = asyncio.Event()
        self._over = asyncio.Event()

    async def write(self, msg: object, **kwargs: object) -> int:
        self.joined.set()
        return 0

    async def read(self, **kwargs: object) -> object:
        await self._over.wait()
        raise CommClosedError

    def closed(self) -> bool:
        return self._over.is_set()

    async def close(self) -> None:
        self._over.set()

    def abort(self) -> None:
        self._over.set()


class _Cluster:
    """A scheduler whose workers are stand-ins.

    Parameters
    ----------
    plugin
        What is timed.
    """

    def __init__(self, plugin: SchedulerPlugin, n_workers: int, n_tasks: int, naming: str) -> None:
        self.plugin = plugin
        self._n_workers, self._n_tasks, self._naming = n_workers, n_tasks, naming
        self._numbers = itertools.count()
        self._connections: dict[str, tuple[StandInComm, asyncio.Task[None]]] = {}
        self._keys_used = itertools.count()
        self._keys: list[tuple[str, int]] = []

    async def start(self) -> None:
        quiet = {
            "distributed.scheduler.active-memory-manager.start": False,
            "distributed.scheduler.work-stealing": False,
        }
        with dask.config.set(quiet):
            self._scheduler = await Scheduler(
                host="127.0.0.1", port=0, dashboard=False, dashboard_address=":0", validate=False
            )
        await self.plugin.start(self._scheduler)
        for _ in range(self._n_workers):
            await self.join()
        # This class calls the plugin for all timed events, and dask calls it for the rest.
        self._scheduler.plugins[DeviceRouting.name] = self.plugin

    async def join(self, number: int | None = None) -> _Joined:
        """Let a new worker join and announce its devices, or the worker of a number again."""
        number = next(self._numbers) if number is None else number
        address = _address(number)
        comm = StandInComm()
        all_started = time.thread_time()
        timed = _Timed(self.plugin)
        self._scheduler.plugins[DeviceRouting.name] = timed
        connection = asyncio.ensure_future(
            self._scheduler.add_worker(
                comm,
                address=address,
                status="running",
                server_id=address,
                nthreads=64,
                name=address,
                resolve_address=False,
                now=now(),
                resources={},
                memory_limit=2**40,
                metrics=METRICS,
                services={},
                local_directory="",
                versions={},
                nanny="",
                extra={},
                stimulus_id="benchmark",
            )
        )
        # An error in the stand-in ends it before it has joined.
        waiting = asyncio.ensure_future(comm.joined.wait())
        await asyncio.wait([waiting, connection], return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            await connection
        self._connections[address] = comm, connection
        self._scheduler.plugins[DeviceRouting.name] = self.plugin
        handler = self._scheduler.handlers.get(ANNOUNCE)
        started = time.thread_time()
        if handler is not None:
            handler(address=address, **announcement(number))
        stopped = time.thread_time()
        return _Joined(number, timed.spent_s + stopped - started, stopped - all_started)

    async def leave(self, number: int) -> float:
        """Let a worker leave; return the plugin's time."""
        address = _address(number)
        timed = _Timed(self.plugin)
        self._scheduler.plugins[DeviceRouting.name] = timed
        await self._scheduler.remove_worker(address, stimulus_id="benchmark", expected=True)
        self._scheduler.plugins[DeviceRouting.name] = self.plugin
        comm, connection = self._connections.pop(address)
        comm.abort()
        await connection
        return timed.spent_s

    def add_tasks(self, names: Iterable[object]) -> None:
        """Give it tasks that name these devices in turn."""
        # New keys each time: dask would merge tasks with old keys into those that it knows.
        self._keys = [("waits", next(self._keys_used)) for _ in range(self._n_tasks)]
        for key, name in zip(self._keys, names, strict=False):
            ts = self._scheduler.new_task(key, Task(key, sum, ()), "released")
            ts.annotations = {"device": name}
            ts.priority = (0, 0, key[1])

    def note(self) -> float:
        """Announce the tasks to the plugin, and return its time."""
        tasks = self._scheduler.tasks
        devices = {key: tasks[key].annotations["device"] for key in self._keys}
        started = time.thread_time()
        self.plugin.update_graph(
            self._scheduler,
            client="benchmark",
            keys=set(self._keys),
            tasks=self._keys,
            annotations={"device": devices},
            priority={},
            stimulus_id="benchmark",
        )
        return time.thread_time() - started

    def submit(self) -> float:
        """Give it tasks that name its devices in turn, and return the plugin's time."""
        names: list[object] = list(range(N_DEVICES))
        if self._naming == "UUIDs":
            names = [uuid for number in range(self._n_workers) for uuid in _uuids(number)]
        self.add_tasks(itertools.cycle(names))
        return self.note()

    def submit_waiting(self, number: int) -> None:
        """Give it ready tasks that can run only on a worker that is not there."""
        scheduler = self._scheduler
        self.add_tasks(itertools.repeat(_uuids(number)[0]))
        if type(self.plugin) is _Nothing:  # dask's own way
            for key in self._keys:
                scheduler.tasks[key].worker_restrictions = {_address(number)}
        self.note()
        scheduler.transitions(dict.fromkeys(self._keys, "waiting"), "benchmark")
        assert len(scheduler.unrunnable) == self._n_tasks

    def forget(self) -> None:
        """Take the tasks back."""
        self._scheduler.transitions(dict.fromkeys(self._keys, "forgotten"), "benchmark")


class _Timed(SchedulerPlugin):  # type: ignore[misc]
    """Adds up the time that a plugin's hooks take."""

    def __init__(self, plugin: SchedulerPlugin) -> None:
        self._plugin = plugin
        self.spent_s = 0.0

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        started = time.thread_time()
        self._plugin.add_worker(scheduler, worker)
        self.spent_s += time.thread_time() - started

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        started = time.thread_time()
        self._plugin.remove_worker(scheduler, worker, **kwargs)
        self.spent_s += time.thread_time() - started

    def transition(self, *args: Any, **kwargs: Any) -> None:
        self._plugin.transition(*args, **kwargs)


class Scale:
    """Two clusters of one size: one with the routing, one with a plugin that does nothing."""

    def __init__(
        self, n_workers: int, n_tasks: int, naming: str, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._run = loop.run_until_complete
        self._n_tasks = n_tasks
        self.clusters = {
            True: _Cluster(DeviceRouting(), n_workers, n_tasks, naming),
            False: _Cluster(_Nothing(), n_workers, n_tasks, naming),
        }

    def submit(self, routing: bool) -> float:
        """Return the seconds for each of many tasks that name a device."""
        cluster = self.clusters[routing]
        spent_s = cluster.submit()
        cluster.forget()
        return spent_s / self._n_tasks

    def join(self, routing: bool) -> float:
        """Return the seconds for a worker that joins while many tasks wait for other workers."""
        return self._run(self._join_and_leave(self.clusters[routing]))[0]

    def leave(self, routing: bool) -> float:
        """Return the seconds for a worker that leaves."""
        return self._run(self._join_and_leave(self.clusters[routing]))[1]

    async def _join_and_leave(self, cluster: _Cluster) -> tuple[float, float]:
        cluster.submit()
        joined = await cluster.join()
        leave_s = await cluster.leave(joined.number)
        cluster.forget()
        return joined.plugin_s, leave_s

    def awaited(self, routing: bool) -> float:
        """Return the seconds, dask's included, for a worker that joins and many tasks wait for."""
        return self._run(self._join_awaited(self.clusters[routing]))

    async def _join_awaited(self, cluster: _Cluster) -> float:
        joined = await cluster.join()
        await cluster.leave(joined.number)
        cluster.submit_waiting(joined.number)  # it may be restarting
        joined = await cluster.join(joined.number)
        cluster.forget()
        await cluster.leave(joined.number)
        return joined.all_s


class _Joined(NamedTuple):
    """A worker that has joined, the plugin's time for it, and the scheduler's in all."""

    number: int
    plugin_s: float
    all_s: float


def _address(number: int) -> str:
    return f"tcp://10.{number >> 16}.{number >> 8 & 255}.{number & 255}:4000"


def announcement(number: int) -> dict[str, Any]:
    """Return the announcement of a worker with eight devices."""
    uuids = _uuids(number)
    seen = [(uuid, f"0000:{n:02x}:00.0") for n, uuid in enumerate(uuids)]
    return {"protocol": PROTOCOL, "seen": seen, "used": dict.fromkeys(uuids, 2**34)}


def _uuids(number: int) -> list[str]:
    return [
        f"GPU-{(number * N_DEVICES + n) * 2654435761 % 2**32:08x}-0000-0000-0000-{number:012x}"
        for n in range(N_DEVICES)
    ]
