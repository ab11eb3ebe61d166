"""Random graphs while the plugin changes or the driver's calls fail: right values, clear errors.

``make trials`` runs many of them: TRIALS is how many of each kind.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import suppress
from typing import Any

import dask
import numpy as np
import pytest
from cuda.bindings.driver import CUresult
from distributed import Client, LocalCluster

from dask_devctx import Device, DevicePlugin, SimulatedArray, driver, on_device
from dask_devctx.driver.simulated.faults import WORKING_CALLS
from dask_devctx.errors import DevctxError
from tests.distributed.devices import started

pytestmark = [pytest.mark.long, pytest.mark.timeout(0)]

SEEDS = range(int(os.environ.get("TRIALS", "3")))
TIMEOUT_S = 60.0
STATUSES = [
    CUresult.CUDA_ERROR_OUT_OF_MEMORY,
    CUresult.CUDA_ERROR_INVALID_VALUE,
    CUresult.CUDA_ERROR_INVALID_CONTEXT,
    CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,
    CUresult.CUDA_ERROR_UNKNOWN,
]


def combine(number: int, move: bool, *arrays: Any) -> SimulatedArray:
    """Return ``number`` plus all inputs, on the device that is current."""
    here = Device.current() or Device(0)
    with here:
        result = SimulatedArray.asarray(np.full(16, number, "int64"))
        for array in arrays:
            if isinstance(array, np.ndarray):
                array = SimulatedArray.asarray(array)
            result = result + (array.copy_to(here) if move else array)
    return result


async def combine_later(number: int, move: bool, *arrays: Any) -> SimulatedArray:
    before = Device.current()
    await asyncio.sleep(0.001)
    assert Device.current() is before
    return combine(number, move, *arrays)


def on_host(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else value.get()


def combine_on_host(number: int, move: bool, *arrays: Any) -> np.ndarray:
    return np.full(16, number, "int64") + sum(map(on_host, arrays))


def graph(client: Client, chance: random.Random, size: int, move: bool) -> list[tuple[Any, int]]:
    """Submit a random graph; return each future with its expected value."""
    made: list[tuple[Any, int]] = []
    for number in range(size):
        inputs = chance.sample(made, chance.randint(0, min(3, len(made))))
        device = chance.choice([None, None, *range(4), "auto", "cuda:1"])
        function: Any = chance.choice([combine, combine, combine_later, combine_on_host, None])
        if function is None:
            function, device = on_device(chance.randrange(4))(combine), None
        if function is combine_on_host:
            device = "none"
        with dask.annotate(retries=20, **({} if device is None else {"device": device})):
            given = [future for future, _ in inputs]
            future = client.submit(function, number, move, *given, pure=False)
        made.append((future, number + sum(value for _, value in inputs)))
    return made


def check(future: Any, expected: int) -> None:
    assert (on_host(future.result(timeout=TIMEOUT_S)) == expected).all(), future.key


def test_the_plugin_changes_under_load() -> None:
    with started(LocalCluster, n_workers=1, threads_per_worker=32) as client:
        for seed in SEEDS:
            chance = random.Random(seed)
            running = graph(client, chance, 30, move=True)
            for _ in range(3):
                if chance.random() < 0.3:
                    with suppress(ValueError, KeyError):  # it is taken away already
                        client.unregister_worker_plugin("devctx")
                else:
                    plugin = DevicePlugin(
                        devices=chance.choice([None, [0, 1, 2, 3], [3, 2, 1, 0]]),
                        tasks_per_device=chance.choice([1, 2]),
                        synchronize=chance.random() < 0.3,
                        move_inputs=chance.random() < 0.8,
                    )
                    client.register_plugin(plugin)
                time.sleep(chance.random() / 50)
            client.register_plugin(DevicePlugin())
            for future, expected in running:
                check(future, expected)


def _faults() -> Any:
    machine = driver.backend().machine
    return machine.faults


def inject(function: str, status: int, times: int) -> None:
    _faults().inject(function, CUresult(status), times=times)


def clear() -> None:
    _faults().clear()


def test_a_call_of_the_driver_fails(apart: Client) -> None:
    """Each result is right or a clear error, and the worker, or the next one, works afterwards."""
    apart.cluster.scheduler.allowed_failures = 100
    for seed in SEEDS:
        chance = random.Random(seed)
        function = chance.choice(sorted(WORKING_CALLS | {"cuCtxSetCurrent", "cuCtxGetCurrent"}))
        status, times = chance.choice(STATUSES), chance.randint(1, 3)
        with suppress(DevctxError, OSError):  # the fault may meet the look at the devices after it
            apart.run(inject, function, int(status), times)
        for future, expected in graph(apart, chance, 8, move=False):
            with suppress(DevctxError, MemoryError):  # of this package, or of the host
                check(future, expected)
        deadline = time.monotonic() + TIMEOUT_S
        while True:  # a worker whose device failed is being started again
            try:
                apart.wait_for_workers(1, timeout=TIMEOUT_S)
                apart.run(clear)
                check(apart.submit(combine, 1, False, pure=False), 1)
                break
            except Exception:
                assert time.monotonic() < deadline, f"no worker works after {function}: {status}"
                time.sleep(0.1)
