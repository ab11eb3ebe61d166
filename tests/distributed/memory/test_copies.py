"""Copies on other devices: made once, shared, counted, and dropped in time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
import pytest
from cuda.bindings.driver import CUresult

from dask_devctx import Device, DevicePlugin
from dask_devctx.driver.relaxed import PER_THREAD_STREAM
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.transfer import Stamp, events, hold, nbytes_by_device, release_held, stamp
from dask_devctx.transfer.traffic import TrafficCounts
from dask_devctx.worker.values.accounting import Accounts, allocations, limit_nbytes
from dask_devctx.worker.values.copies import Copies
from dask_devctx.worker.values.spill import _stays_right
from dask_devctx.worker.values.spill_order import in_order
from dask_devctx.worker.values.value import Value
from tests.distributed.devices import work_is_pending
from tests.transfer.shapes import array


def value(whole: Any) -> Value:
    return Value("x", whole, nbytes_by_device(whole))


def get(copies: Copies, one: Value, device: int) -> Any:
    return copies.get(one, one.value, Device(device))


@pytest.fixture
def copies(machine: SimulatedMachine) -> Iterator[Copies]:
    made = Copies(0.5, TrafficCounts())
    yield made
    machine.faults.clear()
    made.close()
    assert release_held() == 0, "something is still held"


def used(machine: SimulatedMachine, device: int) -> int:
    gc.collect()
    release_held()
    return machine.gpus[device].used_memory


def test_the_one_not_used_for_longest_goes_first(machine: SimulatedMachine) -> None:
    machine.gpus[1].total_memory = 40_000
    copies = Copies(0.5, TrafficCounts())
    a, b, c = (value(array(0, 1000)) for _ in "abc")
    for one in (a, b, a, c):
        get(copies, one, 1)
    assert copies.there[Device(1)].nbytes == used(machine, 1) == 16_000
    assert (list(a.copies), list(b.copies)) == ([Device(1)], [])
    copies.close()


@pytest.mark.parametrize("dropped", ["before", "and made again"])
def test_what_is_still_read_outlives_its_being_dropped(
    machine: SimulatedMachine, copies: Copies, dropped: str
) -> None:
    """A task's copy is dropped while the task runs or reads, and perhaps made again for another."""
    pending = work_is_pending(machine)
    pending[0] = False
    x = value(array(0, 1000))
    moved = get(copies, x, 1)
    assert copies.drop(Device(1)) == 8000
    if dropped == "and made again":
        get(copies, x, 1)
    reading = stamp(moved)
    assert reading is not None
    release_held()
    pending[0] = True
    copies.used([moved], Device(1), reading)
    del moved
    kept = 8000 if dropped == "and made again" else 0
    assert used(machine, 1) == 8000 + kept
    pending[0] = False
    assert used(machine, 1) == kept


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("there", ["a copy", "an array", "a list"])
def test_this_thread_waits_for_what_is_not_done(
    machine: SimulatedMachine,
    copies: Copies,
    there: str,
    done: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = value([array(0, 1000)] if there == "a list" else array(0, 1000))
    if there == "a copy":
        get(copies, x, 1)
    x.stamp = Stamp.of_devices([Device(0)])
    work_is_pending(machine)[0] = not done
    before = machine.faults.calls["cuStreamWaitEvent"]
    monkeypatch.setattr(events, "current_streams", lambda device: (PER_THREAD_STREAM,))
    with Device(0), ThreadPoolExecutor(1) as pool:
        pool.submit(get, copies, x, 1 if there == "a copy" else 0).result()
    assert (machine.faults.calls["cuStreamWaitEvent"] > before) is not done


GIB = 2**30


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        ("auto", int(0.8 * 16 * GIB)),
        (0.5, 8 * GIB),
        ("0.25", 4 * GIB),
        (1, 16 * GIB),
        (1.0, 16 * GIB),
        (3 * GIB, 3 * GIB),
        ("12 GiB", 12 * GIB),
        ("64 GiB", 16 * GIB),
        ("30 B", 30),
        ("1B", 1),
        (0, None),
        ("0", None),
        (None, None),
    ],
)
def test_each_spelling_means_bytes_of_a_device(given: Any, nbytes: int | None) -> None:
    option = DevicePlugin(device_memory_limit=given).options.device_memory_limit
    assert limit_nbytes(Device(0), option) == nbytes
    with dask.config.set({"devctx.device-memory-limit": given}):
        assert DevicePlugin().options.device_memory_limit == option


@pytest.mark.parametrize("given", [True, -1, 8, 1.5, "all", "-1 GiB", [1], float("nan"), "1e999"])
def test_other_values_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"device_memory_limit must be 'auto', a fraction"):
        DevicePlugin(device_memory_limit=given)


def test_what_a_broken_context_reads_is_not_held(machine: SimulatedMachine) -> None:
    work_is_pending(machine)
    with Device(0):
        hold(Stamp.of_devices([Device(0)]), array(0, 1000))
    assert release_held() == 1
    machine.faults.clear()
    machine.faults.inject("cuEventQuery", CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, times=10**6)
    assert release_held() == 0


def test_values_of_one_allocation_leave_one_after_the_other(machine: SimulatedMachine) -> None:
    accounts = Accounts({Device(0): 10**6}, threading.RLock())
    whole, other = array(0, 20_000), array(0, 20_000)
    values = {
        name: Value(name, part, nbytes_by_device(part))
        for name, part in (("a", whole[:9000]), ("b", other), ("c", whole[9000:]))
    }
    for one in values.values():
        accounts.count(one, allocations(one.value, one.nbytes))
    assert [one.key for one in in_order(accounts[Device(0)], lambda key: None)] == ["a", "c", "b"]


@pytest.mark.parametrize("module", ["torch._tensor", "cudf.core.frame", "cupy"])
def test_no_form_is_kept_of_what_tasks_change(machine: Any, module: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(type(one := array(0)), "__module__", module)
    assert _stays_right(one) == (module == "cupy")
