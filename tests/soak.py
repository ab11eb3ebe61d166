"""Runs many tasks on simulated devices while things break; checks results and leaks.

Run it with ``make soak``. In the workers faults happen at random: a device runs out of memory, a
kernel breaks the process, or the driver refuses to restore the context at the end of a scope. This
process kills the worker. The value of each task is checked. At the end nothing may be left behind.

Memory is compared with a control: the same graph with NumPy on dask without this package, in a
process of its own, whose worker is killed as often. Client and scheduler must not grow more than
the control's. Workers live too briefly for that, so some tasks also run without faults.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import dask
import numpy as np
import psutil
from cuda.bindings.driver import CUresult
from distributed import Client, LocalCluster

from dask_devctx import Device, DevicePlugin, LocalDeviceCluster, driver
from dask_devctx.config.options import LOOK_AHEAD
from dask_devctx.cuda.scope import open_scopes
from dask_devctx.simulated_array import SimulatedArray

LENGTH = 256
# Differences in a process's resident memory below this number of bytes mean nothing.
NOISE = 8 << 20
# How often dask retries a failed task. The task that notices a failure fails, even if it did not
# cause it.
RETRIES = 20


def _machine() -> Any:
    machine = driver.backend().machine
    assert machine is not None
    return machine


def break_something(rates: dict[str, float]) -> None:
    """Inject, at random, a fault that this task meets."""
    faults = _machine().faults
    me = threading.get_ident()

    def mine(*args: Any) -> bool:
        return threading.get_ident() == me

    chance = random.random()
    for fault, rate in rates.items():
        chance -= rate
        if chance < 0:
            if fault == "oom":
                faults.inject("cuMemAlloc", CUresult.CUDA_ERROR_OUT_OF_MEMORY, when=mine)
            elif fault == "sticky":
                faults.poison(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, after_s=random.random() / 100)
            else:
                faults.inject(
                    "cuCtxSetCurrent",
                    CUresult.CUDA_ERROR_INVALID_CONTEXT,
                    when=lambda context: mine() and int(context) == 0,
                )
            return


def make(number: int, rates: dict[str, float]) -> SimulatedArray:
    break_something(rates)
    current = Device.current()
    assert current is not None
    array = SimulatedArray.asarray(np.arange(LENGTH) + number)
    assert array.device is current
    return array


def total(first: SimulatedArray, second: SimulatedArray, rates: dict[str, float]) -> int:
    break_something(rates)
    here = Device.current()
    assert here is not None
    inputs = [one.copy_to(here) for one in (first, second)]
    return int((inputs[0] + inputs[1]).sum())


def make_plain(number: int, rates: dict[str, float]) -> np.ndarray:
    return np.arange(LENGTH) + number


def total_plain(first: np.ndarray, second: np.ndarray, rates: dict[str, float]) -> int:
    return int((first + second).sum())


def expected(number: int) -> int:
    return LENGTH * (LENGTH - 1) + LENGTH * (2 * number + 1)


def left_in_worker() -> dict[str, Any]:
    gc.collect()
    return {
        "used": sum(gpu.used_memory for gpu in _machine().gpus),
        "scopes": len(open_scopes()),
        "threads": threading.active_count(),
    }


class Memory:
    """Samples of processes' resident memory, as (process, tasks done so far, bytes)."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, int, int]] = []

    def look(self, pid: int | None, tasks: int) -> None:
        with suppress(psutil.NoSuchProcess):  # killed just now
            if pid is not None:  # being started
                self.samples.append((pid, tasks, psutil.Process(pid).memory_info().rss))

    def growth(self) -> float:
        """Return bytes per task: the slope over each process's life without its first third."""
        lives = defaultdict(list)
        for pid, tasks, nbytes in self.samples:
            lives[pid].append((tasks, nbytes))
        moved = spread = 0.0
        for life in lives.values():
            tasks, nbytes = np.array(life[len(life) // 3 :], float).T
            tasks = tasks - tasks.mean()
            moved += float(tasks @ nbytes)
            spread += float(tasks @ tasks)
        return moved / spread if spread else 0.0

    def in_mib(self) -> list[int]:
        """Return the memory after a third of the samples, the most, and the last."""
        nbytes = [sample[-1] >> 20 for sample in self.samples]
        return [nbytes[len(nbytes) // 3], max(nbytes), nbytes[-1]]


def kill(cluster: LocalCluster) -> int:
    pids = [nanny.pid for nanny in list(cluster.workers.values()) if nanny.pid]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return len(pids)


def kill_now_and_then(cluster: LocalCluster, every_s: float, stop: threading.Event) -> int:
    killed = 0
    while not stop.wait(every_s or None):
        killed += kill(cluster)
    return killed


def cluster_of(arguments: argparse.Namespace) -> LocalCluster:
    common = {
        "dashboard_address": ":0",
        "silence_logs": False if arguments.verbose else logging.CRITICAL,
    }
    if arguments.plain:
        return LocalCluster(
            n_workers=1,
            threads_per_worker=LOOK_AHEAD * arguments.devices,  # dask sends as many tasks
            **common,
        )
    plugin = DevicePlugin(oom_retries=3, synchronize=arguments.synchronize)
    return LocalDeviceCluster(n_workers=1, plugin=plugin, **common)


def batches(client: Client, arguments: argparse.Namespace) -> Iterator[int]:
    """Run the tasks, with two batches waiting while one runs; yield how many are done."""
    rates = {"oom": arguments.oom, "sticky": arguments.sticky, "restore": arguments.restore}
    first, second = (make_plain, total_plain) if arguments.plain else (make, total)
    batch, end = arguments.batch, arguments.tasks // 2
    right = 0
    pending: deque[tuple[range, list[Any]]] = deque()
    for begin in range(0, end, batch):
        numbers = range(begin, min(begin + batch, end))
        with dask.annotate(retries=RETRIES):
            made = client.map(first, [*numbers, numbers[-1] + 1], rates=rates, pure=False)
            totals = client.map(second, made[:-1], made[1:], rates=rates, pure=False)
        pending.append((numbers, totals))
        del made, totals
        while len(pending) > 2 or (pending and numbers[-1] + 1 == end):
            those, futures = pending.popleft()
            values = client.gather(futures)
            wrong = [n for n, value in zip(those, values, strict=True) if value != expected(n)]
            assert not wrong, f"wrong results: {wrong}"
            right += len(values)
            del futures
            yield 2 * right
    assert right == end


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    home, workers = Memory(), Memory()
    stop = threading.Event()
    started = time.monotonic()
    with cluster_of(arguments) as cluster, Client(cluster) as client:
        killed: list[int] = []
        killer = threading.Thread(
            target=lambda: killed.append(kill_now_and_then(cluster, arguments.kill_every, stop))
        )
        killer.start()
        next_kill = 0.0
        try:
            for done in batches(client, arguments):
                if arguments.kill_times and done >= next_kill:
                    killed.append(kill(cluster))
                    next_kill += arguments.tasks / arguments.kill_times
                home.look(os.getpid(), done)
                for nanny in cluster.workers.values():
                    workers.look(nanny.pid, done)
                if arguments.verbose:
                    print(f"{done} tasks, {time.monotonic() - started:.0f} s", file=sys.stderr)
        finally:
            stop.set()
            killer.join()
        seconds = time.monotonic() - started
        report = {"tasks": done, "seconds": round(seconds, 1), "workers killed": sum(killed)}
        if not arguments.plain:
            report |= what_is_left(client)
    return report | {
        "client and scheduler": {"MiB": home.in_mib(), "bytes per task": home.growth()},
        "workers": {"MiB": workers.in_mib(), "bytes per task": workers.growth()},
    }


def what_is_left(client: Client) -> dict[str, Any]:
    client.wait_for_workers(1, timeout=60)
    events = client.get_events("devctx")
    assert isinstance(events, tuple)
    seen = Counter(event["action"] for _, event in events)
    deadline = time.monotonic() + 10
    while True:
        (left,) = client.run(left_in_worker).values()
        if not left["used"] or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert left["used"] == 0, f"{left['used']} bytes of device memory were not given back"
    assert left["scopes"] == 0
    return {"devices failed": seen["device-failed"], "threads at the end": left["threads"]}


def elsewhere(given: list[str], *more: object) -> dict[str, Any]:
    """Run this module in another process with some arguments changed; return its report."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", *given, *map(str, more), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def grew_more(ours: dict[str, Any], plain: dict[str, Any], where: str, most: int) -> bool:
    """Print how memory grew here and in the control; return whether by too much here."""
    a_task, there = ours[where]["bytes per task"], plain[where]["bytes per task"]
    print(
        f"  {where}: {ours[where]['MiB']} MiB after a third, at most, at the end; {a_task:.0f} "
        f"bytes a task. Control: {plain[where]['MiB']} MiB; {there:.0f} bytes a task"
    )
    return (a_task - there) * ours["tasks"] > max(most * ours["tasks"], NOISE)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument(
        "--kill-every", type=float, default=10.0, metavar="SECONDS", help="0 for never"
    )
    parser.add_argument("--oom", type=float, default=0.01, metavar="SHARE")
    parser.add_argument("--sticky", type=float, default=0.0001, metavar="SHARE")
    parser.add_argument("--restore", type=float, default=0.0001, metavar="SHARE")
    parser.add_argument("--synchronize", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="with the logs")
    parser.add_argument(
        "--steady", type=int, default=20_000, metavar="TASKS", help="more, without faults"
    )
    parser.add_argument(
        "--growth",
        type=int,
        default=256,
        metavar="BYTES",
        help="how much more than the control's memory may grow per task",
    )
    parser.add_argument("--plain", action="store_true", help="dask alone, no faults")
    parser.add_argument("--kill-times", type=int, default=0, metavar="N", help="at even intervals")
    parser.add_argument("--json", action="store_true", help="only print the report")
    given = sys.argv[1:] if given is None else given
    arguments = parser.parse_args(given)
    os.environ[driver.SIMULATED_DEVICES_VARIABLE] = str(arguments.devices)
    settings = {
        "devctx.simulated-devices": arguments.devices,
        # These histories grow until they are full. Small limits keep them out of the measurement.
        "devctx.history": 100,
        "distributed.admin.low-level-log-length": 100,
        "distributed.admin.log-length": 100,
        "distributed.scheduler.dashboard.tasks.task-stream-length": 100,
        "distributed.diagnostics.computations.max-history": 10,
        "distributed.worker.profile.enabled": False,  # it keeps samples of an hour
        "distributed.scheduler.allowed-failures": 100,
        # Without this package dask gives up a worker that is lost twice within this time.
        "distributed.deploy.lost-worker-timeout": "1 hour",
    }
    with dask.config.set(settings):
        report = run(arguments)
    if arguments.json:
        print(json.dumps(report))
        return 0
    kills = report["workers killed"] + report["devices failed"]
    plain = elsewhere(given, "--plain", "--kill-every", 0, "--kill-times", kills)
    for name in ("tasks", "seconds", "workers killed", "devices failed", "threads at the end"):
        print(f"{name}: {report[name]}")
    print(f"memory, compared with dask without this package ({plain['seconds']} seconds):")
    more = grew_more(report, plain, "client and scheduler", arguments.growth)
    calm = ["--tasks", arguments.steady, "--kill-every", 0]
    calm += ["--oom", 0, "--sticky", 0, "--restore", 0]
    with ThreadPoolExecutor(2) as pool:
        report, plain = pool.map(lambda more: elsewhere(given, *calm, *more), ([], ["--plain"]))
    print(f"memory with {report['tasks']} tasks and no faults:")
    for where in ("client and scheduler", "workers"):
        more |= grew_more(report, plain, where, arguments.growth)
    if more:
        print("memory grew by more than the control's")
        return 1
    print("every result right, nothing lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
