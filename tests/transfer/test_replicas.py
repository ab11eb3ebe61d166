"""Copies on other devices: made once, shared, counted, and dropped in time."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import dask
import numpy as np
import pytest
from cuda.bindings import driver as cuda

from dask_devctx import Device, DevicePlugin
from dask_devctx.errors import DeviceMemoryError
from dask_devctx.simulated_array import SimulatedArray
from dask_devctx.transfer import device_of, release_held, stamp, to_device
from dask_devctx.transfer.lifetime import Lifetime
from dask_devctx.transfer.replicas import Replicas, Traffic

pytestmark = pytest.mark.usefixtures("machine")


def array(device=0, n=1000):
    with Device(device):
        return SimulatedArray.asarray(np.arange(n, dtype=float))


@pytest.fixture
def replicas(machine):
    yield Replicas(limit=0.5)
    machine.faults.clear()
    assert release_held() == 0, "something is still held"


def used(machine, device):
    gc.collect()
    release_held()
    return machine.gpus[device].used_memory


def test_made_once_and_shared(replicas):
    x = array()
    first = replicas.get("x", x, 1)
    assert first is replicas.get("x", x, 1)
    assert replicas.get("x", x, 2).device is Device(2)
    assert replicas.get("x", x, 0) is x
    assert replicas.get("n", 5, 1) == 5
    traffic = replicas.traffic[Device(0), Device(1)]
    assert (traffic.nbytes, traffic.copies, traffic.saved) == (8000, 1, 1)
    assert traffic.seconds > 0
    assert list(replicas.traffic) == [(Device(0), Device(1)), (Device(0), Device(2))]


def test_large_copies_are_timed_when_they_are_complete(machine, replicas):
    told = []
    replicas.counts.on_copy = lambda *row: told.append(row)
    large, small = array(n=1 << 18), array(n=1000)
    machine.faults.inject("cuEventQuery", cuda.CUresult.CUDA_ERROR_NOT_READY, times=10**6)
    replicas.get("large", [large, small], 1)
    replicas.get("small", small, 1)
    assert [row[2:3] + row[4:] for row in told] == [(8000, None)]  # nobody waits for the other
    machine.faults.clear()
    replicas.counts.measure()
    source, device, nbytes, begun, seconds = told[1]
    assert (source, device, nbytes) == (Device(0), Device(1), (8 << 18) + 8000)
    assert 0 < seconds < 60
    assert 0 < time.time() - begun < 60
    traffic = replicas.traffic[Device(0), Device(1)]
    assert traffic.measured_nbytes == 8 << 18
    assert 0 < traffic.measured_s <= seconds
    replicas.counts.measure()
    assert len(told) == 2


def test_copies_of_a_device_that_fails_have_no_time(machine, replicas):
    told = []
    replicas.counts.on_copy = lambda *row: told.append(row)
    machine.faults.inject("cuEventQuery", cuda.CUresult.CUDA_ERROR_NOT_READY, times=10**6)
    replicas.get("x", array(n=1 << 18), 1)
    machine.faults.clear()
    machine.faults.inject("cuEventQuery", cuda.CUresult.CUDA_ERROR_LAUNCH_FAILED)
    replicas.counts.measure()
    ((*_, seconds),) = told
    assert seconds is None
    assert replicas.traffic[Device(0), Device(1)].measured_s == 0


def test_copied_once_when_many_ask_at_once(machine, replicas):
    x, go = array(), threading.Barrier(8)
    slow = threading.Event()

    def hold_up(*args):
        slow.wait(0.2)
        return False

    machine.faults.inject("cuMemAlloc", None, when=hold_up)

    def ask():
        go.wait()
        return replicas.get("x", x, 1)

    with ThreadPoolExecutor(8) as pool:
        got = {id(future.result()) for future in [pool.submit(ask) for _ in range(8)]}
    assert len(got) == 1
    assert used(machine, 1) == x.nbytes
    traffic = replicas.traffic[Device(0), Device(1)]
    assert (traffic.copies, traffic.saved) == (1, 7)


def test_a_failed_copy_does_not_stay(machine, replicas):
    x = array()
    machine.gpus[1].total_memory = 100
    for _ in range(2):
        with pytest.raises(DeviceMemoryError):
            replicas.get("x", x, 1)
    machine.gpus[1].total_memory = 2**30
    assert replicas.get("x", x, 1).device is Device(1)
    assert replicas.traffic[Device(0), Device(1)].copies == 1


def test_who_waited_for_a_failed_copy_tries_again(machine, replicas):
    x, started = array(), threading.Event()
    failing = [True]

    def fail(*args):
        started.set()
        waiting.wait(5)
        return failing and failing.pop()

    waiting = threading.Event()
    machine.faults.inject("cuMemAlloc", cuda.CUresult.CUDA_ERROR_UNKNOWN, when=fail)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(replicas.get, "x", x, 1)
        assert started.wait(5)
        second = pool.submit(replicas.get, "x", x, 1)
        waiting.set()
        assert "UNKNOWN" in str(first.exception())
        assert second.result().device is Device(1)


def test_forgotten_with_its_key(machine, replicas):
    x = array()
    for device in (1, 2):
        replicas.get("x", x, device)
    replicas.forget("x")
    replicas.forget("never there")
    assert (used(machine, 1), used(machine, 2), replicas.nbytes(1)) == (0, 0, 0)
    assert replicas.get("x", x, 1).device is Device(1)


def test_forgotten_while_it_is_being_made(machine, replicas):
    def forget(*args):
        replicas.forget("x")
        return False

    machine.faults.inject("cuMemAlloc", None, when=lambda n: n == 8000 and forget())
    x = array()
    moved = replicas.get("x", x, 1)
    assert moved.device is Device(1)
    assert replicas.nbytes(1) == 0
    del moved
    assert used(machine, 1) == 0


def test_what_is_let_go_leaves_no_copy_whoever_asks_late(machine, replicas):
    old, new = array(), array()
    before, now = Lifetime(), Lifetime()
    kept = replicas.get(before, old, 1)
    assert kept is replicas.get(before, old, 1)
    replicas.forget(before)
    late = replicas.get(before, old, 1)
    assert late.device is Device(1)
    assert late is not kept
    assert replicas.nbytes(1) == 0
    assert replicas.get(now, new, 1) is replicas.get(now, new, 1)
    assert replicas.get(before, old, 1) is not replicas.get(now, new, 1)
    assert replicas.nbytes(1) == 8000
    del kept, late
    assert used(machine, 1) == 8000


def test_a_failed_copy_of_what_was_let_go(machine, replicas):
    x, gone = array(), Lifetime()
    replicas.forget(gone)
    machine.gpus[1].total_memory = 100
    with pytest.raises(DeviceMemoryError):
        replicas.get(gone, x, 1)
    machine.gpus[1].total_memory = 2**30
    assert replicas.get(gone, x, 1).device is Device(1)


def test_wanted_where_it_is_not_and_has_room(machine):
    machine.gpus[1].total_memory = 40_000
    replicas = Replicas(limit=0.5)
    assert replicas.wants("x", Device(1), 20_000)
    assert not replicas.wants("x", Device(1), 20_001)
    replicas.get("x", array(), 1)
    assert not replicas.wants("x", Device(1), 0)
    assert replicas.wants("x", Device(2), 8000)
    assert replicas.wants("y", Device(1), 12_000)
    assert not replicas.wants("y", Device(1), 12_001)
    replicas.drop_all(1)
    assert replicas.wants("y", Device(1), 20_000)


def test_the_one_not_used_for_longest_goes_first(machine):
    machine.gpus[1].total_memory = 40_000
    replicas = Replicas(limit=0.5)
    values = {name: array() for name in "abc"}
    for name in "aba":
        replicas.get(name, values[name], 1)
    replicas.get("c", values["c"], 1)
    assert replicas.nbytes(1) == used(machine, 1) == 16_000
    before = replicas.traffic[Device(0), Device(1)]
    replicas.get("a", values["a"], 1)
    replicas.get("b", values["b"], 1)
    after = replicas.traffic[Device(0), Device(1)]
    assert (after.saved - before.saved, after.copies - before.copies) == (1, 1)


def test_without_a_limit_to_fill_nothing_is_kept(machine):
    replicas = Replicas(limit=0)
    x = array()
    assert replicas.get("x", x, 1) is not replicas.get("x", x, 1)
    assert replicas.nbytes(1) == used(machine, 1) == 0


def test_short_of_memory_the_others_are_dropped_first(machine, replicas):
    machine.gpus[1].total_memory = 17_000
    replicas = Replicas(limit=1)
    x, y = array(), array(n=1500)
    replicas.get("x", x, 1)
    assert replicas.get("y", y, 1).device is Device(1)
    assert replicas.nbytes(1) == 12_000
    assert replicas.drop_all(2) == 0
    assert replicas.drop_all() == 12_000
    assert used(machine, 1) == 0


def test_a_copy_is_read_only_and_an_own_one_is_not(replicas):
    x = array()
    shared = replicas.get("x", [x], 1)[0]
    own = to_device(shared, 1, copy=True)
    with Device(1):
        with pytest.raises(ValueError, match="read-only"):
            shared[0] = 1
        with pytest.raises(ValueError, match="read-only"):
            shared += 1
        own[0] = 5
    assert shared.get()[0] == 0
    with Device(0):
        x[0] = 3  # the owner's stays the owner's


def test_what_is_still_read_outlives_its_being_dropped(machine, replicas):
    pending = [False]
    machine.faults.inject(
        "cuEventQuery",
        cuda.CUresult.CUDA_ERROR_NOT_READY,
        times=99,
        when=lambda event: pending[0],
    )
    x = array()
    moved = replicas.get("x", x, 1)
    reading = stamp(moved)
    release_held()
    pending[0] = True
    replicas.used([("x", moved)], 1, reading)
    replicas.used([("x", moved)], 1, None)
    del moved
    replicas.forget("x")
    assert used(machine, 1) == 8000
    pending[0] = False
    assert used(machine, 1) == 0


@pytest.mark.parametrize("again", [False, True])
def test_what_is_read_after_it_was_dropped_is_held(machine, replicas, again):
    """A task's copy is dropped while the task runs, and perhaps made anew for another."""
    pending = [False]
    machine.faults.inject(
        "cuEventQuery",
        cuda.CUresult.CUDA_ERROR_NOT_READY,
        times=99,
        when=lambda event: pending[0],
    )
    x = array()
    moved = replicas.get("x", x, 1)
    assert replicas.drop_all() == 8000
    if again:
        replicas.get("x", x, 1)
    release_held()
    pending[0] = True
    replicas.used([("x", moved)], 1, stamp(moved))
    del moved
    assert used(machine, 1) == (16_000 if again else 8000)
    pending[0] = False
    assert used(machine, 1) == (8000 if again else 0)


@pytest.mark.parametrize("done", [False, True])
def test_another_threads_streams_wait_for_a_copy_that_is_not_done(machine, replicas, done):
    if not done:
        machine.faults.inject("cuEventQuery", cuda.CUresult.CUDA_ERROR_NOT_READY, times=99)
    x = array()
    replicas.get("x", x, 1)
    before = machine.faults.calls["cuStreamWaitEvent"]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(replicas.get, "x", x, 1).result()
    assert machine.faults.calls["cuStreamWaitEvent"] == before + (not done)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("kind", ["array", "list"])
def test_what_is_there_already_is_waited_for_until_it_is_made(machine, replicas, kind, done):
    if not done:
        machine.faults.inject("cuEventQuery", cuda.CUresult.CUDA_ERROR_NOT_READY, times=99)
    x = array() if kind == "array" else [array()]
    made = stamp(x)
    made.done()
    asked = machine.faults.calls["cuEventQuery"]
    before = machine.faults.calls["cuStreamWaitEvent"]
    with Device(0):
        assert replicas.get("x", x, 0, after=made) is x
    assert machine.faults.calls["cuStreamWaitEvent"] == before + (not done)
    assert not done or machine.faults.calls["cuEventQuery"] == asked  # once done, for ever


def test_the_limit_is_configured_and_checked():
    with dask.config.set({"devctx.replica-limit": 0.125}):
        assert DevicePlugin().replica_limit == 0.125
    for wrong in (-0.1, 1.5, "much", True):
        changed = dask.config.set({"devctx.replica-limit": wrong})
        with changed, pytest.raises(ValueError, match=r"replica_limit.*got"):
            DevicePlugin()
    with pytest.raises(ValueError, match=r"limit.*got"):
        Replicas(limit=1.5)


def test_traffic_is_a_snapshot(replicas):
    x = array()
    replicas.get("x", x, 1)
    replicas.traffic[Device(0), Device(1)].nbytes = 0
    assert replicas.traffic[Device(0), Device(1)].nbytes == 8000
    assert Traffic() == Traffic(0, 0, 0, 0.0)


def test_a_value_in_several_places_is_counted_from_each(replicas):
    moved = replicas.get("xy", [array(0), array(2), array(1)], 1)
    assert device_of(moved) is Device(1)
    pairs = {pair: traffic.nbytes for pair, traffic in replicas.traffic.items()}
    assert pairs == {(Device(0), Device(1)): 8000, (Device(2), Device(1)): 8000}
