"""What breaks while a task's inputs are brought to its device is the task's, as what it does is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import dask
import numpy as np
import pytest
from cuda.bindings.driver import CUresult
from distributed import Client, Future

from dask_devctx import (
    Device,
    DeviceOutOfMemoryError,
    LocalDeviceCluster,
    SimulatedArray,
)
from dask_devctx.driver.simulated import SimulatedMachine

NBYTES = 2**20


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    with (
        dask.config.set(getattr(request, "param", {})),
        LocalDeviceCluster(processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


# Without room for copies none is made ahead of its task, where nobody would see it fail.
none_ahead = pytest.mark.parametrize("client", [{"devctx.replica-limit": 0.0}], indirect=True)


def make() -> SimulatedArray:
    return SimulatedArray.asarray(np.ones(NBYTES, np.uint8))


def made_on(client: Client, device: int) -> Future:
    with dask.annotate(device=device):
        x = client.submit(make, pure=False)
    x.result(timeout=20)
    return x


def total(array: SimulatedArray) -> tuple[int, int]:
    return array.device.device_id, int(array.sum())


async def total_later(array: SimulatedArray) -> tuple[int, int]:
    return total(array)


def allocate(array: SimulatedArray, nbytes: int) -> tuple[int, int]:
    SimulatedArray(nbytes, np.uint8)
    return total(array)


def out_of_memory(client: Client) -> dict[str, int]:
    (worker,) = client.cluster.workers.values()
    counted: dict[str, int] = worker.metrics["devctx-failures"](worker)["out-of-memory"]
    return counted


def fail_copies(machine: SimulatedMachine, times: int) -> None:
    machine.faults.inject(
        "cuMemAlloc",
        CUresult.CUDA_ERROR_OUT_OF_MEMORY,
        times=times,
        when=lambda nbytes: nbytes == NBYTES,
    )


@none_ahead
@pytest.mark.parametrize("task", [total, total_later])
def test_a_copy_that_finds_no_memory_is_tried_again(
    client: Client, machine: SimulatedMachine, task: Any
) -> None:
    x = made_on(client, 0)
    fail_copies(machine, 2)  # the copy itself is made a second time at once
    with dask.annotate(device=1):
        assert client.submit(task, x).result(timeout=20) == (1, NBYTES)
    assert out_of_memory(client) == {"cuda:1": 1}


@none_ahead
@pytest.mark.parametrize("task", [total, total_later])
def test_a_copy_that_never_finds_memory_fails_its_task(
    client: Client, machine: SimulatedMachine, task: Any
) -> None:
    x = made_on(client, 0)
    fail_copies(machine, 100)
    with dask.annotate(device=1):
        error = client.submit(task, x).exception(timeout=20)
    assert isinstance(error, DeviceOutOfMemoryError)
    assert (error.device, error.attempts) == ("cuda:1", 2)


def test_inputs_are_brought_to_the_device_that_is_tried_next(
    client: Client, machine: SimulatedMachine
) -> None:
    for gpu, free in zip(machine.gpus, (2, 2, 64, 2), strict=True):
        gpu.used_memory = gpu.total_memory - free * NBYTES
    x = made_on(client, 0)
    assert client.submit(allocate, x, 4 * NBYTES).result(timeout=20) == (2, NBYTES)
    assert out_of_memory(client) == {"cuda:0": 1}


def test_copies_make_room_for_a_task(client: Client, machine: SimulatedMachine) -> None:
    machine.gpus[1].used_memory = machine.gpus[1].total_memory - 2 * NBYTES
    x, y = made_on(client, 0), made_on(client, 0)
    (worker,) = client.cluster.workers.values()
    replicas = worker.plugins["devctx"].extension.copies
    with dask.annotate(device=1):
        assert client.submit(total, x).result(timeout=20) == (1, NBYTES)
        assert replicas.nbytes(Device(1)) == NBYTES
        # Two MiB are there: one for its input, and one that x' copy has.
        assert client.submit(allocate, y, NBYTES).result(timeout=20) == (1, NBYTES)
    assert out_of_memory(client) == {"cuda:1": 1}
    assert replicas.nbytes(Device(1)) == NBYTES


def test_room_is_made_when_what_reads_the_copies_is_done(
    client: Client, machine: SimulatedMachine
) -> None:
    """A task's kernels still read its input when it runs out of memory."""
    machine.gpus[1].used_memory = machine.gpus[1].total_memory - 2 * NBYTES
    x, y = made_on(client, 0), made_on(client, 0)
    with dask.annotate(device=1):
        assert client.submit(total, x).result(timeout=20) == (1, NBYTES)
        machine.faults.inject("cuEventQuery", CUresult.CUDA_ERROR_NOT_READY, times=50)
        assert client.submit(allocate, y, NBYTES).result(timeout=20) == (1, NBYTES)
    assert out_of_memory(client) == {"cuda:1": 1}


@none_ahead
def test_a_device_that_fails_in_a_copy_is_noticed(
    client: Client, machine: SimulatedMachine
) -> None:
    def poison(nbytes: int) -> bool:
        if nbytes == NBYTES:
            machine.faults.poison(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
        return False

    x = made_on(client, 0)
    machine.faults.inject("cuMemAlloc", CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, when=poison)
    (worker,) = client.cluster.workers.values()
    monitor = worker.plugins["devctx"].extension.monitor
    with dask.annotate(device=1):
        copied = client.submit(total, x)
        while monitor.blame.failure is None:
            time.sleep(0.01)
    failure = monitor.blame.failure
    assert {*failure.suspects} <= {copied.key, x.key}
    assert "ILLEGAL_ADDRESS" in str(failure.error)
