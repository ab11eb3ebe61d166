"""Random trials on simulated devices: each result is right or a clear error, and nothing hangs.

Run as ``make trials``. Four kinds of trial, each with its own number of repetitions:

- *graphs*: a random graph of tasks of every kind, with values in every kind of container and random
  devices; each result is compared with the same graph computed by NumPy.
- *changes*: the plugin is registered, replaced and taken away while such a graph runs.
- *faults*: one call of the driver fails in the worker while a small graph runs. Each result is
  right or one of this package's errors, and the worker works afterwards.
- *claims*: 500 tasks of 1 to 4 devices, parts of one and reservations, with priorities, failures
  and cancellations. No device is ever over its places and bytes, and none is held afterwards.

A failing trial prints its seed: ``--seed N --graphs 1`` repeats it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar

import dask
import numpy as np
from cuda.bindings.driver import CUresult
from distributed import Client, LocalCluster

from dask_devctx import (
    Device,
    DevicePlugin,
    LocalDeviceCluster,
    driver,
    on_device,
    task_devices,
)
from dask_devctx.config.options import LOOK_AHEAD
from dask_devctx.driver.simulated.faults import WORKING_CALLS
from dask_devctx.errors import DevctxError
from dask_devctx.simulated_array import SimulatedArray

LENGTH = 16
DEVICES = 4
LIMIT = int(0.8 * 16 * 2**30)  # the bytes that tasks may reserve on a simulated device
TIMEOUT_S = 60.0
STATUSES = (
    CUresult.CUDA_ERROR_OUT_OF_MEMORY,
    CUresult.CUDA_ERROR_INVALID_VALUE,
    CUresult.CUDA_ERROR_INVALID_CONTEXT,
    CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,
    CUresult.CUDA_ERROR_UNKNOWN,
)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A container of a user's own."""

    array: Any
    note: str


# -- a value in a container, and back


_WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda array: array,
    "list": lambda array: ["host", array],
    "tuple": lambda array: (array, {"same": array}),
    "dict": lambda array: {"array": array, "n": 1},
    "dataclass": lambda array: Pair(array, "host"),
    "deep": lambda array: [[[{"array": (array,)}]]],
}


def unwrapped(value: Any) -> Any:
    """Return the array in a container of one of these kinds."""
    while not isinstance(value, (np.ndarray, SimulatedArray)):
        if isinstance(value, Pair):
            value = value.array
        elif isinstance(value, dict):
            value = value["array"]
        else:
            value = value[1] if isinstance(value[0], str) else value[0]
    return value


# -- what a task does


def combine(number: int, wrapper: str, move: bool, *inputs: Any) -> Any:
    """Return ``number`` plus all inputs, on the device that is current."""
    here = Device.current() or Device(0)
    arrays = [unwrapped(one) for one in inputs]
    with here:
        result = SimulatedArray.asarray(np.full(LENGTH, number, "int64"))
        for array in arrays:
            if isinstance(array, np.ndarray):
                array = SimulatedArray.asarray(array)
            result = result + (array.copy_to(here) if move else array)
    return _WRAPPERS[wrapper](result)


async def combine_later(number: int, wrapper: str, move: bool, *inputs: Any) -> Any:
    before = Device.current()
    await asyncio.sleep(0.001)
    assert Device.current() is before
    return combine(number, wrapper, move, *inputs)


def on_host(number: int, wrapper: str, move: bool, *inputs: Any) -> Any:
    """As :func:`combine`, in host memory."""
    total = np.full(LENGTH, number, "int64")
    for one in inputs:
        array = unwrapped(one)
        total = total + (array if isinstance(array, np.ndarray) else array.get())
    return _WRAPPERS[wrapper](total)


def graph(client: Client, random_: random.Random, size: int, *, move: bool) -> Iterator[Any]:
    """Submit a random graph; yield each future with its expected value."""
    futures: list[Any] = []
    expected: list[int] = []
    for number in range(size):
        count = random_.randint(0, min(3, len(futures)))
        inputs = random_.sample(range(len(futures)), count)
        kind = random_.choice(["plain", "plain", "plain", "coroutine", "carried", "host"])
        wrapper = random_.choice(list(_WRAPPERS))
        function: Callable[..., Any] = {"coroutine": combine_later, "host": on_host}.get(
            kind, combine
        )
        annotations: dict[str, Any] = {"retries": 20}
        if kind == "host":
            annotations["device"] = "none"
        elif kind == "carried":
            function = on_device(random_.randrange(DEVICES))(combine)
        elif random_.random() < 0.5:
            annotations["device"] = random_.choice([*range(DEVICES), "auto", "cuda:1"])
        with dask.annotate(**annotations):
            future = client.submit(
                function, number, wrapper, move, *(futures[i] for i in inputs), pure=False
            )
        futures.append(future)
        expected.append(number + sum(expected[i] for i in inputs))
    yield from zip(futures, expected, strict=True)


def check(future: Any, expected: int) -> None:
    """Raise if a result is not the expected one."""
    array = unwrapped(future.result(timeout=TIMEOUT_S))
    found = array if isinstance(array, np.ndarray) else array.get()
    assert (found == expected).all(), f"{future.key}: {found}, expected {expected}"


# -- the trials


def graphs(client: Client, random_: random.Random) -> None:
    for future, expected in graph(client, random_, random_.randint(5, 40), move=False):
        check(future, expected)


def changes(client: Client, random_: random.Random) -> None:
    """Change the plugin three times while a graph runs."""
    running = list(graph(client, random_, 30, move=True))
    for _ in range(3):
        if random_.random() < 0.3:
            with suppress(ValueError, KeyError):  # it is taken away already
                client.unregister_worker_plugin("devctx")
        else:
            client.register_plugin(
                DevicePlugin(
                    devices=random_.choice([None, [0, 1, 2, 3], [3, 2, 1, 0]]),
                    tasks_per_device=random_.choice([1, 2]),
                    synchronize=random_.random() < 0.3,
                    move_inputs=random_.random() < 0.8,
                )
            )
        time.sleep(random_.random() / 50)
    client.register_plugin(DevicePlugin())
    for future, expected in running:
        check(future, expected)


def faults(client: Client, random_: random.Random) -> None:
    """Let one call of the driver fail a few times while a graph runs."""
    function = random_.choice(sorted(WORKING_CALLS | {"cuCtxSetCurrent", "cuCtxGetCurrent"}))
    status, times = random_.choice(STATUSES), random_.randint(1, 3)
    with suppress(DevctxError, OSError):  # the fault may meet the look at the devices after it
        client.run(_inject, function, int(status), times)
    for future, expected in graph(client, random_, 8, move=False):
        with suppress(DevctxError, MemoryError):  # told: an error of this package's, or the host's
            check(future, expected)
    deadline = time.monotonic() + TIMEOUT_S
    while True:  # a worker whose device failed is being started again
        try:
            client.wait_for_workers(1, timeout=TIMEOUT_S)
            client.run(_clear)
            found = client.submit(combine, 1, "bare", False, pure=False)
            check(found, 1)
            return
        except Exception:
            if time.monotonic() > deadline:
                raise AssertionError(f"no worker works after {function}: {status}") from None
            time.sleep(0.1)


class Used:
    """The shares and bytes of each device that tasks of one process have now."""

    lock = threading.Lock()
    shares: ClassVar[Counter[int]] = Counter()
    nbytes: ClassVar[Counter[int]] = Counter()


def use(number: int, count: int, share: float, nbytes: int, seconds: float, fails: bool) -> int:
    """Take a part of this task's devices for a while; raise if that is too much."""
    devices = [int(device) for device in task_devices()]
    assert len(set(devices)) == count, devices
    units = int(share * 1000)
    with Used.lock:
        for one in devices:
            Used.shares[one] += units
            Used.nbytes[one] += nbytes
        had = max(Used.shares.values()), max(Used.nbytes.values())
    try:
        assert had[0] <= 1000, had
        assert had[1] <= LIMIT, had
        time.sleep(seconds)
        if fails:
            raise KeyError(number)
        return number
    finally:
        with Used.lock:
            for one in devices:
                Used.shares[one] -= units
                Used.nbytes[one] -= nbytes


def claims(client: Client, random_: random.Random) -> None:
    """Run tasks that ask for more, or less, than one device, and check what they have."""
    futures = []
    cancelled = []
    for number in range(500):
        count = random_.choice([1, 1, 1, 1, 2, 3, 4])
        named = random_.random() < 0.5
        share = random_.choice([None, None, 0.1, 0.25, 1.0])
        nbytes = random_.choice([None, None, LIMIT // 10, LIMIT // 3, LIMIT])
        asks = {
            "priority": random_.choice([0, 0, 1]),
            "devices": random_.sample(range(DEVICES), count) if named else count,
            "device_share": share,
            "device_memory": nbytes,
        }
        if asks["devices"] == 1:
            del asks["devices"]
        counts = share or (1.0 if nbytes is None else nbytes / LIMIT)
        fails = random_.random() < 0.05
        with dask.annotate(**{name: value for name, value in asks.items() if value is not None}):
            seconds = random_.choice([0, 0.001, 0.005])
            future = client.submit(
                *(use, number, count, counts, nbytes or 0, seconds, fails), pure=False
            )
        (cancelled if random_.random() < 0.05 else futures).append((future, number, fails))
    client.cancel([future for future, _, _ in cancelled])
    for future, number, fails in futures:
        if fails:
            assert isinstance(future.exception(timeout=TIMEOUT_S), KeyError)
        else:
            assert future.result(timeout=TIMEOUT_S) == number
    assert set(client.run(_held).values()) == {0}


async def _held(dask_worker: Any) -> int:
    """Return whether a worker still has claims, after those that are ending."""
    admission = dask_worker.plugins["devctx"].extension.admission
    for _ in range(200):
        if admission.idle:
            return 0
        await asyncio.sleep(0.01)
    return 1


def _inject(function: str, status: int, times: int) -> None:
    _faults().inject(function, CUresult(status), times=times)


def _clear() -> None:
    _faults().clear()


def _faults() -> Any:
    return driver.backend().machine.faults


def repeat(
    name: str, trial: Callable[[Client, random.Random], None], seeds: range, client: Client
) -> int:
    """Run a trial with each seed; print and count those that fail."""
    failed, started = 0, time.monotonic()
    for seed in seeds:
        try:
            trial(client, random.Random(f"{name} {seed}"))
        except Exception as error:
            failed += 1
            print(f"{name}, seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
    seconds = time.monotonic() - started
    print(f"{len(seeds)} {name} in {seconds:.0f} s: {failed} failed")
    return failed


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=118)
    parser.add_argument("--changes", type=int, default=170, help="trials of three changes each")
    parser.add_argument("--faults", type=int, default=249)
    parser.add_argument("--claims", type=int, default=20, help="trials of 500 tasks each")
    parser.add_argument("--workers", type=int, default=1, help="for the graphs")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    arguments = parser.parse_args(given)
    os.environ[driver.SIMULATED_DEVICES_VARIABLE] = str(DEVICES)
    settings = {
        "devctx.simulated-devices": DEVICES,
        "distributed.scheduler.allowed-failures": 100,
        "distributed.deploy.lost-worker-timeout": "1 hour",
    }
    common: dict[str, Any] = {"dashboard_address": ":0", "silence_logs": logging.CRITICAL}
    threads_before = threading.active_count()
    outcome: Counter[str] = Counter()

    def seeds(count: int) -> range:
        return range(arguments.seed, arguments.seed + count)

    with dask.config.set(settings):
        with (
            LocalDeviceCluster(n_workers=arguments.workers, **common) as cluster,
            Client(cluster) as client,
        ):
            outcome["graphs"] = repeat("graphs", graphs, seeds(arguments.graphs), client)
        with (
            LocalCluster(n_workers=1, threads_per_worker=LOOK_AHEAD * DEVICES, **common) as plain,
            Client(plain) as client,
        ):
            outcome["changes"] = repeat("changes", changes, seeds(arguments.changes), client)
        with LocalDeviceCluster(n_workers=1, **common) as cluster, Client(cluster) as client:
            outcome["faults"] = repeat("faults", faults, seeds(arguments.faults), client)
        with LocalDeviceCluster(n_workers=1, **common) as cluster, Client(cluster) as client:
            outcome["claims"] = repeat("claims", claims, seeds(arguments.claims), client)
    assert threading.active_count() <= threads_before + 8  # pools that dask keeps
    if outcome.total():
        return 1
    print("every result right or a clear error, nothing hung")
    return 0


if __name__ == "__main__":
    # The workers have to find the functions under this module's name.
    from tests import trials

    sys.exit(trials.main())
