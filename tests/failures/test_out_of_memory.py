"""Out of memory, in every library's words; room is made, and the task is tried again."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from cuda.bindings.driver import CUresult
from distributed import Client, Future, secede, worker_client

from dask_devctx import Device, DeviceOutOfMemoryError, DevicePlugin, driver, report, timeline
from dask_devctx.cuda.out_of_memory import is_out_of_memory, requested_nbytes
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.errors import DevctxError, DeviceMemoryError, DriverError
from dask_devctx.simulated_array import SimulatedArray
from tests.distributed.devices import started, submit_on

GIB = 2**30


def foreign(module: str, name: str, base: type[Exception], text: str, **fields: Any) -> Exception:
    """An exception as a library that is not here defines it."""
    error = type(name, (base,), {"__module__": module})(text)
    for field, value in fields.items():
        setattr(error, field, value)
    return error


CUPY = foreign(
    "cupy.cuda.memory",
    "OutOfMemoryError",
    MemoryError,
    "Out of memory allocating 1,099,511,627,776 bytes (allocated so far: 0 bytes).",
)
TORCH = foreign(
    "torch",
    "OutOfMemoryError",
    RuntimeError,
    "CUDA out of memory. Tried to allocate 1024.00 GiB. GPU 0 has a total capacity of 139.80 GiB",
)
SAY_SO = [
    CUPY,
    TORCH,
    foreign("cupy_backends.cuda.api.runtime", "CUDARuntimeError", RuntimeError, "no", status=2),
    foreign("cupy_backends.cuda.api.driver", "CUDADriverError", RuntimeError, "no", status=2),
    foreign("numba.cuda.cudadrv.driver", "CudaAPIError", Exception, "[2] no", code=2),
    foreign("numba_cuda.numba.cuda.cudadrv.driver", "CudaAPIError", Exception, "no", code=2),
    MemoryError("std::bad_alloc: out_of_memory: CUDA error at: device_memory.hpp:106"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes."),
    DriverError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", 2),
]
DO_NOT = [
    MemoryError("Unable to allocate 1. TiB for an array"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    foreign("cupy_backends.cuda.api.runtime", "CUDARuntimeError", RuntimeError, "", status=700),
    DriverError("cuMemAlloc", "CUDA_ERROR_ILLEGAL_ADDRESS", 700),
    ValueError("2"),
    foreign("jaxlib._jax", "JaxRuntimeError", RuntimeError, "INTERNAL"),
    foreign("numba.cuda.cudadrv.driver", "CudaAPIError", Exception, "", code="two"),
]


@pytest.mark.parametrize("error", SAY_SO, ids=lambda error: type(error).__module__ + str(error))
def test_is_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)
    outer = RuntimeError("the task failed")
    outer.__cause__ = error
    assert is_out_of_memory(outer)


@pytest.mark.parametrize("error", DO_NOT, ids=lambda error: type(error).__module__ + str(error))
def test_is_something_else(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_an_exception_that_is_its_own_cause_ends_the_search() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    assert not is_out_of_memory(one)


def test_requested_nbytes(machine: SimulatedMachine) -> None:
    assert requested_nbytes(CUPY) == 2**40
    assert requested_nbytes(TORCH) == 2**40
    assert requested_nbytes(SAY_SO[-2]) == 8 * GIB  # JAX
    assert requested_nbytes(DO_NOT[0]) is None
    with Device(0), pytest.raises(DeviceMemoryError) as caught:
        SimulatedArray(2**60, np.uint8)
    assert requested_nbytes(caught.value) == 2**60


def allocate(nbytes: int) -> int:
    current = Device.current()
    SimulatedArray(nbytes, np.uint8)
    return current.device_id


# Counted in the process of the test, where the simulated devices are.
runs: list[int] = []


def run_out_of_memory(times: int) -> int:
    current = Device.current()
    runs.append(current.device_id)
    if len(runs) <= times:
        driver.backend().calls.work.allocate(2**50)
    return current.device_id


@pytest.fixture(autouse=True)
def no_runs() -> None:
    runs.clear()


def occupy(machine: SimulatedMachine, *free: int) -> None:
    """Leave so many bytes on each device."""
    for gpu, nbytes in zip(machine.gpus, free, strict=True):
        gpu.used_memory = gpu.total_memory - nbytes


def test_a_device_that_the_user_named_is_kept(client: Client, machine: SimulatedMachine) -> None:
    occupy(machine, 2**20, 2**30, 2**30, 2**30)
    future = submit_on(client, 0, allocate, 2**21, key=("finalize-sum", 0))
    error = future.exception(timeout=20)
    assert isinstance(error, DeviceOutOfMemoryError)
    assert isinstance(error.__cause__, MemoryError)
    assert (error.device, error.free_nbytes, error.total_nbytes) == ("cuda:0", 2**20, 16 * GIB)
    assert error.attempts == 2
    remedy, where = error.__notes__
    assert "on the host" in remedy
    assert where.startswith("('finalize-sum', 0) ran on cuda:0 of ")
    ((_pid, nbytes),) = error.holders
    assert nbytes == 16 * GIB - 2**20
    assert client.submit(allocate, 2**10).result() in range(4)  # the worker is well


def allocate_in_a_cycle(nbytes: int) -> None:
    cycle: list[object] = [SimulatedArray(nbytes, np.uint8)]
    cycle.append(cycle)


def test_memory_of_garbage_is_freed(client: Client, machine: SimulatedMachine) -> None:
    occupy(machine, *[2**20] * 4)
    gc.disable()
    try:
        submit_on(client, 0, allocate_in_a_cycle, 2**20).result(timeout=20)
        assert machine.gpus[0].used_memory == machine.gpus[0].total_memory
        assert submit_on(client, 0, allocate, 2**20).result(timeout=20) == 0
    finally:
        gc.enable()


async def run_out_of_memory_later(times: int) -> int:
    return run_out_of_memory(times)


@pytest.mark.parametrize("task", [run_out_of_memory, run_out_of_memory_later])
@pytest.mark.parametrize(
    ("client", "retries"), [({"oom_retries": n}, n) for n in (0, 1, 3)], indirect=["client"]
)
def test_as_often_as_the_plugin_says(
    client: Client, tmp_path: Path, task: Any, retries: int
) -> None:
    assert client.submit(task, retries).result(timeout=20) in range(4)
    assert len(runs) == retries + 1
    timeline(client, tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e.get("cat") == "incident"] == ["out-of-memory"] * retries
    runs.clear()
    error = client.submit(task, 9).exception(timeout=20)
    assert isinstance(error, DeviceOutOfMemoryError)
    assert error.attempts == len(runs) == retries + 1


class Greedy:
    def take(self, nbytes: int) -> None:
        raise DeviceMemoryError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", 2, "out of memory")

    async def take_later(self, nbytes: int) -> None:
        self.take(nbytes)


def test_in_a_method_of_an_actor(client: Client) -> None:
    greedy = client.submit(Greedy, actor=True).result()
    for method in (greedy.take, greedy.take_later):
        with pytest.raises(DeviceOutOfMemoryError, match="free") as raised:
            method(2**40).result()
        assert raised.value.attempts == 1
        assert "is not tried again" in raised.value.__notes__[0]
        assert isinstance(raised.value.__cause__, DeviceMemoryError)
    with pytest.raises(DevctxError):
        client.register_plugin(DevicePlugin(devices=[77]))
    with pytest.raises(DeviceOutOfMemoryError):  # it keeps its device, and the worker has none
        greedy.take(2**40).result()


def test_in_client_run_the_error_is_that_of_the_library(client: Client) -> None:
    with pytest.raises(DeviceMemoryError) as raised:
        client.run(Greedy().take, 2**40)
    assert not hasattr(raised.value, "__notes__")


def test_tasks_that_secede_twice(machine: SimulatedMachine) -> None:
    """The last attempt, alone on its device, gives it up for the task that it waits for."""

    def inner(number: int) -> int:
        return number

    def outer(number: int) -> int:
        with worker_client() as client:
            client.submit(inner, number, pure=False).result()
        raise DeviceMemoryError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", 2, "out of memory")

    with started(devices=[0], tasks_per_device=2) as client:
        for future in client.map(outer, range(2), pure=False):
            assert isinstance(future.exception(timeout=20), DeviceOutOfMemoryError)


def test_a_task_that_seceded_is_in_its_pool_again_when_it_is_tried_again(client: Client) -> None:
    assert submit_on(client, 2, lambda: secede() or run_out_of_memory(1)).result(timeout=20) == 2
    assert runs == [2, 2]


# -- what breaks while a task's inputs are brought to its device is the task's, as what it does is


NBYTES = 2**20


# Without room for copies none is made ahead of its task, where nobody would see it fail.
none_ahead = pytest.mark.usefixtures("no_copies_ahead")


@pytest.fixture
def no_copies_ahead() -> Iterator[None]:
    with dask.config.set({"devctx.replica-limit": 0.0}):
        yield


def make() -> SimulatedArray:
    return SimulatedArray.asarray(np.ones(NBYTES, np.uint8))


def made_on(client: Client, device: int) -> Future:
    x = submit_on(client, device, make, pure=False)
    x.result(timeout=20)
    return x


def total(array: SimulatedArray) -> tuple[int, int]:
    return array.device.device_id, int(array.sum())


async def total_later(array: SimulatedArray) -> tuple[int, int]:
    return total(array)


def allocate_beside(array: SimulatedArray, nbytes: int) -> tuple[int, int]:
    SimulatedArray(nbytes, np.uint8)
    return total(array)


def out_of_memory(client: Client) -> dict[str, int]:
    return {
        f"cuda:{n}": one.out_of_memory
        for n, one in enumerate(report(client).devices)
        if one.out_of_memory
    }


@none_ahead
@pytest.mark.parametrize("fails", [2, 100])  # the copy itself is made a second time at once
@pytest.mark.parametrize("task", [total, total_later])
def test_a_copy_that_finds_no_memory_is_tried_again(
    client: Client, machine: SimulatedMachine, task: Any, fails: int
) -> None:
    x = made_on(client, 0)
    status = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    machine.faults.inject("cuMemAlloc", status, times=fails, when=lambda nbytes: nbytes == NBYTES)
    copied = submit_on(client, 1, task, x)
    error = copied.exception(timeout=20)
    if fails == 2:
        assert copied.result() == (1, NBYTES)
        assert out_of_memory(client) == {"cuda:1": 1}
    else:
        assert isinstance(error, DeviceOutOfMemoryError)
        assert (error.device, error.attempts) == ("cuda:1", 2)


def test_room_is_made_when_what_reads_the_copies_is_done(
    client: Client, machine: SimulatedMachine
) -> None:
    """A task's kernels still read its input when it runs out of memory."""
    machine.gpus[1].used_memory = machine.gpus[1].total_memory - 2 * NBYTES
    x, y = made_on(client, 0), made_on(client, 0)
    assert submit_on(client, 1, total, x).result(timeout=20) == (1, NBYTES)
    machine.faults.inject("cuEventQuery", CUresult.CUDA_ERROR_NOT_READY, times=50)
    assert submit_on(client, 1, allocate_beside, y, NBYTES).result(timeout=20) == (1, NBYTES)
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
    copied = submit_on(client, 1, total, x)
    while monitor.calls.failure is None:
        time.sleep(0.01)
    failure = monitor.calls.failure
    assert {*failure.suspects} <= {copied.key, x.key}
    assert "ILLEGAL_ADDRESS" in str(failure.error)
