"""A cluster that has faults while it works, and the outcomes of its tasks."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import dask
import psutil
from distributed import Client
from distributed.utils import open_port

from dask_devctx import LocalDeviceCluster
from tests.soak import tasks
from tests.soak.batches import GUILTY, Batch, Hang, Restarted
from tests.soak.hosts import (
    DEVICES,
    LIMIT,
    MEMORY,
    WORKERS,
    Faults,
    Host,
    Scheduler,
    can_cut,
    network,
)

ROOT = Path(__file__).parents[2]
SETTINGS = {
    # Innocent tasks lose their workers again and again here.
    "distributed.scheduler.allowed-failures": 1000,
    "distributed.comm.timeouts.tcp": "15 s",
    "distributed.comm.timeouts.connect": "15 s",
    "distributed.scheduler.worker-ttl": "60 s",
    "distributed.scheduler.idle-timeout": "10 minutes",  # if nobody ends it
    "distributed.admin.log-format": "%(asctime)s %(name)s %(levelname)s %(message)s",
    # Tasks name devices of workers that take long to start again.
    "devctx.missing-device-timeout": "180 s",
    # Nobody looks at these, and they take a part of each second of a processor.
    "distributed.worker.profile.enabled": False,
    "distributed.worker.memory.monitor-interval": "1 s",
}
RIGHT = {"right", "found"}


class Soak:
    """One run: a cluster, its faults, and the outcomes of the tasks."""

    def __init__(self, arguments: argparse.Namespace, place: Path) -> None:
        self.arguments, self.place = arguments, place
        self.cut = not (arguments.loopback or arguments.gpus) and can_cut()
        self.ended = False
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.again = 0
        self.submitted_at: dict[Batch, int] = {}  # the scheduler's starts until then
        self.began = time.monotonic()
        self._said = (self.began, 0)

    @property
    def done(self) -> int:
        return self.outcomes.total()

    @contextmanager
    def cluster(self) -> Iterator[None]:
        env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        for key, value in SETTINGS.items():
            env[f"DASK_{key.replace('.', '__').replace('-', '_').upper()}"] = str(value)
        arguments = self.arguments
        with ExitStack() as steps:
            enter = steps.enter_context
            ip, hosts = enter(network(1 if arguments.gpus else arguments.hosts, self.cut))
            self.scheduler = enter(closing(Scheduler(ip, open_port(ip), self.place, env)))
            options = {"devices": arguments.devices, "gpus": arguments.gpus}
            self.hosts = [
                enter(closing(Host(n, at, self.scheduler.address, self.place, env, **options)))
                for n, at in enumerate(hosts)
            ]
            self.client = Client(self.scheduler.address, timeout=120)
            steps.callback(lambda: self.client.close(timeout=5))
            self._wait_for_workers(180)
            self.faults = enter(closing(Faults(arguments.seed, self.scheduler, self.hosts)))
            yield

    def _wait_for_workers(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while len(self.client.nthreads()) < WORKERS * len(self.hosts):
            for program in (one for host in self.hosts for one in host.programs):
                assert not program.refused, program.refused
            if time.monotonic() > until:
                raise TimeoutError(f"not all workers are there after {timeout:.0f} s")
            time.sleep(0.1)

    def run(self) -> None:
        """Run batches, some at a time, until there are enough tasks or the time is over."""
        arguments = self.arguments
        self.faults.begin(arguments.faults)
        self.began = time.monotonic()
        until = self.began + arguments.minutes * 60
        pending: deque[Batch] = deque()
        number = submitted = 0
        while True:
            more = submitted < arguments.tasks and time.monotonic() < until and not self.ended
            if not pending and not more:
                break
            if more and len(pending) < arguments.under_way:
                given = arguments.batch, arguments.devices, arguments.guilty
                batch = Batch(arguments.seed, number, *given)
                self._submit(batch)
                pending.append(batch)
                number, submitted = number + 1, submitted + batch.size
                continue
            batch = pending.popleft()
            for _ in range(20):
                if self._check(batch):
                    break
                self._connect()
                for one in (batch, *pending):  # the scheduler forgot them all
                    self._submit(one)
            else:
                self.outcomes["batch", "lost"] += batch.size
            batch.release()
            del self.submitted_at[batch]
            self._tell_progress()

    def _submit(self, batch: Batch) -> None:
        self.submitted_at[batch] = self.scheduler.starts
        batch.submit(self.client)

    def _check(self, batch: Batch) -> bool:
        """Count the outcomes of a batch; return False if it has to be submitted again."""
        found: Counter[tuple[str, str]] = Counter()
        found["array", "right"] = batch.arrays

        def is_lost() -> bool:
            return self.submitted_at[batch] != self.scheduler.starts

        try:
            for kind, outcome, words in batch.check(self.arguments.patience, is_lost):
                found[kind, outcome] += 1
                if words:
                    print(f"{outcome}: {kind} {words}", flush=True)
        except Restarted as error:
            time.sleep(1)
            self.again += 1
            if not is_lost():
                self.outcomes["result", "lost"] += 1
                print(f"lost: {error.__cause__!r}", flush=True)
            return False
        except Hang as hang:
            print(f"hang: {hang}", flush=True)
            with suppress(Exception):
                stacks = self.client.call_stack()
                print(json.dumps({str(w): list(map(str, of)) for w, of in stacks.items()})[:4000])
            self.outcomes["batch", "hang"] += batch.size
            return True
        self.outcomes += found
        return True

    def _connect(self) -> None:
        """Have a new client of the scheduler that was restarted, once the workers are there.

        A task may name a device. It fails if no worker has had this device yet.
        """
        for _ in range(10):
            with suppress(Exception):  # such as the one that ended its reconnection
                self.client.close(timeout=5)
            try:
                self.client = Client(self.scheduler.address, timeout=60)
                return self._wait_for_workers(120)
            except Exception as error:
                print(f"after a restart of the scheduler: {error!r}", flush=True)
        raise RuntimeError("no scheduler")

    def _tell_progress(self) -> None:
        then, done = self._said
        now = time.monotonic()
        if now - then > self.arguments.every:
            self._said = (now, self.done)
            bad = sum(n for (_, outcome), n in self.outcomes.items() if outcome not in RIGHT)
            print(
                f"{now - self.began:5.0f} s: {self.done} tasks, "
                f"{(self.done - done) / (now - then):.0f} a second, {bad} not right, "
                f"{self.faults.made.total()} faults, {self.again} batches again",
                flush=True,
            )

    def settle(self) -> dict[str, int]:
        """Return the sums of what is left in the workers, once all of them are there."""
        self.took = time.monotonic() - self.began
        self.faults.close()
        try:
            self._wait_for_workers(180)
            until = time.monotonic() + 60
            while True:
                left: Counter[str] = Counter()
                gc.collect()  # futures that were gathered are in cycles
                for found in self.client.run(tasks.left_in_worker, on_error="ignore").values():
                    left.update(found)
                if not left.total() or time.monotonic() > until:
                    return dict(left)
                time.sleep(0.5)
        except Exception as error:
            print(f"not known what is left: {error!r}", flush=True)
            return {"not known": 1}

    def table(self, left: dict[str, int]) -> bool:
        """Print what happened; return whether all is well."""
        print(
            f"\nseed {self.arguments.seed}: {self.done} tasks in {self.took:.0f} s, "
            f"{self.done / self.took:.0f} a second"
        )
        print(f"{len(self.hosts)} hosts {'with' if self.cut else 'without'} networks of their own")
        for kind in sorted({kind for kind, _ in self.outcomes}):
            counted = {o: n for (own, o), n in sorted(self.outcomes.items()) if own == kind}
            print(f"  {kind:28}" + ", ".join(f"{n} {o}" for o, n in counted.items()))
        guilty = sum(n for (kind, _), n in self.outcomes.items() if kind == GUILTY)
        print("faults:")
        for name, count in [
            *sorted(self.faults.made.items()),
            ("tasks that broke a device", guilty),
        ]:
            print(f"  {name:28}{count}")
        starts = sum(one.starts - 1 for host in self.hosts for one in host.programs)
        print(f"programs of workers started again: {starts}; batches submitted again: {self.again}")
        print(f"left at the end: {left}")
        return not {o for _, o in self.outcomes} - RIGHT and not sum(left.values())


# -- memory

# These histories grow until they are full. Small limits keep them out of the measurement.
SHORT_HISTORIES = {
    "devctx.history": 100,
    "distributed.admin.low-level-log-length": 100,
    "distributed.admin.log-length": 100,
    "distributed.scheduler.dashboard.tasks.task-stream-length": 100,
    "distributed.diagnostics.computations.max-history": 10,
    "distributed.worker.profile.enabled": False,  # it keeps samples of an hour
}


def growth(arguments: argparse.Namespace) -> dict[str, float]:
    """Run batches without faults; return how many bytes a task each kind of process grew by."""
    lives: dict[tuple[str, int], list[tuple[int, int]]] = {}
    settings = {
        **SHORT_HISTORIES,
        "devctx.simulated-devices": DEVICES,
        "devctx.simulated-memory": MEMORY,
        "devctx.simulated-host": f"soak{os.getpid()}",
    }
    with (
        dask.config.set(settings),
        LocalDeviceCluster(
            n_workers=WORKERS, dashboard_address=":0", device_memory_limit=LIMIT
        ) as cluster,
        Client(cluster) as client,
    ):
        done, until = 0, time.monotonic() + arguments.steady_minutes * 60
        for number in itertools.count():
            batch = Batch(arguments.seed, number, 200, DEVICES, 0, calm=True)
            batch.submit(client)
            outcomes = {outcome for _, outcome, _ in batch.check(arguments.patience)}
            assert outcomes == {"right"}, outcomes
            batch.release()
            done += batch.size
            pids = [("client and scheduler", os.getpid())]
            pids += [("a worker", nanny.pid) for nanny in cluster.workers.values()]
            for one in pids:
                held = psutil.Process(one[1]).memory_info().rss
                lives.setdefault(one, []).append((done, held))
            if done >= arguments.steady or time.monotonic() > until:
                break
    found: dict[str, float] = {}
    for (name, _), life in lives.items():
        # The first half of each process's life is its warm-up.
        found[name] = max(slope(life[len(life) // 2 :]), found.get(name, 0.0))
    return found


def slope(points: list[tuple[int, int]]) -> float:
    """Return the median of the slopes of all pairs of points; a few jumps do not change it.

    >>> slope([(0, 1), (1, 3), (2, 99), (3, 7)])
    2.0
    """
    pairs = itertools.combinations(points, 2)
    return float(statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs))
