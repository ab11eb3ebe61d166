"""What can be missing or broken on a machine: each a clear error, or what still works."""

from __future__ import annotations

import gc
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
import numpy as np
import psutil
import pynvml
import pytest
from cuda.bindings.driver import CUresult
from distributed import Client, LocalCluster
from distributed.utils_test import poll_for

from dask_devctx import (
    Context,
    Device,
    DeviceFailedError,
    DeviceOutOfMemoryError,
    DevicePlugin,
    DriverError,
    DriverUnavailableError,
    SimulatedArray,
    devices,
    driver,
)
from dask_devctx.dask_internals.scheduler import SOME_IDLE
from dask_devctx.driver import statuses
from dask_devctx.driver.backends import Backend
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.scheduler.messages import ANNOUNCE, CLAIM, FAILED, HISTORY, LATE, RECHUNK, REFUSE
from dask_devctx.worker.failures.running_calls import Call, Calls
from tests.conftest import Replacing
from tests.distributed.devices import started


def test_statuses_are_the_drivers() -> None:
    for table in (statuses.STICKY, statuses.GONE):
        for code, name in table.items():
            assert CUresult(code).name == name
    assert int(CUresult.CUDA_ERROR_OUT_OF_MEMORY) == statuses.OUT_OF_MEMORY
    assert not statuses.failed(statuses.OUT_OF_MEMORY)
    for code in statuses.REMEDIES:
        assert CUresult(code)


@pytest.mark.parametrize("code", [*statuses.STICKY, 46, 101, 201, 709, 805, 806, 999])
def test_every_failure_is_found_by_the_probe(code: int, machine: SimulatedMachine) -> None:
    with Device(0):
        machine.faults.poison(CUresult(code))
        with pytest.raises(DriverError) as caught:
            driver.backend().calls.work.look()
    assert statuses.failed(caught.value.code)


def test_a_mark_is_of_its_device_whatever_a_task_left_current(machine: SimulatedMachine) -> None:
    work = Calls().works[Device(0)]
    with Device(0):
        for _ in range(2):
            Device(1).set_current()
            work.left.append((next(work.numbers), "task"))
            work.look(mark=True)
    work.look(mark=False)
    assert not work.left, "no task is a suspect any more"


def test_a_look_is_at_its_device_whatever_a_task_left_current(machine: SimulatedMachine) -> None:
    calls, beside, own = Calls(), Call(), Context(0)
    beside.devices = (Device(0),)
    calls.running.add(beside)  # so that nothing is marked
    with Device(0):
        own.set_current()
        with ThreadPoolExecutor(1) as other:
            other.submit(own.close).result()
        calls.works[Device(0)].look(mark=True)
        assert Device.current() is Device(0)


def reset() -> None:
    driver.backend().machine.faults.poison(CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED)


def lose() -> None:
    driver.backend().machine.gpus[1].lost = True


@pytest.mark.parametrize(
    ("breaks", "lost", "said"),
    [
        (reset, False, r"cudaDeviceReset\(\) and numba\.cuda\.close\(\)"),
        pytest.param(lose, True, "fell off the bus", marks=pytest.mark.long),
    ],
)
def test_a_task_that_loses_its_device_ends_its_worker(breaks: Any, lost: bool, said: str) -> None:
    with started(n_workers=1, processes=True) as client, dask.annotate(device=1):
        error = client.submit(breaks).exception(timeout=30)
        assert isinstance(error, DeviceFailedError)
        assert (error.device, error.lost) == ("cuda:1", lost)
        assert re.search(said, str(error))
        assert "compute-sanitizer" not in str(error)
        assert client.submit(int, pure=False).result(timeout=30) == 0


def test_nvml_that_dies_later_is_not_missed(machine: SimulatedMachine) -> None:
    first = devices()[0]
    assert first.memory_info.free == machine.gpus[0].total_memory
    machine.nvml.error = pynvml.NVML_ERROR_UNKNOWN
    assert first.memory_info.free == machine.gpus[0].total_memory
    with started() as client:
        assert client.submit(sum, [1, 2]).result() == 3


@pytest.mark.parametrize("mode", ["exclusive", "prohibited"])
def test_a_gpu_that_another_process_has_for_itself(machine: SimulatedMachine, mode: str) -> None:
    machine.gpus[0].compute_mode = mode
    with pytest.raises(DriverError, match="Exclusive_Process") as caught, Device(0):
        pass
    assert caught.value.status == "CUDA_ERROR_DEVICE_UNAVAILABLE"
    with Device(1):
        pass
    with started() as client, dask.annotate(device=0):
        error = client.submit(sum, [1, 2]).exception(timeout=20)
    assert isinstance(error, DriverError)  # of this task alone: the process is healthy


def test_a_driver_older_than_the_bindings(machine: SimulatedMachine) -> None:
    """They have names for what it does not have."""

    def cuDevicePrimaryCtxRetain(*args: Any) -> Any:
        raise RuntimeError('Function "cuDevicePrimaryCtxRetain" not found')

    old = Replacing(machine.driver, cuDevicePrimaryCtxRetain=cuDevicePrimaryCtxRetain)
    with driver.use(Backend(old, machine.nvml, machine)):
        with pytest.raises(DriverUnavailableError, match=r"CUDA 13\.0") as caught, Device(0):
            pass
        assert "cuda-bindings" in str(caught.value)


def run_out_of_memory(array: SimulatedArray) -> None:
    twice = array * 2
    raise MemoryError(f"std::bad_alloc: out_of_memory: CUDA error at {len(twice)}")


async def run_out_of_memory_later(array: SimulatedArray) -> None:
    run_out_of_memory(array)


@pytest.mark.parametrize("function", [run_out_of_memory, run_out_of_memory_later])
def test_a_task_without_memory_has_no_arrays_before_garbage_is_collected(
    client: Client, machine: SimulatedMachine, function: Any
) -> None:
    gc.collect()
    gc.disable()
    try:
        made = client.submit(SimulatedArray.asarray, np.arange(1000))
        failed = client.submit(function, made)
        with pytest.raises(DeviceOutOfMemoryError, match="has not enough memory"):
            failed.result()
        del made, failed
        poll_for(lambda: not any(gpu.used_memory for gpu in machine.gpus), timeout=5)
    finally:
        gc.enable()


def open_to_others(cluster: LocalCluster) -> list[set[Any]]:
    """Return the ports, and what the worker and the scheduler answer."""
    (worker,) = cluster.workers.values()
    connections = psutil.Process().net_connections(kind="inet")
    listening = {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}
    servers = worker, cluster.scheduler
    return [listening, *(set(they) for s in servers for they in (s.stream_handlers, s.handlers))]


def test_no_port_is_added_and_the_servers_are_only_told_of_devices_and_memory() -> None:
    with started(LocalCluster, n_workers=1) as client:
        *unchanged, scheduler = open_to_others(client.cluster)
        ports, streams, worker, scheduler_streams = unchanged
        more = streams | {SOME_IDLE}
        told = scheduler | {ANNOUNCE, REFUSE, FAILED, CLAIM, LATE, RECHUNK}
        client.register_plugin(DevicePlugin())
        assert client.submit(sum, [1, 2]).result() == 3
        added = worker | {"devctx_ipc_close", HISTORY}
        assert open_to_others(client.cluster) == [ports, more, added, scheduler_streams, told]
        client.unregister_worker_plugin("devctx")
        assert open_to_others(client.cluster) == [*unchanged, told]
