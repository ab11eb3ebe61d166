"""What can be missing or broken on a machine: each a clear error, or what still works."""

from __future__ import annotations

import pickle
from typing import Any

import dask
import pynvml
import pytest
from cuda.bindings.driver import CUresult
from distributed import Client

from dask_devctx import (
    Device,
    DeviceFailedError,
    DeviceNotFoundError,
    DriverError,
    DriverUnavailableError,
    LocalDeviceCluster,
    devices,
    driver,
)
from dask_devctx.cuda.discovery import inventory
from dask_devctx.driver import statuses
from dask_devctx.driver.backends import Backend
from dask_devctx.driver.simulated import SimulatedMachine


def test_statuses_are_the_drivers() -> None:
    for table in (statuses.STICKY, statuses.GONE):
        for code, name in table.items():
            assert CUresult(code).name == name
    assert int(CUresult.CUDA_ERROR_OUT_OF_MEMORY) == statuses.OUT_OF_MEMORY
    assert not statuses.failed(statuses.OUT_OF_MEMORY)
    for code in statuses.REMEDIES:
        assert CUresult(code)


@pytest.mark.parametrize("code", sorted(statuses.STICKY))
def test_every_sticky_status_is_found_by_the_probe(code: int, machine: SimulatedMachine) -> None:
    with Device(0):
        machine.faults.poison(CUresult(code))
        with pytest.raises(DriverError) as caught:
            driver.backend().calls.work.probe()
    assert statuses.failed(caught.value.code)


def test_a_fault_in_no_function_is_refused(machine: SimulatedMachine) -> None:
    with pytest.raises(ValueError, match="no 'cuMemAloc'; it has cuMemAlloc"):
        machine.faults.inject("cuMemAloc", 2)


def test_a_gpu_that_is_lost_from_the_start_is_left_out(machine: SimulatedMachine) -> None:
    lost = machine.gpus[1]
    lost.lost = True
    assert [device.uuid for device in devices()] == [
        gpu.uuid for gpu in machine.gpus if gpu is not lost
    ]
    assert any("index 1" in problem for problem in inventory(driver.backend()).problems)
    with pytest.raises(DeviceNotFoundError):
        Device(lost.uuid).name  # noqa: B018


def reset() -> None:
    machine = driver.backend().machine
    assert machine is not None
    machine.faults.inject("cuMemFree", CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED)  # the probe


def test_a_task_that_resets_its_device_ends_its_worker() -> None:
    with (
        LocalDeviceCluster(n_workers=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        dask.annotate(device=1),
    ):
        error = client.submit(reset).exception(timeout=30)
        assert isinstance(error, DeviceFailedError)
        assert "cudaDeviceReset() and numba.cuda.close()" in str(error)
        assert "compute-sanitizer" not in str(error)
        assert client.submit(int, pure=False).result(timeout=30) == 0


def lose(which: int) -> None:
    machine = driver.backend().machine
    assert machine is not None
    machine.gpus[which].lost = True


@pytest.mark.long
def test_a_gpu_that_falls_off_the_bus_ends_its_worker() -> None:
    with (
        LocalDeviceCluster(n_workers=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        with dask.annotate(device=1):
            error = client.submit(lose, 1).exception(timeout=30)
        assert isinstance(error, DeviceFailedError)
        assert error.lost
        assert (error.device, error.code) == ("cuda:1", 999)
        assert "fell off the bus" in str(error)
        assert client.submit(sum, [1, 2]).result(timeout=30) == 3


@pytest.mark.parametrize(
    "error", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED]
)
def test_without_nvml_the_driver_answers(machine: SimulatedMachine, error: int) -> None:
    machine.nvml.error = error
    found = devices()
    assert [device.uuid for device in found] == [gpu.uuid for gpu in machine.gpus]
    assert inventory(driver.backend()).source == "driver"
    assert found[0].memory_info.total == machine.gpus[0].total_memory


def test_nvml_that_dies_later_is_not_missed(machine: SimulatedMachine) -> None:
    first = devices()[0]
    assert first.memory_info.free == machine.gpus[0].total_memory
    machine.nvml.error = pynvml.NVML_ERROR_UNKNOWN
    assert first.memory_info.free == machine.gpus[0].total_memory
    with (
        LocalDeviceCluster(processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        assert client.submit(sum, [1, 2]).result() == 3


@pytest.mark.parametrize("mode", ["exclusive", "prohibited"])
def test_a_gpu_that_another_process_has_for_itself(machine: SimulatedMachine, mode: str) -> None:
    machine.gpus[0].compute_mode = mode
    with pytest.raises(DriverError, match="Exclusive_Process") as caught, Device(0):
        pass
    assert caught.value.status == "CUDA_ERROR_DEVICE_UNAVAILABLE"
    with Device(1):
        pass
    with (
        LocalDeviceCluster(processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        dask.annotate(device=0),
    ):
        error = client.submit(sum, [1, 2]).exception(timeout=20)
    assert isinstance(error, DriverError)  # of this task alone: the process is healthy


class _Lacking:
    """A driver that is older than its bindings: they have names for what it does not have."""

    def __init__(self, inner: Any, *missing: str) -> None:
        self._inner = inner
        self._missing = missing

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._inner, name)
        if name not in self._missing:
            return function

        def missing(*args: Any) -> Any:
            raise RuntimeError(f'Function "{name}" not found')

        missing.__name__ = name
        return missing


def test_a_driver_older_than_the_bindings(machine: SimulatedMachine) -> None:
    old = _Lacking(machine.driver, "cuDevicePrimaryCtxRetain")
    with driver.use(Backend(old, machine.nvml, machine)):
        with pytest.raises(DriverUnavailableError, match=r"CUDA 13\.0") as caught, Device(0):
            pass
        assert "cuda-bindings" in caught.value.remedy


def test_no_driver_at_all(machine: SimulatedMachine) -> None:
    machine.nvml.error = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    none = _Lacking(machine.driver, "cuInit", "cuDriverGetVersion", "cuCtxGetCurrent")
    with driver.use(Backend(none, machine.nvml, machine)):
        with pytest.raises(DriverUnavailableError) as caught:
            devices()
        assert driver.SIMULATED_DEVICES_VARIABLE in caught.value.remedy
        with pytest.raises(DriverUnavailableError):
            Device(0)


def test_the_parent_of_mig_instances_is_hidden_and_they_are_there(
    machine: SimulatedMachine,
) -> None:
    parent = machine.gpus[0]
    parent.mig = tuple(f"MIG-00000000-0000-0000-0000-00000000000{n}" for n in range(2))
    with pytest.raises(DeviceNotFoundError):
        Device(parent.uuid).name  # noqa: B018
    assert parent.uuid not in {device.uuid for device in devices()}


@pytest.mark.parametrize(
    "error",
    [
        DeviceFailedError("cuda:0", "GPU-1", "CUDA_ERROR_ASSERT", 710, ["a on cuda:0"], True, True),
        DeviceFailedError("cuda:0", "GPU-1", "CUDA_ERROR_ASSERT", 710, [f"t{n}" for n in range(9)]),
        DeviceFailedError("cuda:0", "GPU-1", "CUDA_ERROR_ASSERT", 710, ["a", "b"], watched=True),
    ],
)
def test_the_error_pickles_with_its_fields(error: DeviceFailedError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert vars(again) == vars(error)
    assert str(again) == str(error)
