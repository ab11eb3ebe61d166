"""Many tasks on simulated devices while things break: every result right, nothing lost.

Run as ``make soak``. In the workers, at random: a device runs out of memory, a kernel breaks the
process, the restore on leaving a device is refused; from here: the worker is killed. Each task's
value is checked against what it has to be, memory is measured, and at the end nothing may be left.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import Counter, deque
from typing import Any

import dask
import numpy as np
import psutil
from cuda.bindings.driver import CUresult
from distributed import Client

from dask_devctx import Device, DevicePlugin, LocalDeviceCluster, driver
from dask_devctx.scope import open_scopes
from dask_devctx.simulated_array import SimulatedArray

LENGTH = 256
# So often dask runs a task again that erred. Whoever notices a failure errs, guilty or not.
RETRIES = 20


def _machine() -> Any:
    machine = driver.backend().machine
    assert machine is not None
    return machine


def break_something(rates: dict[str, float]) -> None:
    """Perhaps inject a fault that this task is to meet."""
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


def expected(number: int) -> int:
    return LENGTH * (LENGTH - 1) + LENGTH * (2 * number + 1)


def left_in_worker() -> dict[str, Any]:
    gc.collect()
    return {
        "used": sum(gpu.used_memory for gpu in _machine().gpus),
        "scopes": len(open_scopes()),
        "threads": threading.active_count(),
        "rss": psutil.Process().memory_info().rss,
    }


def worker_rss(cluster: LocalDeviceCluster) -> int:
    """Bytes of the workers' processes; 0 while one is being started."""
    try:
        return sum(psutil.Process(n.pid).memory_info().rss for n in cluster.workers.values())
    except (psutil.NoSuchProcess, TypeError):
        return 0


def kill_now_and_then(cluster: LocalDeviceCluster, every_s: float, stop: threading.Event) -> int:
    killed = 0
    while not stop.wait(every_s):
        for nanny in list(cluster.workers.values()):
            if nanny.pid:
                os.kill(nanny.pid, signal.SIGKILL)
                killed += 1
    return killed


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    rates = {"oom": arguments.oom, "sticky": arguments.sticky, "restore": arguments.restore}
    seen: Counter[str] = Counter()
    rss: list[int] = []
    workers: list[int] = []
    me = psutil.Process()
    stop = threading.Event()
    started = time.monotonic()
    batch = arguments.batch
    with (
        LocalDeviceCluster(
            dashboard_address=":0",
            silence_logs=False if arguments.verbose else logging.CRITICAL,
            plugin=DevicePlugin(oom_retries=3, synchronize=arguments.synchronize),
        ) as cluster,
        Client(cluster) as client,
    ):
        killed: list[int] = []
        killer = threading.Thread(
            target=lambda: killed.append(kill_now_and_then(cluster, arguments.kill_every, stop))
        )
        killer.start()
        right = 0
        pending: deque[tuple[range, list[Any]]] = deque()
        try:
            for begin in range(0, arguments.tasks // 2, batch):
                numbers = range(begin, min(begin + batch, arguments.tasks // 2))
                with dask.annotate(retries=RETRIES):
                    made = client.map(make, [*numbers, numbers[-1] + 1], rates=rates, pure=False)
                    totals = client.map(total, made[:-1], made[1:], rates=rates, pure=False)
                pending.append((numbers, totals))
                del made, totals
                while len(pending) > 2 or (pending and numbers[-1] + 1 == arguments.tasks // 2):
                    those, futures = pending.popleft()
                    values = client.gather(futures)
                    wrong = [
                        n for n, value in zip(those, values, strict=True) if value != expected(n)
                    ]
                    assert not wrong, f"wrong results: {wrong}"
                    right += len(values)
                    del futures
                    rss.append(me.memory_info().rss)
                    workers.append(worker_rss(cluster))
                    if arguments.verbose:
                        print(f"{2 * right} tasks, {time.monotonic() - started:.0f} s", flush=True)
        finally:
            stop.set()
            killer.join()
        client.wait_for_workers(1, timeout=60)
        events = client.get_events("devctx")
        assert isinstance(events, tuple)
        seen.update(event["action"] for _, event in events)
        deadline = time.monotonic() + 10
        while True:
            (left,) = client.run(left_in_worker).values()
            if not left["used"] or time.monotonic() > deadline:
                break
            time.sleep(0.1)
    assert right == arguments.tasks // 2
    assert left["used"] == 0, f"{left['used']} bytes of device memory were not given back"
    assert left["scopes"] == 0
    steady = rss[len(rss) // 3 :]
    return {
        "tasks": 2 * right,
        "seconds": round(time.monotonic() - started, 1),
        "workers killed": sum(killed),
        "devices failed": seen["device-failed"],
        "client and scheduler MiB, a third in and at the end": (
            steady[0] >> 20,
            steady[-1] >> 20,
        ),
        "worker MiB, a third in, at most, and at the end": (
            workers[len(workers) // 3] >> 20,
            max(workers) >> 20,
            left["rss"] >> 20,
        ),
        "worker threads at the end": left["threads"],
    }


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--kill-every", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--oom", type=float, default=0.01, metavar="SHARE")
    parser.add_argument("--sticky", type=float, default=0.0001, metavar="SHARE")
    parser.add_argument("--restore", type=float, default=0.0001, metavar="SHARE")
    parser.add_argument("--synchronize", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="with the logs")
    parser.add_argument("--growth", type=int, default=64, metavar="MIB")
    arguments = parser.parse_args(given)
    os.environ[driver.SIMULATED_DEVICES_VARIABLE] = str(arguments.devices)
    settings = {
        "devctx.simulated-devices": arguments.devices,
        # What dask keeps of the past grows until these are full: that is not what is measured.
        "distributed.admin.low-level-log-length": 1000,
        "distributed.admin.log-length": 1000,
        "distributed.scheduler.dashboard.tasks.task-stream-length": 1000,
        "distributed.diagnostics.computations.max-history": 10,
        "distributed.scheduler.allowed-failures": 100,
    }
    with dask.config.set(settings):
        report = run(arguments)
    for name, value in report.items():
        print(f"{name}: {value}")
    # dask's own scheduler and client grow by as much in such a run without this package: what it
    # adds is in the workers.
    before, after = report["client and scheduler MiB, a third in and at the end"]
    if after - before > arguments.growth:
        print(f"memory grew by {after - before} MiB")
        return 1
    print("every result right, nothing lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
