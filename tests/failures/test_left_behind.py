"""A task that leaves a context current is seen and counted; a failed one leaves no arrays."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Iterator

import dask
import numpy as np
import pytest
from distributed import Client

from dask_devctx import Device, LocalDeviceCluster, SimulatedArray, driver
from dask_devctx.driver.simulated import SimulatedMachine


@pytest.fixture
def client() -> Iterator[Client]:
    with (
        LocalDeviceCluster(processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def leave(which: int) -> None:
    Device(which).set_current()


async def leave_in_a_coroutine(which: int) -> int | None:
    Device(which).set_current()
    await asyncio.sleep(0)
    return current()


def leave_nothing_current() -> None:
    assert Device.current() is not None
    driver.backend().calls.set_current(0)


def current() -> int | None:
    device = Device.current()
    return None if device is None else device.device_id


def test_it_is_counted_and_warned_of_once(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    (worker,) = client.cluster.workers.values()
    with caplog.at_level(logging.WARNING, "dask_devctx"), dask.annotate(device=1):
        futures = [client.submit(leave, 2, pure=False) for _ in range(5)]
        client.gather(futures)
        assert client.submit(current, pure=False).result() == 1
    metrics = worker.metrics["devctx-failures"](worker)
    assert metrics["left-behind"] == {"cuda:1": 5}
    warned = [r for r in caplog.records if "did not restore" in r.getMessage()]
    assert len(warned) == 1
    assert any(future.key in warned[0].getMessage() for future in futures)
    assert "(seen 1 time on this device)" in warned[0].getMessage()


def test_nothing_current_is_left_behind_too_and_the_probe_still_sees(client: Client) -> None:
    (worker,) = client.cluster.workers.values()
    with dask.annotate(device=2):
        client.submit(leave_nothing_current).result()
        assert client.submit(current, pure=False).result() == 2
    assert worker.metrics["devctx-failures"](worker)["left-behind"] == {"cuda:2": 1}


def test_a_coroutine_gets_its_own_device_back_at_each_resume(client: Client) -> None:
    with dask.annotate(device=1):
        assert client.submit(leave_in_a_coroutine, 2).result() == 1
        assert client.submit(current, pure=False).result() == 1


def test_what_restores_is_not_counted(client: Client) -> None:
    def good() -> None:
        with Device(3), Device(2):
            pass

    (worker,) = client.cluster.workers.values()
    client.gather([client.submit(good, pure=False) for _ in range(8)])
    assert worker.metrics["devctx-failures"](worker)["left-behind"] == {}


def fail(array: SimulatedArray) -> None:
    twice = array * 2
    raise ValueError(f"{len(twice)} values")


def test_a_failed_tasks_arrays_are_free_before_garbage_is_collected(
    client: Client, machine: SimulatedMachine
) -> None:
    gc.collect()
    gc.disable()
    try:
        made = client.submit(SimulatedArray.asarray, np.arange(1000))
        failed = client.submit(fail, made)
        with pytest.raises(ValueError, match="1000 values"):
            failed.result()
        del made, failed
        until = time.monotonic() + 5
        while (left := [gpu.used_memory for gpu in machine.gpus]) != [0, 0, 0, 0]:
            assert time.monotonic() < until, left
            time.sleep(0.01)
    finally:
        gc.enable()
