"""The savings of one process for all GPUs: time to start, host memory, GPU memory.

Each turn starts a cluster, runs a first task on each GPU, uses one array in host memory on each
GPU, and ends the cluster. Each quantity that is measured meanwhile has a case of its own.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks import field
from benchmarks.case import CannotRunError, Case, Contender, ContenderFailedError, Size
from benchmarks.host import Entry, Host
from dask_devctx import driver

TITLE = "what one process saves"
HOST_ARRAY_VARIABLE = "BENCHMARKS_HOST_ARRAY_GIB"
_HALF = 0.5


@dataclass(frozen=True)
class _Quantity:
    key: str
    name: str
    unit: Any = "B"
    target: float | None = None


def cases(size: Size) -> Iterator[Case]:
    n_devices = field.n_devices()
    nbytes = 2**20 if size.tiny else int(float(os.environ.get(HOST_ARRAY_VARIABLE, 4)) * 2**30)
    module = "benchmarks.subjects.startup_hosted"
    peers, missing = field.dask_cuda(module, n_devices)
    entries = [
        Entry("LocalDeviceCluster", f"{module}:ours", (field.library(), n_devices, 1)),
        *peers,
    ]
    quantities = [
        _Quantity("first_s", f"until a first task is done on each of {n_devices} GPUs", "s", _HALF),
        _Quantity("ready_s", "until the cluster and its client are there", "s"),
        _Quantity("host", "host memory after those first tasks, all processes", target=_HALF),
        _Quantity("host_idle", "host memory before any task, all processes"),
        _Quantity("array", f"host memory for an array of {nbytes / 2**30:.3g} GiB used on each"),
    ]
    if not driver.backend().simulated:
        quantities.append(_Quantity("gpu_idle", "GPU memory before any task, all GPUs"))
        quantities.append(_Quantity("gpu", "GPU memory after those first tasks, all GPUs"))
    runs = [_Starts(entry, nbytes) for entry in entries]
    for place, quantity in enumerate(quantities):
        yield Case(
            f"{quantity.name}{field.where()}",
            per="cluster",
            unit=quantity.unit,
            single=True,
            rounds=None if size.tiny else 3,
            target=None if size.tiny else quantity.target,
            contenders=[
                Contender(
                    run.entry.name,
                    run.measured(quantity.key) if place == 0 else run.again(quantity.key),
                    "peer" if run.entry in peers else "ours",
                )
                for run in runs
            ],
            missing=missing,
        )


class _Starts:
    """All starts of one kind of cluster."""

    def __init__(self, entry: Entry, nbytes: int) -> None:
        self.entry = entry
        self._nbytes = nbytes
        self._done: list[dict[str, float]] = []
        self._next: dict[str, int] = defaultdict(int)

    def measured(self, key: str) -> Callable[[int], float]:
        """Return a contender's ``run`` that starts a cluster for each repetition."""

        def run(count: int) -> float:
            self._done += (self._start() for _ in range(count))
            return sum(done[key] for done in self._done[-count:])

        return run

    def again(self, key: str) -> Callable[[int], float]:
        """Return a ``run`` that gives another quantity of the same starts, in their order."""

        def run(count: int) -> float:
            place = self._next[key]
            self._next[key] += count
            if place + count > len(self._done):
                raise ContenderFailedError("its cluster did not start: see the first case")
            return sum(done[key] for done in self._done[place : place + count])

        return run

    def _start(self) -> dict[str, float]:
        before = _gpu_used()
        host = Host("benchmarks.subjects.startup_hosted:waiting", self.entry.factory)
        try:
            found: dict[str, float] = {}
            ready_s = host.call("start", *self.entry.args, timeout_s=90)
            found["gpu_idle"] = _gpu_used() - before
            found["host_idle"] = _host_used(host.pid)
            found["ready_s"] = ready_s
            found["first_s"] = ready_s + host.call("touch_all")
            found["gpu"] = _gpu_used() - before
            found["host"] = without_array = _host_used(host.pid)
            host.call("use_array", self._nbytes, timeout_s=120)
            found["array"] = max(_host_used(host.pid) - without_array, 0)
            return found
        finally:
            host.close()


def _host_used(pid: int) -> int:
    """Return the bytes of a process and its descendants; shared memory counts once."""
    root = psutil.Process(pid)
    total = 0
    for process in (root, *root.children(recursive=True)):
        try:
            memory = process.memory_full_info()
        except psutil.NoSuchProcess:
            continue
        total += getattr(memory, "pss", memory.uss)  # only Linux has the proportional size
    return total


def _gpu_used() -> int:
    nvml = driver.backend().nvml
    try:
        nvml.nvmlInit()
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return sum(nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles)
    except Exception as error:  # NVML has many errors
        raise CannotRunError(f"NVML does not tell the memory in use: {error}") from error
