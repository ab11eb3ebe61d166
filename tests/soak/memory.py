"""The growth of processes' memory in a run without faults, beside dask's without this package."""

from __future__ import annotations

import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import dask
import psutil
from distributed import Client, LocalCluster

from dask_devctx import LocalDeviceCluster
from dask_devctx.config.options import LOOK_AHEAD
from tests.soak.batches import Batch
from tests.soak.hosts import DEVICES, LIMIT, MEMORY, WORKERS

# Differences in a process's resident memory below this number of bytes mean nothing.
NOISE = 8 << 20
HOME, WORKER = "client and scheduler", "a worker"
# These histories grow until they are full. Small limits keep them out of the measurement.
SHORT_HISTORIES = {
    "devctx.history": 100,
    "distributed.admin.low-level-log-length": 100,
    "distributed.admin.log-length": 100,
    "distributed.scheduler.dashboard.tasks.task-stream-length": 100,
    "distributed.diagnostics.computations.max-history": 10,
    "distributed.worker.profile.enabled": False,  # it keeps samples of an hour
}


class Samples:
    """Resident memory of processes, as (tasks done so far, bytes) of each."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)

    def look(self, name: str, pids: Iterable[int | None], tasks: int) -> None:
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                if pid is not None:  # it is being started
                    self._of[name, pid].append((tasks, psutil.Process(pid).memory_info().rss))

    def summary(self) -> dict[str, dict[str, float]]:
        """Return, for each name, MiB after the warm-up and at the end, and bytes for each task.

        The first half of each process's life is its warm-up.
        """
        found: dict[str, dict[str, float]] = {}
        for name in {name for name, _ in self._of}:
            lives = [life[len(life) // 2 :] for (own, _), life in self._of.items() if own == name]
            lives = [life for life in lives if len(life) > 1]
            if lives:
                found[name] = {
                    "before": statistics.median(life[0][1] for life in lives) / 2**20,
                    "after": statistics.median(life[-1][1] for life in lives) / 2**20,
                    "a task": statistics.median(slope(life) for life in lives),
                }
        return found


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the median of the slopes of all pairs of points; a few jumps do not change it.

    >>> slope([(0, 1), (1, 3), (2, 99), (3, 7)])
    2.0
    """
    pairs = itertools.combinations(points, 2)
    return float(statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] > a[0]))


def grown(
    ours: Mapping[str, Any], plain: Mapping[str, Any], tasks: int, most: int
) -> Iterable[tuple[str, bool]]:
    """Yield a line for each kind of process, and whether it grew by too much."""
    for name in (HOME, WORKER):
        here, there = ours[name], plain[name]
        more = (here["a task"] - there["a task"]) * tasks
        yield (
            f"  {name}: {here['before']:.0f} MiB after the warm-up, {here['after']:.0f} at the "
            f"end, {here['a task']:.0f} bytes a task; without this package {there['before']:.0f}, "
            f"{there['after']:.0f}, {there['a task']:.0f}",
            more > max(most * tasks, NOISE),
        )


def compare(given: Sequence[str], tasks: int, most: int) -> bool:
    """Run the calm part with and without this package; return whether memory grew by too much."""
    with ThreadPoolExecutor(2) as pool:
        calm = ["--tasks", str(tasks)]
        ours, plain = pool.map(
            lambda mode: _elsewhere([*given, *calm, "--mode", mode]), ("calm", "plain")
        )
    done = min(ours["tasks"], plain["tasks"])
    print(f"memory with {ours['tasks']} tasks, {plain['tasks']} without this package, no faults:")
    found = list(grown(ours, plain, done // 2, most))
    for line, _ in found:
        print(line)
    for place in ours.get("traced", ()):
        print(f"  {place}")
    return any(more for _, more in found)


def _elsewhere(arguments: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def run(arguments: Namespace) -> dict[str, Any]:
    """Run batches without faults, with or without this package; return the summary of memory."""
    plain = arguments.mode == "plain"
    samples, traced = Samples(), []
    common = {"n_workers": WORKERS, "dashboard_address": ":0", "silence_logs": logging.CRITICAL}
    settings = {
        **SHORT_HISTORIES,
        "devctx.simulated-devices": DEVICES,
        "devctx.simulated-memory": MEMORY,
        "devctx.simulated-host": f"soak{os.getpid()}",
    }
    with dask.config.set(settings):
        if plain:
            threads = LOOK_AHEAD * DEVICES // WORKERS  # dask sends as many tasks
            cluster = LocalCluster(threads_per_worker=threads, **common)
        else:
            cluster = LocalDeviceCluster(device_memory_limit=LIMIT, **common)
        with cluster, Client(cluster) as client:
            done, until = 0, time.monotonic() + arguments.minutes * 60
            for number in itertools.count():
                batch = Batch(
                    arguments.seed,
                    number,
                    arguments.batch,
                    guilty=0,
                    plain=plain,
                    calm=True,
                    devices=DEVICES,
                )
                batch.submit(client)
                outcomes = {outcome for _, outcome, _ in batch.check(arguments.patience)}
                assert outcomes == {"right"}, outcomes
                batch.release()
                done += batch.size
                samples.look(HOME, [os.getpid()], done)
                samples.look(WORKER, [nanny.pid for nanny in cluster.workers.values()], done)
                if (
                    arguments.trace
                    and done >= arguments.tasks // 2
                    and not tracemalloc.is_tracing()
                ):
                    client.run(trace)
                    trace()
                if done >= arguments.tasks or time.monotonic() > until:
                    break
            if arguments.trace:
                traced = ["client and scheduler:", *trace()]
                for worker, places in client.run(trace).items():
                    traced += [f"{worker}:", *places]
    return {**samples.summary(), "tasks": done, "traced": traced}


_before: list[Any] = []


def trace() -> list[str]:
    """Begin to count this process's allocations; the second time, name those that stayed."""
    if not tracemalloc.is_tracing():
        tracemalloc.start(4)
        return []
    stayed = tracemalloc.take_snapshot().statistics("traceback")
    return [
        f"{one.size} bytes, {one.count} blocks: " + " < ".join(reversed(one.traceback.format()))
        for one in stayed[:8]
    ]
