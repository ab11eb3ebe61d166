"""Streams that only do copies."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from cuda.bindings.driver import CUresult

from dask_devctx import Device, driver
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.driver.work import LEGACY_STREAM
from dask_devctx.transfer.ipc import lanes
from tests.addressed import AddressedDriver, addressed


@pytest.mark.parametrize("function", ["cuStreamCreate", "cuEventCreate"])
def test_a_lane_can_be_had_while_the_driver_waits_for_another(
    machine: SimulatedMachine, function: str
) -> None:
    """Where a stream is full, it may wait for the device. The event loop takes lanes, too."""
    waiting, go_on, taken = threading.Event(), threading.Event(), threading.Event()

    def wait(*_: object) -> bool:
        waiting.set()
        go_on.wait(20)
        return False

    def share() -> None:
        with Device(0):
            lanes.shared(Device(0), "in")

    def take() -> None:
        with Device(0):
            lanes.give(lanes.take(Device(0)))
        taken.set()

    take()
    taken.clear()
    machine.faults.inject(function, CUresult.CUDA_ERROR_UNKNOWN, when=wait)
    threads = [threading.Thread(target=share), threading.Thread(target=take)]
    threads[0].start()
    assert waiting.wait(10)
    threads[1].start()
    in_time = taken.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert in_time


@pytest.fixture
def calls(machine: SimulatedMachine) -> Iterator[AddressedDriver]:
    """A driver that tells addresses: a call by address keeps Python's lock."""
    pytest.importorskip("dask_devctx.driver._scope")
    with driver.use(addressed(machine)), Device(0):
        assert isinstance(machine.driver, AddressedDriver)
        yield machine.driver


def _enqueued(calls: AddressedDriver, copies: int | None) -> list[str]:
    """Return the calls by address that a copy in a lane takes."""
    work = Device(0)._backend.calls.work
    memory = work.allocate(1024)
    lane = lanes.take(Device(0), copies)
    calls.enqueued.clear()
    lane.after_current_streams()
    lane.copy(memory + 512, memory, 8)
    lane.mark()
    assert lane.done()
    lanes.finish(lane)
    work.free(memory)
    return calls.enqueued


EACH = ["cuEventRecord", "cuStreamWaitEvent", "cuMemcpyAsync", "cuEventRecord"]


def test_a_few_copies_keep_pythons_lock_where_no_stream_is_full(calls: AddressedDriver) -> None:
    assert _enqueued(calls, 1) == EACH
    asked = [("cuStreamIsCapturing", LEGACY_STREAM), ("cuStreamQuery", LEGACY_STREAM)]
    assert calls.asked == asked
    assert _enqueued(calls, lanes.FEW + 1) == []
    assert _enqueued(calls, None) == []
    calls.busy.add(LEGACY_STREAM)
    assert _enqueued(calls, 1) == []


def test_a_stream_is_not_asked_while_it_would_spoil_a_graph(calls: AddressedDriver) -> None:
    calls.captured.add(LEGACY_STREAM)
    assert _enqueued(calls, 1) == []
    assert calls.asked == [("cuStreamIsCapturing", LEGACY_STREAM)]


def test_a_device_whose_work_was_done_a_moment_ago_is_not_asked(calls: AddressedDriver) -> None:
    device = Device(0)
    work = device._backend.calls.work
    event = work.event_create()
    work.look(event, device._handle, record=True)
    assert work.look(event, device._handle, query=True) == (True, False)
    assert _enqueued(calls, 1) == EACH
    assert calls.asked == []


@pytest.mark.parametrize("name", ["cuStreamIsCapturing", "cuStreamQuery"])
def test_a_driver_that_cannot_be_asked_has_its_calls_through_the_bindings(
    calls: AddressedDriver, name: str
) -> None:
    calls.leave_out(name)
    assert _enqueued(calls, 1) == []
    assert calls.asked == []
