"""A cluster that has faults while it works, and the outcomes of its tasks."""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from distributed import Client
from distributed.exceptions import WorkerStartTimeoutError
from distributed.utils import open_port

import dask_devctx
from tests.soak import memory, tasks
from tests.soak.batches import Batch, Hang, Restarted
from tests.soak.choices import GUILTY
from tests.soak.faults import Faults
from tests.soak.hosts import WORKERS, Host, Scheduler, can_cut, network
from tests.soak.owners import owners

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
        self.samples = memory.Samples()
        self.began = time.monotonic()
        self._said = (self.began, 0)

    @property
    def done(self) -> int:
        return self.outcomes.total()

    @contextmanager
    def cluster(self) -> Iterator[None]:
        env = {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            **{
                f"DASK_{key.replace('.', '__').replace('-', '_').upper()}": str(value)
                for key, value in SETTINGS.items()
            },
        }
        arguments = self.arguments
        with ExitStack() as steps:
            ip, hosts = steps.enter_context(
                network(1 if arguments.gpus else arguments.hosts, self.cut)
            )
            enter = steps.enter_context
            self.scheduler = enter(closing(Scheduler(ip, open_port(ip), self.place, env)))
            address = self.scheduler.address
            self.hosts = [
                enter(
                    closing(
                        Host(
                            number,
                            own,
                            address,
                            self.place,
                            env,
                            *reached,
                            devices=arguments.devices,
                            gpus=arguments.gpus,
                        )
                    )
                )
                for number, (own, *reached) in enumerate(hosts)
            ]
            self.faults = Faults(
                self.arguments.seed, self.scheduler, self.hosts, self.arguments.faults
            )
            self.client = Client(self.scheduler.address, timeout=120)
            steps.callback(lambda: self.client.close(timeout=5))
            self.client.wait_for_workers(WORKERS * len(self.hosts), timeout=180)
            steps.enter_context(closing(self.faults))
            yield

    def run(self) -> None:
        """Run batches, some at a time, until there are enough tasks or the time is over."""
        arguments = self.arguments
        self.faults.begin()
        self.began = time.monotonic()
        until = self.began + arguments.minutes * 60
        pending: deque[Batch] = deque()
        number = submitted = 0
        while True:
            more = submitted < arguments.tasks and time.monotonic() < until and not self.ended
            if not pending and not more:
                break
            if more and len(pending) < arguments.under_way:
                batch = Batch(
                    arguments.seed, number, arguments.batch,
                    guilty=arguments.guilty, plain=False, calm=False, devices=arguments.devices,
                )  # fmt: skip
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
            self._look()

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
            self._tell_state()
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
                self.client.wait_for_workers(WORKERS * len(self.hosts), timeout=120)
                return
            except WorkerStartTimeoutError as error:
                print(f"after a restart of the scheduler: {error}", flush=True)
                return
            except Exception as error:
                print(f"the client could not connect: {error!r}", flush=True)
        raise RuntimeError("no scheduler")

    def _tell_state(self) -> None:
        try:
            waiting = self.client.processing()
            print(f"processing: { {w: len(keys) for w, keys in waiting.items()} }")
            stacks = self.client.call_stack()
            print(json.dumps({str(w): list(map(str, of)) for w, of in stacks.items()})[:4000])
        except Exception as error:
            print(f"no state: {error!r}", flush=True)

    def _look(self) -> None:
        """Note the memory of the processes, and say now and then how far it is."""
        self.samples.look("the client", [os.getpid()], self.done)
        self.samples.look("the scheduler", [self.scheduler.process.pid], self.done)
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
            self.client.wait_for_workers(WORKERS * len(self.hosts), timeout=180)
            return self._left()
        except Exception as error:
            print(f"not known what is left: {error!r}", flush=True)
            return {"not known": 1}

    def _left(self) -> dict[str, int]:
        until = time.monotonic() + 60
        while True:
            left: Counter[str] = Counter()
            gc.collect()  # futures that were gathered are in cycles
            for found in self.client.run(tasks.left_in_worker, on_error="ignore").values():
                left.update(found)
            if not left.total():
                return dict(left)
            if time.monotonic() > until:
                self._tell_owners()
                return dict(left)
            time.sleep(0.5)

    def _tell_owners(self) -> None:
        for worker, found in self.client.run(owners, on_error="ignore").items():
            for line in found:
                print(f"{worker}: {line}")

    def table(self, left: dict[str, int]) -> bool:
        """Print what happened; return whether all is well."""
        print(
            f"\nseed {self.arguments.seed}: {self.done} tasks in {self.took:.0f} s, "
            f"{self.done / self.took:.0f} a second"
        )
        print(f"{len(self.hosts)} hosts {'with' if self.cut else 'without'} networks of their own")
        kinds = sorted({kind for kind, _ in self.outcomes})
        for kind in kinds:
            counted = {o: n for (own, o), n in sorted(self.outcomes.items()) if own == kind}
            print(f"  {kind:28}" + ", ".join(f"{n} {o}" for o, n in counted.items()))
        print("faults:")
        for name, count in sorted(self.faults.made.items()):
            print(f"  {name:28}{count}")
        guilty = sum(n for (kind, _), n in self.outcomes.items() if kind == GUILTY)
        print(f"  {'tasks that broke a device':28}{guilty}")
        starts = sum(host.starts - WORKERS for host in self.hosts)
        print(f"programs of workers started again: {starts}; batches submitted again: {self.again}")
        self._table_of_moves()
        print(f"left at the end: {left}")
        for name, found in sorted(self.samples.summary().items()):
            print(f"  {name}: {found['after']:.0f} MiB, {found['a task']:.0f} bytes a task")
        bad = {o for _, o in self.outcomes} - RIGHT
        return not bad and not sum(left.values())

    def _table_of_moves(self) -> None:
        """Print how often values went which way, in the workers that are there now."""
        try:
            report = dask_devctx.report(self.client)
        except Exception as error:
            print(f"not known how values moved: {error!r}")
            return
        moved = Counter[str]()
        for row in report.transfers:
            moved[row.transport] += row.copies
        moved["spill"] = sum(row.spills for row in report.devices)
        moved["back"] = sum(row.unspills for row in report.devices)
        print("values moved by the workers of the end, by ways:")
        print("  " + ", ".join(f"{way}: {count}" for way, count in sorted(moved.items())))
