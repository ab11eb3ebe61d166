"""Stamps, moves and reads spoil no graph that a thread captures, and none comes too early."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from cuda.bindings.driver import CUresult, CUstreamCaptureMode

from dask_devctx import Device, SimulatedArray, to_device
from dask_devctx.driver.relaxed import LEGACY_STREAM
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.errors import DriverError
from dask_devctx.transfer import Stamp, events, hold, release_held, stamp
from dask_devctx.transfer.move import Move
from dask_devctx.transfer.page_locked import PageLockedPool
from tests.conftest import simulation  # noqa: F401  # both
from tests.transfer.order import Order

GLOBAL, THREAD_LOCAL, RELAXED = CUstreamCaptureMode


class Capture:
    """A stream of device 0 that a thread of its own captures into a graph."""

    def __init__(self, machine: SimulatedMachine, mode: Any, *, blocking: bool) -> None:
        self._driver = machine.driver
        self._thread = ThreadPoolExecutor(1)
        with Device(0):
            self.stream = self._driver.cuStreamCreate(0 if blocking else 1)[1]
        self._call(self._driver.cuStreamBeginCapture, mode)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        def call() -> Any:
            with Device(0):
                return function(self.stream, *args)

        return self._thread.submit(call).result(10)

    def end(self) -> CUresult:
        status = self._call(self._driver.cuStreamEndCapture)[0]
        self._thread.shutdown()
        return CUresult(status)


@contextmanager
def captured(machine: SimulatedMachine, mode: Any = RELAXED, *, blocking: bool) -> Iterator[None]:
    capture = Capture(machine, mode, blocking=blocking)
    try:
        yield
    finally:
        assert capture.end() == 0, "the graph is spoiled"


@pytest.fixture
def later() -> Iterator[Callable[..., Any]]:
    """Start a call on another thread."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit


@pytest.mark.parametrize("mode", CUstreamCaptureMode, ids=lambda mode: mode.name[23:])
@pytest.mark.parametrize("blocking", [False, True], ids=["non-blocking", "blocking"])
def test_values_are_stamped_and_moved_and_pages_locked_meanwhile(
    machine: SimulatedMachine, x: SimulatedArray, mode: Any, blocking: bool
) -> None:
    content, after = x.get(), stamp(x)
    with captured(machine, mode, blocking=blocking):
        made = [stamp(x), *(Stamp.of_devices([Device(0)], blocking=one) for one in (True, False))]
        assert [one is not None and one.done() for one in made] == [not blocking] * 3
        release_held()
        for device in (0, 1, "cpu"):
            target = None if device == "cpu" else Device(device)
            moved = Move(target, after, copy=True, guard_source=False).run([x])[0]
            assert ((moved if device == "cpu" else moved.get()) == content).all()
        pool = PageLockedPool(Device(0), 4 * 2**20)
        assert pool.take(100).is_page_locked
        pool.close()
        assert pool.nbytes == 0
    assert all(one is not None and one.done() for one in made)
    assert {one.devices for one in made if one} == {(Device(0),)}


def test_what_may_be_read_is_held_where_the_device_is_full(
    machine: SimulatedMachine, x: SimulatedArray
) -> None:
    with captured(machine, THREAD_LOCAL, blocking=True):
        reading = stamp(x)  # the legacy stream could not be recorded
        hold(reading, x)
    machine.faults.inject("cuEventRecord", CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    assert [release_held() for _ in range(2)] == [1, 0]


def test_a_reader_of_what_was_stamped_meanwhile_waits(
    machine: SimulatedMachine, order: Order, x: SimulatedArray, later: Callable[..., Any]
) -> None:
    """The legacy stream could not be recorded: it is, when the capture is over."""
    order.give("made", 0)
    capture = Capture(machine, THREAD_LOCAL, blocking=True)
    made = stamp(x)
    assert not made.done()
    assert not made.may_be_read()
    reading = [later(made.hold_back, Device(1)), later(made.hold_back, Device(2))]
    time.sleep(0.05)
    assert not any(one.done() for one in reading)
    assert order.before(1) == set()
    assert capture.end() == 0, "the graph is spoiled"
    for one in reading:
        one.result(10)
    assert made.may_be_read()
    assert order.before(1) == order.before(2) == {"made"}


def test_a_read_in_the_legacy_stream_waits(
    machine: SimulatedMachine, order: Order, x: SimulatedArray, later: Callable[..., Any]
) -> None:
    order.give("made", 0)
    made = stamp(x)
    capture = Capture(machine, THREAD_LOCAL, blocking=True)
    made.hold_back(Device(1))  # no stream of another device is captured
    assert order.before(1) == {"made"}
    assert not made.may_be_read()
    reading = later(made.hold_back_readers)
    moving = later(to_device, x, 1)
    time.sleep(0.05)
    assert not any(one.done() for one in (reading, moving))
    assert capture.end() == 0, "the graph is spoiled"
    reading.result(10)
    assert moving.result(10).device is Device(1)
    assert order.before_allocations[-1] == (1, {"made"})


def test_a_capture_that_begins_just_now_is_noticed(
    machine: SimulatedMachine, x: SimulatedArray
) -> None:
    begun = False

    def begin(*args: object) -> bool:
        nonlocal begun
        first, begun = not begun, True
        return first

    status = CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    machine.faults.inject("cuEventRecord", status, when=begin)
    made = stamp(x)
    assert begun
    assert made.done()


def test_a_thread_does_not_wait_for_its_own_capture(
    machine: SimulatedMachine, order: Order, x: SimulatedArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    order.give("made", 0)
    made = stamp(x)
    stream = order.stream(0, blocking=True)
    monkeypatch.setattr(events, "current_streams", lambda device: (LEGACY_STREAM, stream))
    with Device(0):
        machine.driver.cuStreamBeginCapture(stream, RELAXED)
        meanwhile = stamp(x)  # without the captured stream
        with pytest.raises(DriverError, match="STREAM_CAPTURE_ISOLATION"):
            made.hold_back(Device(0))
        machine.driver.cuStreamEndCapture(stream)
    monkeypatch.undo()
    meanwhile.hold_back(Device(1))
    assert order.before(1) == {"made"}
