"""Which devices are found, and in which order."""

from __future__ import annotations

import sys
import traceback
import types

import pynvml
import pytest

from dask_devctx import Device, devices, driver
from dask_devctx.cuda import discovery
from dask_devctx.driver.backends import Backend
from dask_devctx.errors import DriverUnavailableError, VisibleDevicesError
from tests.conftest import Replacing


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


def refuse(code):
    def function(*args):
        raise pynvml.NVMLError(code)

    return function


def use_nvml(machine, **replaced):
    return driver.use(Backend(machine.driver, Replacing(machine.nvml, **replaced), machine))


def found(machine):
    """The machine's GPUs by index, as they are listed now."""
    uuids = [gpu.uuid for gpu in machine.gpus]
    return [uuids.index(device.uuid) for device in devices()]


def test_as_the_driver_shows_them(backend):
    """NVML with the rule, and the driver, agree on every device, its name and its address."""
    inventory = discovery.inventory(backend)
    calls = backend.driver()
    assert calls.device_count() == len(inventory.devices)
    for info in inventory.devices:
        assert discovery.driver_ordinal(backend, info) == info.device_id
        assert discovery.by_driver_ordinal(backend, info.device_id) == info
        assert calls.device_name(info.device_id) == info.name
        assert calls.device_pci_bus_id(info.device_id) == info.pci_bus_id
        assert calls.device_compute_capability(info.device_id) == info.compute_capability


def test_touches_no_driver(machine):
    assert [d.device_id for d in devices()] == [0, 1, 2, 3]
    assert devices()[1].memory_info.total == 16 * 2**30
    assert not machine.faults.calls


def test_a_change_before_cuda_starts_is_followed(machine, monkeypatch):
    device = Device(2)
    assert device.device_id == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert found(machine) == [2]
    assert device.device_id == 0
    with device:
        assert Device.current() is device


def test_another_library_started_cuda_first(machine, monkeypatch):
    """The environment now and the driver then disagree: an error, never another device."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    machine.driver.cuInit(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    device, hidden = devices()
    with pytest.raises(VisibleDevicesError, match=r"3,1.* has as 1 the device cuda:0"):
        device.set_current()
    with pytest.raises(VisibleDevicesError, match="does not show"):
        hidden.set_current()


# -- several kinds of GPU


def test_the_driver_orders_several_kinds(machine):
    for gpu in machine.gpus[:2]:
        gpu.name, gpu.compute_capability = "Old GPU", (7, 5)

    def cuInit(flags):
        """Put the machine's last two devices first, as CUDA does with faster ones."""
        result = machine.driver.cuInit(flags)
        machine.driver._visible.sort(key=lambda shown: shown[0].compute_capability, reverse=True)
        return result

    with driver.use(Backend(Replacing(machine.driver, cuInit=cuInit), machine.nvml, machine)):
        assert found(machine) == [2, 3, 0, 1]
        assert [device.info.nvml_index for device in devices()] == [2, 3, 0, 1]
        assert Device(0).name == "Simulated GPU"


# -- NVML is missing, partial, or its GPUs are


def test_without_nvml_the_driver_answers(machine):
    with use_nvml(machine, nvmlInit=refuse(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)):
        inventory = discovery.inventory(driver.backend())
        assert "NVML does not answer" in inventory.problems[0]
        info = inventory.devices[2]
        assert info.uuid == machine.gpus[2].uuid
        assert (info.nvml_index, info.cpu_affinity) == (None, None)
        assert info.total_memory == 16 * 2**30
        assert machine.gpus[2].primary is None
        assert Device(2).memory_info.free == 16 * 2**30  # the driver's, in its primary context


def test_with_neither_nvml_nor_driver(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with use_nvml(machine, nvmlInit=refuse(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)):
        with pytest.raises(DriverUnavailableError) as caught:
            devices()
        assert "NVML does not answer" in str(caught.value)
        assert "CUDA_VISIBLE_DEVICES=''" in str(caught.value)
        assert "DASK_DEVCTX__SIMULATED_DEVICES=4" in str(caught.value)
        # A newcomer's first error is one traceback, without those of the drivers.
        assert "".join(traceback.format_exception(caught.value)).count("Traceback (most") == 1


@pytest.mark.parametrize("simulated", ["0", "4"])
@pytest.mark.parametrize("module", ["cuda.bindings", "pynvml"])
def test_without_the_bindings(module, simulated, child):
    def ask(module):
        sys.modules[module] = None
        from dask_devctx import Context, Device, DriverUnavailableError, devices

        for use in (Device, devices, Device.current, Context.current):
            try:
                use()
            except DriverUnavailableError as error:
                print(error)

    done = child(ask, module, env={"DASK_DEVCTX__SIMULATED_DEVICES": simulated})
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert line.startswith("cuda-bindings and nvidia-ml-py cannot be loaded: ")
        assert module in line
        assert "Install both for this Python" in line


def test_what_nvml_leaves_open_is_none(machine):
    no = refuse(pynvml.NVML_ERROR_NOT_SUPPORTED)
    with use_nvml(
        machine,
        nvmlDeviceGetMemoryInfo=no,
        nvmlDeviceGetCpuAffinity=no,
        nvmlDeviceGetCudaComputeCapability=no,
        nvmlDeviceGetName=no,
        nvmlDeviceGetPciInfo=no,
        nvmlDeviceGetMigMode=no,
    ):
        device = Device(1)
        assert device.info._asdict() == {
            "device_id": 1,
            "uuid": machine.gpus[1].uuid,
            "nvml_index": 1,
            "name": None,
            "pci_bus_id": None,
            "compute_capability": None,
            "total_memory": None,
            "cpu_affinity": None,
        }
        assert device.compute_capability == (9, 0)  # the driver knows it without a context
        assert machine.gpus[1].primary is None


def test_a_bus_id_is_written_as_cuda_writes_it(machine):
    info = types.SimpleNamespace(busId="00000010:0A:00.0")
    with use_nvml(machine, nvmlDeviceGetPciInfo=lambda handle: info):
        assert Device(1).pci_bus_id == "0010:0a:00.0"


# -- MIG

M0, M1 = (f"MIG-{n}0000000-0000-0000-0000-000000000000" for n in "12")


@pytest.mark.parametrize(
    ("visible", "hidden"), [(None, ["it is hidden beside whole GPUs"]), (M0, [])]
)
def test_what_is_said_of_gpus_in_mig_mode(machine, monkeypatch, visible, hidden):
    machine.gpus[1].mig, machine.gpus[2].mig = (M0, M1), ()
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    said = discovery.inventory(driver.backend()).problems
    assert [text.rpartition(": ")[2] for text in said] == [*hidden, "it has no instance"]


def test_mig_instance(machine, monkeypatch):
    machine.gpus[2].mig = (M0, M1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", M1)
    (device,) = devices()
    assert device is Device(M1) is Device("MIG-2") is Device(0)
    assert device.name == "Simulated GPU MIG"
    assert device.info.nvml_index == 2
    assert device.memory_info.total == 16 * 2**30
    with device:
        assert Device.current() is device
