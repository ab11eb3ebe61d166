"""Many tasks of every kind while things break; each result is checked. Run it with ``make soak``.

Devices are simulated, or with ``--gpus`` real ones, where CuPy makes the values. Meanwhile workers
are killed or stand still, devices break with and without a guilty task, and memory runs out. Only
the tasks that broke a device may err, everything else gives its right value, and at the end nothing
is left in device memory. Without faults, the memory of the processes may hardly grow, too.
``--seed`` decides tasks and faults, but not when a thread meets a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import itertools
import logging
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import dask
import numpy as np
import psutil
from cuda.bindings.driver import CUresult
from distributed import Client, Future, get_worker

from dask_devctx import (
    Device,
    DeviceFailedError,
    LocalDeviceCluster,
    SimulatedArray,
    device_of,
    driver,
    on_device,
    task_devices,
)
from dask_devctx.cuda.scope import open_scopes

DEVICES, UNDER_WAY, PATIENCE_S = 4, 4, 240.0  # batches at a time, and for each result
SETTINGS = {
    # Innocent tasks lose their workers again and again here.
    "distributed.scheduler.allowed-failures": 1000,
    "distributed.deploy.lost-worker-timeout": "1 hour",
    "distributed.worker.preload": ["tests.soak"],
    # Tasks name devices of workers that take long to start again.
    "devctx.missing-device-timeout": "180 s",
    "devctx.ipc-staging": "4 MiB",
    # Histories grow until they are full. Small ones keep out of the growth of memory.
    "devctx.history": 100,
    "distributed.admin.low-level-log-length": 100,
    "distributed.admin.log-length": 100,
    "distributed.scheduler.dashboard.tasks.task-stream-length": 100,
    "distributed.diagnostics.computations.max-history": 10,
    "distributed.worker.profile.enabled": False,
}
SIMULATED = {
    "devctx.simulated-devices": DEVICES,
    "devctx.simulated-memory": "64 MiB",
    "distributed.worker.multiprocessing-method": "forkserver",  # a new worker is soon there
}


# -- what tasks do


def faults() -> Any:
    """Return the faults of the simulated machine; None on real GPUs."""
    machine = driver.backend().machine
    return None if machine is None else machine.faults


def array_of(host: np.ndarray) -> Any:
    """Return an array on the current device: CuPy's where the GPUs are real."""
    if faults() is not None:
        return SimulatedArray.asarray(host)
    import cupy

    return cupy.asarray(host)


def make(number: int, length: int) -> Any:
    array = array_of(np.arange(length) + number)
    assert device_of(array) is Device.current() is not None
    return array


def change(array: Any) -> Any:
    assert device_of(array) is Device.current(), "an input was not moved"
    return array + 1


def total(*arrays: Any) -> int:
    here = Device.current()
    assert here is not None
    assert all(device_of(array) is here for array in arrays), "an input was not moved"
    return sum(int(array.sum()) for array in arrays)


async def total_later(*arrays: Any) -> int:
    here = Device.current()
    await asyncio.sleep(0.001)
    assert Device.current() is here
    return total(*arrays)


def total_on_host(*arrays: Any) -> int:
    theirs = get_worker().plugins["devctx"].worker_devices
    here = Device.current()
    assert here is (None if Device(0) in theirs else theirs[0]), here
    return sum(int(array.get().sum()) for array in arrays)


def total_across(*arrays: Any) -> int:
    """Sum arrays in two parts, each on a device of its own."""
    one, other = task_devices()
    assert one is not other
    found = 0
    for array in arrays:
        for device, part in zip((one, other), np.array_split(array.get(), 2), strict=True):
            with device:
                found += int(array_of(part).sum())
    return found


def meet(function: str, status: CUresult, at_exit: bool, *arrays: Any) -> int:
    """Sum arrays; a call of a simulated driver fails, half of the times, in this task's thread."""
    if faults() is None:
        return total(*arrays)
    me = threading.get_ident()

    def mine(*args: Any) -> bool:
        return threading.get_ident() == me and (not at_exit or int(args[0]) == 0)

    if random.random() < 0.5:
        faults().inject(function, status, when=mine)
    return total(*[array.copy_to(array.device) for array in arrays])


def break_device(after_s: float) -> str:
    """Leave a kernel that breaks the device; count as done, unless it breaks at once."""
    if faults() is not None:
        faults().poison(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, after_s=after_s)
        return "looks good"
    import cupy

    source = r"""
    extern "C" __global__ void write(long long where, unsigned long long cycles) {
        unsigned long long start = clock64();  // so a clock that jumps back ends the wait
        while (clock64() - start < cycles) {}
        *(volatile int*)where = 1;
    }
    """
    arguments = (np.int64(16), np.int64(after_s * 1.7e9))
    cupy.RawKernel(source, "write")((1,), (1,), arguments)
    if not after_s:  # as in a task that waits for its kernel, and raises CuPy's own error
        cupy.cuda.get_current_stream().synchronize()
    return "looks good"


@functools.cache
def carried(device: int) -> Callable[..., int]:
    """Return a function that takes its device with it."""
    return on_device(device)(total)


# -- in each worker


def dask_setup(worker: Any) -> None:
    """Let signals break the worker's devices: as failed hardware, then as a task's work."""
    loop = worker.loop.asyncio_loop

    def soon(status: CUresult) -> None:
        suspects = worker.plugins["devctx"].extension.monitor.calls.suspects()
        illegal = status is CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        if illegal and len({key for key, _ in suspects}) == 1:
            loop.call_later(0.01, soon, status)  # nobody can tell that this one did not do it
        else:
            faults().poison(status)

    for number, status in (
        (signal.SIGUSR1, CUresult.CUDA_ERROR_ECC_UNCORRECTABLE),
        (signal.SIGUSR2, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS),
    ):
        signal.signal(number, lambda *_, status=status: loop.call_soon_threadsafe(soon, status))


async def left_in_worker(dask_worker: Any) -> dict[str, int]:
    """Return the device memory that nobody gave back, and the scopes that are open."""
    peers = dask_worker.plugins["devctx"].extension.peers
    gc.collect()
    for _ in range(100):
        if not peers.in_use:
            break
        await asyncio.sleep(0.05)
    await peers.give_back()
    machine, used = driver.backend().machine, 0
    if machine is not None:
        used = sum(gpu.used_memory for gpu in machine.gpus)
    else:
        import cupy

        for device in dask_worker.plugins["devctx"].worker_devices:
            with device:
                used += int(cupy.get_default_memory_pool().used_bytes())
    return {
        "values": len(dask_worker.data),
        "values in bytes": used,
        "scopes": len(open_scopes()),
        "bytes on their way": int(peers.in_use),
    }


# -- batches of random tasks with known results

GUILTY = "guilty"
KINDS = ["plain"] * 8 + ["later", "host", "carried", "across", "across", "share", "memory"]
MET = {
    "meets OOM": ("cuMemAlloc", CUresult.CUDA_ERROR_OUT_OF_MEMORY, False),
    "meets a fault at its end": ("cuCtxSetCurrent", CUresult.CUDA_ERROR_INVALID_CONTEXT, True),
}


@dataclass
class Task:
    """A task, and the value that is right: of an array, its sum."""

    kind: str
    function: Callable[..., Any]
    value: Any
    args: tuple[Any, ...] = ()
    inputs: list[Task] = field(default_factory=list)
    annotations: dict[str, Any] = field(default_factory=dict)
    future: Any = None


class Batch:
    """Random tasks, the same for the same seed and number."""

    def __init__(self, arguments: argparse.Namespace, number: int) -> None:
        self.name, self._devices = f"{arguments.seed}.{number}", arguments.devices
        self._shared = arguments.devices >= 2 * arguments.workers  # a worker has two devices
        self._random = chance = random.Random(self.name)
        size = arguments.batch
        made, changed = size * 3 // 10, size * 2 // 10
        self.tasks = [self._made() for _ in range(made)]
        deck = self._deck()
        self.tasks += [self._changed(next(deck)) for _ in range(changed)]
        self.arrays = len(self.tasks)  # each of them is in the sum of another task
        deck = self._deck()
        self.tasks += [self._total(next(deck), deck) for _ in range(size - self.arrays)]
        if chance.random() < arguments.guilty:
            broken = Task(GUILTY, break_device, None, (chance.choice([0, 0.01, 0.1]),))
            self.tasks.insert(chance.randrange(self.arrays, len(self.tasks)), broken)

    def _deck(self) -> Iterator[Task]:
        """Yield all tasks so far in random order, again and again."""
        cards = list(self.tasks)
        while True:
            self._random.shuffle(cards)
            yield from cards

    def _somewhere(self) -> dict[str, Any]:
        """Return an annotation, or none, for a task of one device."""
        *ordinals, last = range(self._devices)
        chosen = self._random.choice([None, None, None, *ordinals, f"cuda:{last}", "auto"])
        return {} if chosen is None else {"device": chosen}

    def _made(self) -> Task:
        number = self._random.randrange(10**6)
        length = 65_536 if self._random.random() < 0.06 else 256
        value = length * (length - 1) // 2 + length * number
        return Task("made", make, value, (number, length), [], self._somewhere())

    def _changed(self, one: Task) -> Task:
        return Task("changed", change, one.value + one.args[1], (), [one], self._somewhere())

    def _total(self, first: Task, deck: Iterator[Task]) -> Task:
        choice = self._random.choice
        inputs = [first, *itertools.islice(deck, choice([0, 0, 0, 1, 1, 2]))]
        kind = choice(KINDS + list(MET) * (self._random.random() < 0.05))
        if kind == "across" and not self._shared:
            kind = "plain"
        # A function, arguments before the inputs, and annotations.
        called: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
            "plain": (total, (), self._somewhere()),
            "later": (total_later, (), self._somewhere()),
            "host": (total_on_host, (), {"device": "none"}),
            "carried": (carried(choice(range(self._devices))), (), {}),
            "across": (total_across, (), {"devices": 2}),
            "share": (total, (), {"device_share": choice([0.1, 0.25, 0.5])}),
            "memory": (total, (), {"device_memory": choice(["1 MiB", "4 MiB"])}),
            **{name: (meet, given, {"retries": 20}) for name, given in MET.items()},
        }
        function, args, annotations = called[kind]
        return Task(kind, function, sum(one.value for one in inputs), args, inputs, annotations)

    def submit(self, client: Client) -> None:
        """Submit all tasks, in one graph those that differ in their arguments only."""
        for stage in ({"made"}, {"changed"}, {*KINDS, *MET, GUILTY}):
            groups: dict[Any, list[Task]] = defaultdict(list)
            for one in self.tasks:
                if one.kind in stage:
                    shape = (one.function, len(one.inputs), *sorted(one.annotations.items()))
                    groups[shape].append(one)
            for group in groups.values():
                rows = [[*one.args, *(of.future for of in one.inputs)] for one in group]
                with dask.annotate(**group[0].annotations):
                    columns = zip(*rows, strict=True)
                    futures = client.map(group[0].function, *columns, pure=False)
                for one, future in zip(group, futures, strict=True):
                    one.future = future

    def check(self, patience_s: float) -> Iterator[tuple[str, str, str]]:
        """Wait for all tasks; yield the kind of each, its outcome and more words."""
        for one in self.tasks[self.arrays :]:
            outcome, words = (_guilt if one.kind == GUILTY else _outcome)(one, patience_s)
            yield one.kind, outcome, words and f"{one.future.key}: {words}"


def _outcome(one: Task, patience_s: float) -> tuple[str, str]:
    try:
        found = one.future.result(timeout=patience_s)
    except Exception as error:
        return ("innocent error" if one.future.status == "error" else "lost"), repr(error)
    return ("right", "") if found == one.value else ("wrong", f"{found}, not {one.value}")


def _guilt(one: Task, patience_s: float) -> tuple[str, str]:
    """A guilty task errs some time after it counted as done; it is its only suspect then."""
    future: Future = one.future
    until = time.monotonic() + patience_s
    while future.status != "error":
        if time.monotonic() > until:
            return "not found", future.status
        time.sleep(0.02)
    error = future.exception()
    if not isinstance(error, DeviceFailedError):
        return "other error", repr(error)
    if len(error.suspects) != 1 or not error.suspects[0].startswith(str(future.key)):
        return "wrong suspects", str(error.suspects)
    return "found", ""


# -- faults

# How often each happens in an hour.
RATES = {
    "worker killed": 60.0,
    "worker stood still": 40.0,
    "hardware failed": 24.0,
    "device broke, nobody guilty": 24.0,
}
SIGNALS = {
    "worker killed": signal.SIGKILL,
    "hardware failed": signal.SIGUSR1,
    "device broke, nobody guilty": signal.SIGUSR2,
}


class Faults:
    """Makes random faults at random moments."""

    def __init__(self, seed: int, cluster: LocalDeviceCluster, factor: float, gpus: bool) -> None:
        self._cluster, self._chance = cluster, random.Random(f"{seed} faults")
        self._rates = {name: rate for name, rate in RATES.items() if not gpus or "worker" in name}
        self._pause_s = 3600 / sum(self._rates.values()) / factor if factor else 0.0
        self.made: Counter[str] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._pause_s and not self._stop.wait(self._chance.expovariate(1 / self._pause_s)):
            [name] = self._chance.choices(list(self._rates), self._rates.values())
            there = self._cluster.scheduler.workers  # these have set up their devices
            nannies = list(self._cluster.workers.values())
            pids = [nanny.pid for nanny in nannies if nanny.worker_address in there]
            with suppress(psutil.NoSuchProcess, IndexError):
                process = psutil.Process(self._chance.choice(pids))
                if name in SIGNALS:
                    process.send_signal(SIGNALS[name])
                else:
                    process.suspend()
                    time.sleep(0.5 + 4 * self._chance.random())
                    process.resume()
                self.made[name] += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


# -- a run


def run(arguments: argparse.Namespace) -> bool:
    """Run batches, some at a time; print what happened, and return whether all is well."""
    outcomes: Counter[tuple[str, str]] = Counter()
    held: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    calm = not arguments.faults and not arguments.guilty
    own: dict[str, Any] = {} if arguments.gpus else {"device_memory_limit": "6 MiB"}
    with (
        LocalDeviceCluster(
            n_workers=arguments.workers,
            oom_retries=3,
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,
            **own,
        ) as cluster,
        Client(cluster) as client,
    ):
        made = Faults(arguments.seed, cluster, arguments.faults, arguments.gpus)
        print("the workers are there", flush=True)
        began = time.monotonic()
        until, pending = began + arguments.minutes * 60, deque[Batch]()
        for number in itertools.count():
            if number * arguments.batch < arguments.tasks and time.monotonic() < until:
                batch = Batch(arguments, number)
                batch.submit(client)
                pending.append(batch)
                if len(pending) < UNDER_WAY:
                    continue
            if not pending:
                break
            batch = pending.popleft()
            outcomes["array", "right"] += batch.arrays
            for kind, outcome, words in batch.check(PATIENCE_S):
                outcomes[kind, outcome] += 1
                if words:
                    print(f"{outcome}: {kind} {words}", flush=True)
            del batch
            pids = [("client and scheduler", os.getpid())]
            pids += [("a worker", nanny.pid) for nanny in cluster.workers.values() if nanny.pid]
            for one in pids if calm else ():
                held[one].append((outcomes.total(), psutil.Process(one[1]).memory_info().rss))
        took = time.monotonic() - began
        made.close()
        left = settle(client, arguments.workers)
    print(f"seed {arguments.seed}: {outcomes.total()} tasks in {took:.0f} s")
    for (kind, outcome), count in sorted(outcomes.items()):
        print(f"  {kind:28}{count} {outcome}")
    for name, count in sorted(made.made.items()):
        print(f"  fault: {name:28}{count}")
    print(f"left at the end: {left}")
    well = {outcome for _, outcome in outcomes} <= {"right", "found"} and not sum(left.values())
    for (name, _), life in held.items():
        # The first half of each process's life is its warm-up. Less than 8 MiB means nothing.
        half = life[len(life) // 2 :]
        grown = statistics.linear_regression(*zip(*half, strict=True)).slope
        tasks = half[-1][0] - half[0][0]
        print(f"{name} grew by {grown:.0f} bytes a task")
        well = well and grown * tasks <= max(1024 * tasks, 2**23)
    return well


def settle(client: Client, workers: int) -> Counter[str]:
    """Return the sums of what is left in the workers, once all of them are there."""
    client.wait_for_workers(workers, timeout=180)
    until = time.monotonic() + 60
    while True:
        left: Counter[str] = Counter()
        gc.collect()  # futures that were gathered are in cycles
        for found in client.run(left_in_worker, on_error="ignore").values():
            left.update(found)
        if not left.total() or time.monotonic() > until:
            return left
        time.sleep(0.5)


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=1e6, help="end after this time")
    parser.add_argument("--seed", type=int, default=random.randrange(2**16))
    parser.add_argument("--batch", type=int, default=1000, metavar="TASKS")
    parser.add_argument("--devices", type=int, default=DEVICES, help="how many there are")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="real ones, with CuPy")
    parser.add_argument("--faults", type=float, default=1.0, help="times the usual number")
    parser.add_argument("--guilty", type=float, default=0.1, help="such tasks in a batch")
    arguments = parser.parse_args(given)
    # It warns of each result that is lost with a worker, and the scheduler makes them all again.
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
    settings = SETTINGS if arguments.gpus else {**SETTINGS, **SIMULATED}
    with tempfile.TemporaryDirectory() as locks:
        settings = {**settings, "devctx.lock-directory": locks}
        if not arguments.gpus:
            settings["devctx.simulated-host"] = f"soak{os.getpid()}"
        with dask.config.set(settings):
            well = run(arguments)
    print("every result right, nothing lost" if well else "not all is well: see above")
    return int(not well)


if __name__ == "__main__":
    # The workers have to find the functions under this module's name.
    from tests import soak

    sys.exit(soak.main(sys.argv[1:]))
