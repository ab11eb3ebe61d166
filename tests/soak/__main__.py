"""The command ``python -m tests.soak``."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import dask
from distributed import Client
from distributed.exceptions import WorkerStartTimeoutError
from distributed.utils import open_port

import dask_devctx
from tests.soak import __doc__ as about
from tests.soak import memory, tasks
from tests.soak.batches import GUILTY, Batch, Hang, Restarted
from tests.soak.faults import Faults
from tests.soak.hosts import WORKERS, Host, Scheduler, can_cut, network

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
}
RIGHT = {"right", "found"}


class Soak:
    """One run: a cluster, its faults, and the outcomes of the tasks."""

    def __init__(self, arguments: argparse.Namespace, place: Path) -> None:
        self.arguments, self.place = arguments, place
        self.gpus: bool = arguments.gpus
        self.cut = not (arguments.loopback or self.gpus) and can_cut()
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.again = 0
        self.submitted_at: dict[Batch, int] = {}  # the scheduler's starts until then
        self.samples = memory.Samples()
        self.began = time.monotonic()
        self._said = self.began

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
        with ExitStack() as steps:
            ip, hosts = steps.enter_context(
                network(1 if self.gpus else self.arguments.hosts, self.cut)
            )
            enter = steps.enter_context
            self.scheduler = enter(closing(Scheduler(ip, open_port(ip), self.place, env)))
            address = self.scheduler.address
            self.hosts = [
                enter(
                    closing(Host(number, own, address, self.place, env, *reached, gpus=self.gpus))
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
        """Run batches, with two under way, until there are enough tasks or the time is over."""
        arguments = self.arguments
        until = time.monotonic() + arguments.minutes * 60
        pending: deque[Batch] = deque()
        number = submitted = 0
        while True:
            more = submitted < arguments.tasks and time.monotonic() < until
            if not pending and not more:
                break
            if more and len(pending) < 3:
                batch = Batch(
                    arguments.seed, number, arguments.batch,
                    guilty=arguments.guilty, plain=False, calm=False,
                )  # fmt: skip
                self._submit(batch)
                pending.append(batch)
                self.faults.begin(number, 10.0)
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
        found["made", "right"] = batch.size // 3  # each of them is in a sum

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
        if time.monotonic() - self._said > self.arguments.every:
            self._said = time.monotonic()
            seconds = self._said - self.began
            bad = sum(n for (_, outcome), n in self.outcomes.items() if outcome not in RIGHT)
            print(
                f"{seconds:5.0f} s: {self.done} tasks, {bad} not right, "
                f"{sum(self.faults.made.values())} faults, {self.again} batches again",
                flush=True,
            )

    def settle(self) -> dict[str, int]:
        """Return the sums of what is left in the workers, once all of them are there."""
        self.faults.close()
        self.client.wait_for_workers(WORKERS * len(self.hosts), timeout=180)
        until = time.monotonic() + 60
        while True:
            left: Counter[str] = Counter()
            gc.collect()  # futures that were gathered are in cycles
            for found in self.client.run(tasks.left_in_worker, on_error="ignore").values():
                left.update(found)
            if not left.total() or time.monotonic() > until:
                return dict(left)
            time.sleep(0.5)

    def table(self, left: dict[str, int]) -> bool:
        """Print what happened; return whether all is well."""
        seconds = time.monotonic() - self.began
        print(f"\nseed {self.arguments.seed}: {self.done} tasks in {seconds:.0f} s")
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
        print("values moved, by ways:")
        report, moved = dask_devctx.report(self.client), Counter[str]()
        for row in report.transfers:
            moved[row.way] += row.copies
        moved["spill"] = sum(row.spills for row in report.devices)
        moved["back"] = sum(row.unspills for row in report.devices)
        print("  " + ", ".join(f"{way}: {count}" for way, count in sorted(moved.items())))
        print(f"left at the end: {left}")
        for name, found in sorted(self.samples.summary().items()):
            print(f"  {name}: {found['after']:.0f} MiB, {found['a task']:.0f} bytes a task")
        bad = {o for _, o in self.outcomes} - RIGHT
        return not bad and not sum(left.values())


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=1e6, help="end after this time")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--batch", type=int, default=200, metavar="TASKS")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--loopback", action="store_true", help="no networks, even if root")
    parser.add_argument("--gpus", action="store_true", help="one host, four real GPUs, with CuPy")
    parser.add_argument("--faults", type=float, default=1.0, help="so many times as often as usual")
    parser.add_argument("--guilty", type=float, default=0.3, help="such tasks in a batch")
    parser.add_argument("--patience", type=float, default=240.0, metavar="SECONDS")
    parser.add_argument("--every", type=float, default=30.0, metavar="SECONDS", help="of progress")
    parser.add_argument("--logs", type=Path, help="a directory that keeps the programs' output")
    parser.add_argument("--steady", type=int, default=20_000, help="tasks without faults; 0: none")
    parser.add_argument("--growth", type=int, default=256, help="bytes a task beside dask's own")
    parser.add_argument("--trace", action="store_true", help="name the memory that stayed")
    parser.add_argument("--mode", choices=["faults", "calm", "plain"], default="faults")
    arguments = parser.parse_args(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.seed is None:
        arguments.seed = random.randrange(2**16)
    if arguments.mode != "faults":
        print(json.dumps(memory.run(arguments)))
        return 0
    well = True
    if arguments.tasks:
        with tempfile.TemporaryDirectory() as temporary, dask.config.set(SETTINGS):
            if arguments.logs:
                arguments.logs.mkdir(parents=True, exist_ok=True)
            soak = Soak(arguments, arguments.logs or Path(temporary))
            with soak.cluster():
                soak.run()
                well = soak.table(soak.settle())
    if arguments.steady:
        with tempfile.TemporaryDirectory() as locks:
            os.environ["DASK_DEVCTX__LOCK_DIRECTORY"] = locks
            given = ["--seed", str(arguments.seed), "--batch", str(arguments.batch)]
            given += ["--trace"] * arguments.trace
            if memory.compare(given, arguments.steady, arguments.growth):
                print("memory grew by more than dask's own")
                well = False
    print("every result right, nothing lost" if well else "not all is well: see above")
    return int(not well)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
