"""Streams that only do copies."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from cuda.bindings.driver import CUresult

from dask_devctx import Device, driver
from dask_devctx.driver.relaxed import LEGACY_STREAM
from dask_devctx.driver.simulated import SimulatedMachine
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
    """A driver that tells addresses: a call by address keeps the GIL."""
    pytest.importorskip("dask_devctx.driver._scope")
    with driver.use(addressed(machine)), Device(0):
        assert isinstance(machine.driver, AddressedDriver)
        yield machine.driver


def _enqueued(calls: AddressedDriver, copies: int = 1, nbytes: int = 8) -> list[str]:
    """Return the calls by address that copies in a lane take."""
    work = Device(0)._backend.calls.work
    memory = work.allocate(2 * lanes.FEW_NBYTES + 2)
    lane = lanes.take(Device(0))
    calls.enqueued.clear()
    lane.after_current_streams()
    calls.asked.clear()
    lane.keep_lock(copies, nbytes)
    for _ in range(copies):
        lane.copy(memory + nbytes, memory, nbytes)
    lane.mark()
    found = list(calls.enqueued)
    lane.copy(memory + nbytes, memory, nbytes)  # more of them need a new look
    lane.mark()
    assert calls.enqueued == found
    assert lane.done()
    lanes.finish(lane)
    work.free(memory)
    return found


QUESTIONS = [("cuStreamIsCapturing", LEGACY_STREAM), ("cuStreamQuery", LEGACY_STREAM)]


def test_a_few_copies_keep_pythons_lock_where_no_stream_is_full(calls: AddressedDriver) -> None:
    """The events in the streams of libraries do not: these may be full."""
    assert _enqueued(calls) == ["cuMemcpyAsync", "cuEventRecord"]
    assert calls.asked == QUESTIONS
    assert _enqueued(calls, lanes.FEW) == ["cuMemcpyAsync"] * lanes.FEW + ["cuEventRecord"]
    assert _enqueued(calls, nbytes=lanes.FEW_NBYTES) == ["cuMemcpyAsync", "cuEventRecord"]
    assert _enqueued(calls, lanes.FEW + 1) == []
    assert _enqueued(calls, nbytes=lanes.FEW_NBYTES + 1) == []
    calls.busy.add(LEGACY_STREAM)
    assert _enqueued(calls) == []
