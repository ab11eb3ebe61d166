"""Looks at a device's work and health: the same in one call by address and in calls from Python."""

from __future__ import annotations

from typing import Any

import pytest
from cuda.bindings.driver import CUresult, CUstreamCaptureMode

from dask_devctx import Device
from dask_devctx.driver.relaxed import LEGACY_STREAM, wait_relaxed
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.errors import DriverError
from dask_devctx.worker.failures.running_calls import Calls
from tests.addressed import AddressedDriver
from tests.device_memory import read

_MODE = "cuThreadExchangeStreamCaptureMode"
_GIVEN = {"reached": 1, "record_legacy": 1, "record": 2}  # an event and its context


class Looks:
    """Looks at device 0, and the driver's functions that they call."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self.machine = machine
        self.device = Device(0)
        self.work: Any = self.device._backend.calls.work
        with self.device:
            self.event = self.work.event_create()
            self.of_tasks = Calls().works[self.device]

    def __call__(self, what: str = "", **how: bool) -> tuple[bool | None, list[str]]:
        given = [self.event, self.device._handle][: _GIVEN.get(what, 0)]
        with self.device:
            self.machine.faults.calls.clear()
            owner = self.of_tasks if how else self.work.look
            answer = getattr(owner, what or "__call__")(*given, **how)
            called = list(self.machine.faults.calls)
            assert self.machine.faults.calls[_MODE] % 2 == 0, "the thread's mode is restored"
        mode = self.machine.driver.cuThreadExchangeStreamCaptureMode(0)[1]
        assert mode == CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        ignored = _MODE, "cuStreamIsCapturing", "cuCtxSetCurrent", "cuGetErrorString"
        return answer, [name for name in called if name not in ignored]

    def fail(self, function: str, status: str) -> None:
        self.machine.faults.inject(function, getattr(CUresult, f"CUDA_ERROR_{status}"), times=1)


@pytest.fixture
def look(machine: SimulatedMachine) -> Looks:
    return Looks(machine)


def test_each_look_calls_what_fails_on_a_failed_device(look: Looks) -> None:
    assert look() == (None, ["cuMemFree"])
    assert look("record") == (True, ["cuCtxRecordEvent"])
    assert look("reached") == (True, ["cuEventQuery"])
    look.fail("cuEventQuery", "NOT_READY")
    assert look("reached") == (False, ["cuEventQuery"])


def test_a_look_marks_the_work_once_what_was_marked_is_done(look: Looks) -> None:
    assert look("look", mark=True)[1][-1] == "cuCtxRecordEvent"  # it makes the event first
    look.fail("cuEventQuery", "NOT_READY")
    assert look("look", mark=True)[1] == ["cuEventQuery"]  # not done: nothing is recorded
    assert look("look", mark=True)[1] == ["cuEventQuery", "cuCtxRecordEvent"]
    for status in "NOT_SUPPORTED", "STREAM_CAPTURE_UNSUPPORTED", "ILLEGAL_ADDRESS":
        look.fail("cuCtxRecordEvent", status)
        assert look("look", mark=True)[1] == ["cuEventQuery", "cuCtxRecordEvent", "cuMemFree"]
        # The device may have been reset: the next event is one of its present context.
        assert look("look", mark=True)[1] == ["cuCtxGetId", "cuCtxRecordEvent"]
    assert look("look", mark=False)[1] == ["cuEventQuery"]
    assert look("look", mark=False)[1] == ["cuMemFree"]
    look.machine.faults.poison(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    with pytest.raises(DriverError, match="cuMemFree failed"):  # the record has told nobody
        look("look", mark=True)


@pytest.mark.parametrize(("function", "what"), [("cuMemFree", ""), ("cuEventQuery", "reached")])
def test_each_look_at_a_failed_device_raises(look: Looks, function: str, what: str) -> None:
    look.machine.faults.poison(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    with pytest.raises(DriverError, match=f"{function} failed with CUDA_ERROR_ILLEGAL_ADDRESS"):
        look(what)
    assert look("record")[0] is False
    look.machine.faults.clear()
    look.fail(_MODE, "ILLEGAL_ADDRESS")
    with pytest.raises(DriverError, match=_MODE):
        look(what)
    assert look("record")[0] is True, "the mode was restored"


def test_without_addresses_of_events_a_look_does_the_same(
    look: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dask_devctx.driver.relaxed.invoke_relaxed", None)
    test_each_look_calls_what_fails_on_a_failed_device(look)


def test_an_event_is_recorded_without_the_gil_where_the_legacy_stream_is_busy(
    look: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record by address keeps the GIL, and waits for the device where that stream is full."""
    if not isinstance(look.machine.driver, AddressedDriver):
        pytest.skip("without addresses, each call releases the GIL")
    waiting = []

    def wait(*calls: int) -> Any:
        waiting.append(calls)
        return wait_relaxed(*calls)

    monkeypatch.setattr("dask_devctx.driver.relaxed.wait_relaxed", wait)
    for busy in (False, True, False):
        look.machine.driver.busy = {LEGACY_STREAM} if busy else set()
        for what, recorded in ("record", "cuCtxRecordEvent"), ("record_legacy", "cuEventRecord"):
            assert look(what) == (True, [recorded])
            assert bool(waiting) is busy
            waiting.clear()


@pytest.mark.parametrize("in_python", [False, True])
def test_a_look_records_nothing_that_would_spoil_a_capture(
    look: Looks, monkeypatch: pytest.MonkeyPatch, in_python: bool
) -> None:
    if in_python:
        monkeypatch.setattr("dask_devctx.driver.relaxed.invoke_relaxed", None)
    cuda = look.machine.driver
    with look.device:
        stream = cuda.cuStreamCreate(0)[1]
        cuda.cuStreamBeginCapture(stream, CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
    assert look("record")[0] is False
    with look.device:
        assert cuda.cuStreamEndCapture(stream)[0] == 0
    assert look("record")[0] is True


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(lambda calls, pointer: calls.synchronize(), id="context"),
        pytest.param(lambda calls, pointer: calls.work.stream_synchronize(0), id="stream"),
        pytest.param(lambda calls, pointer: read(calls.work, pointer, 4), id="copy"),
    ],
)
def test_who_waits_for_the_kernel_that_breaks_it_is_told(machine, wait):
    calls = Device(0)._backend.calls
    with Device(0):
        pointer = calls.work.allocate(16)
        machine.faults.poison(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, after_s=0.05)
        calls.work.copy(pointer, pointer + 8, 8, 0)  # the kernel still runs
        with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
            wait(calls, pointer)
