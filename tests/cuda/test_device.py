"""``Device``: one object per GPU, what it says, and what it leaves alone."""

from __future__ import annotations

import copy
import operator
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import cloudpickle
import pytest

from dask_devctx import Context, Device, devices, driver
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.errors import DeviceNotFoundError

GIB = 2**30


# -- one object per GPU


def test_one_object_per_gpu_and_process(machine):
    barrier = threading.Barrier(8)

    def enter(_):
        barrier.wait()
        with Device(2) as device:
            return id(device)

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(enter, range(8))) == {id(Device(2))}
    assert machine.gpus[2].primary_retained == 1, "its primary context is retained once"
    assert Device(2) is devices()[2]
    assert len({Device(n) for n in (0, 1, 2, 3, 2, 1)}) == 4


def test_has_no_subclasses(machine):
    with pytest.raises(TypeError, match="Device cannot be subclassed"):
        type("Mine", (Device,), {})
    assert type(Device(3)) is Device


# -- what none means


def test_none_is_the_current_one_else_the_first(machine):
    assert Device() is Device(0) is Device(None)
    with Device(2):
        assert Device() is Device(2)


def test_none_without_devices(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices() == ()
    with pytest.raises(DeviceNotFoundError, match="CUDA shows this process no device"):
        Device()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("2,2", "a device that is named twice hides every device"),
        ("0,9,1", "the entry '9' hides itself and all after it: the machine has 4 devices"),
        ("cuda:1", "it is not an index"),
    ],
)
def test_says_why_the_environment_hides_a_device(machine, monkeypatch, value, why):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    for which in (1, machine.gpus[1].uuid):
        with pytest.raises(DeviceNotFoundError) as caught:
            Device(which)
        assert why in str(caught.value)
        assert repr(value) in str(caught.value)


# -- the current one


def test_current_is_none_before_anything_used_cuda(machine):
    assert Device.current() is None
    assert not machine.faults.calls["cuInit"]


def test_current_follows_other_libraries(machine):
    calls = driver.backend().driver()
    handle = calls.primary_retain(3)
    calls.set_current(handle)
    assert Device.current() is Device(3)
    own = calls.create(1, 0)  # not a primary one
    assert Device.current() is Device(1)
    calls.destroy(own)
    assert Device.current() is Device(3)
    calls.set_current(0)
    assert Device.current() is None


# -- in another process


@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_pickles_by_uuid(machine, monkeypatch, module):
    device = Device(2)
    sent = module.dumps(device)
    assert pickle.loads(sent) is device
    assert copy.copy(device) is copy.deepcopy(device) is device
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2")
    other = SimulatedMachine(4, host="test")
    with driver.use(other.backend()):
        there = pickle.loads(sent)
        assert there.uuid == device.uuid
        assert there.device_id == 1


def test_repr_is_one_before_and_after_it_is_used(machine):
    device = Device(2)
    expected = f"<Device cuda:2 ({machine.gpus[2].uuid})>"
    assert repr(device) == expected
    assert machine.faults.calls["cuInit"] == 0
    assert device.name
    assert repr(device) == expected
    with device:
        assert repr(device) == expected


def test_can_be_held_where_the_gpu_is_not(machine):
    sent = pickle.dumps(Device(2))
    with driver.use(SimulatedMachine(4, host="elsewhere").backend()):
        device = pickle.loads(sent)
        assert device.uuid in repr(device)
        assert pickle.loads(pickle.dumps(device)) is device
        for use in (lambda: device.device_id, lambda: device.name, device.set_current, device.sync):
            with pytest.raises(DeviceNotFoundError, match="No device of this machine"):
                use()
        with pytest.raises(DeviceNotFoundError, match="No device of this machine"), device:
            pytest.fail("it is not here")


def test_tokenizes_by_uuid(machine):
    from dask.base import tokenize

    assert tokenize(Device(1)) == tokenize(pickle.loads(pickle.dumps(Device(1))))
    assert tokenize(Device(1)) != tokenize(Device(2))


# -- what it says, on both drivers


def test_properties(backend):
    device = Device(0)
    assert device.device_id == 0
    assert device.name
    assert device.uuid == device.info.uuid
    assert device.compute_capability.major >= 5
    major, minor = device.compute_capability
    assert device.arch == f"{major}{minor}"
    assert device.pci_bus_id.count(":") == 2
    free, total = device.memory_info
    assert 0 < free <= total == device.info.total_memory
    assert device.context is device.primary_context
    assert not device.can_access_peer(0)
    assert not device.primary_context.is_active  # none of it created a context


def test_peers(machine):
    machine.gpus[0].peers = frozenset({1})
    assert Device(0).can_access_peer(1)
    assert Device(0).can_access_peer(Device(1))
    assert not Device(0).can_access_peer("cuda:2")
    with pytest.raises(DeviceNotFoundError):
        Device(0).can_access_peer(9)


def test_memory_info_follows_allocations(machine):
    calls = driver.backend().driver()
    with Device(1):
        pointer = calls.work.allocate(3 * GIB)
        assert Device(1).memory_info == (13 * GIB, 16 * GIB)
        assert Device(0).memory_info.free == 16 * GIB
        calls.work.free(pointer)


def caller_states(backend):
    """Put this thread into each state that a caller's can be in; yields the current handle."""
    calls = backend.driver()
    yield 0
    primary = calls.primary_retain(0)
    calls.set_current(primary)
    yield primary
    calls.set_current(0)
    assert calls.driver.cuDevicePrimaryCtxRelease(0)[0] == 0
    own = calls.create(0, 0)
    yield own
    calls.destroy(own)


def test_nothing_moves_the_callers_context(backend):
    device = Device(devices()[-1].device_id)
    for handle in caller_states(backend):
        for use in (
            device.sync,
            lambda: device.run(int),
            lambda: device.primary_context.handle,
            lambda: device.can_access_peer(0),
            lambda: (device.memory_info, device.name, device.arch, device.uuid, str(device)),
            Device.current,
            Device,
            devices,
        ):
            use()
            assert backend.calls.current() == handle


# -- what it does


def test_sync_and_synchronize_are_one(machine):
    with Device(1), closing(Context(1)) as own:
        for scope in (Device(1), Device(1).primary_context, own):
            for wait in (scope.sync, scope.synchronize):
                machine.faults.calls.clear()
                wait()
                assert machine.faults.calls["cuCtxSynchronize"] == 1


def test_is_the_ordinal_where_a_number_is_needed(machine):
    assert int(Device(2)) == operator.index(Device(2)) == 2
    assert ["a", "b", "c"][Device(2)] == "c"
    assert f"{Device(2).__index__()}" == "2"
    assert Device(2) != 2  # it is no number: another UUID may have this ordinal elsewhere
    assert Device(Device(2)) is Device(2)
