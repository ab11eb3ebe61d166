"""A task that breaks its device after it returned errs in the end, and no second bystander does."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
from cuda.bindings.driver import CUresult
from distributed import Client, Future, wait

from dask_devctx import DeviceFailedError, DevicePlugin, LocalDeviceCluster, driver

ILLEGAL_ADDRESS = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


def where_slowly(number: int, seconds: float = 0.02) -> tuple[int, int]:
    time.sleep(seconds)
    return number, os.getpid()


def poison(after_s: float) -> None:
    machine = driver.backend().machine
    assert machine is not None
    machine.faults.poison(ILLEGAL_ADDRESS, after_s=after_s)


def leave_a_bad_kernel_running(after_s: float) -> str:
    poison(after_s)
    return "looks good"


async def leave_a_bad_kernel_running_in_a_coroutine(after_s: float) -> str:
    await asyncio.sleep(0.01)
    poison(after_s)
    return "looks good"


def leave_a_bad_kernel_running_and_stay(after_s: float, flag: str) -> str:
    """The second time, go on in Python for longer than anybody waits for it."""
    poison(after_s)
    if os.path.exists(flag):
        time.sleep(60)
    Path(flag).touch()
    return "looks good"


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    plugin = DevicePlugin(**getattr(request, "param", {}))
    with (
        LocalDeviceCluster(dashboard_address=":0", silence_logs=False, plugin=plugin) as cluster,
        Client(cluster) as client,
    ):
        yield client


one_device = pytest.mark.parametrize("client", [{"devices": [0]}], indirect=True)
each_kind = pytest.mark.parametrize(
    "leave", [leave_a_bad_kernel_running, leave_a_bad_kernel_running_in_a_coroutine]
)


def error_in_the_end(future: Future, timeout: float = 60) -> DeviceFailedError:
    """Return the error of a future that may count as finished for a while yet."""
    deadline = time.monotonic() + timeout
    while future.status != "error":
        assert time.monotonic() < deadline, f"{future} did not err"
        time.sleep(0.02)
    error = future.exception()
    assert isinstance(error, DeviceFailedError)
    return error


def check_blamed_exactly(bad: Future, device: str = "cuda:0") -> None:
    error = error_in_the_end(bad)
    assert error.suspects == (f"{bad.key} on {device}",)
    assert error.watched
    assert "watched" in str(error)
    assert "synchronize" not in str(error)


@each_kind
@one_device
def test_on_one_device_one_bystander_errs_and_then_the_task_itself(
    client: Client, leave: Callable[..., Any]
) -> None:
    first = client.map(where_slowly, range(20))
    wait(first)
    bad = client.submit(leave, 0.3)
    assert bad.result(timeout=30) == "looks good"
    noticed = client.submit(where_slowly, 20, 1.0)
    error = noticed.exception(timeout=30)
    assert isinstance(error, DeviceFailedError)
    assert not error.watched
    assert error.suspects == (f"{noticed.key} on cuda:0", f"{bad.key} on cuda:0")

    others = client.map(where_slowly, range(21, 60))
    results = client.gather(first + others)
    assert [number for number, _ in results] == [*range(20), *range(21, 60)]
    check_blamed_exactly(bad)


@each_kind
def test_among_tasks_on_other_devices_one_bystander_errs_and_then_the_task_itself(
    client: Client, leave: Callable[..., Any]
) -> None:
    first = client.map(where_slowly, range(20))
    wait(first)
    with dask.annotate(device=0):
        bad = client.submit(leave, 0.2)
    others = client.map(where_slowly, range(20, 400))
    check_blamed_exactly(bad)
    wait(others, timeout=60)
    erred = [future for future in others if future.status == "error"]
    assert len(erred) == 1, [str(future.exception()) for future in erred]
    good = [future for future in first + others if future not in erred]
    expected = [n for n, future in enumerate(first + others) if future not in erred]
    assert [number for number, _ in client.gather(good)] == expected
