"""Looks at a device's work and health: the same in one call by address and in calls from Python."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from cuda.bindings.driver import CUresult, CUstreamCaptureMode

from dask_devctx import Device
from dask_devctx.driver.relaxed import LEGACY_STREAM
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.errors import DriverError
from tests.addressed import AddressedDriver

_MODE = "cuThreadExchangeStreamCaptureMode"


class Looks:
    """Looks at device 0, and the driver's functions that they call."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self.machine = machine
        self.device = Device(0)
        self.work: Any = self.device._backend.calls.work
        with self.device:
            self.event = self.work.event_create()

    def __call__(self, **what: bool) -> tuple[tuple[bool, bool], list[str]]:
        with self.device:
            self.machine.faults.calls.clear()
            answer = self.work.look(self.event, self.device._handle, **what)
            called = list(self.machine.faults.calls)
            assert self.machine.faults.calls[_MODE] % 2 == 0, "the thread's mode is restored"
        mode = self.machine.driver.cuThreadExchangeStreamCaptureMode(0)[1]
        assert mode == CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        ignored = _MODE, "cuStreamIsCapturing", "cuGetErrorString", "cuGetErrorName"
        return answer, [name for name in called if name not in ignored]

    def fail(self, function: str, status: str, times: int = 1) -> None:
        self.machine.faults.inject(function, getattr(CUresult, f"CUDA_ERROR_{status}"), times=times)


@pytest.fixture
def look(machine: SimulatedMachine) -> Looks:
    return Looks(machine)


def test_each_look_calls_what_fails_on_a_failed_device(look: Looks) -> None:
    assert look() == ((False, False), ["cuMemFree"])
    assert look(record=True) == ((False, True), ["cuCtxRecordEvent"])
    assert look(query=True) == ((True, False), ["cuEventQuery"])
    assert look(query=True, record=True) == ((True, True), ["cuEventQuery", "cuCtxRecordEvent"])
    look.fail("cuEventQuery", "NOT_READY")  # its work is not done: nothing is recorded
    assert look(query=True, record=True) == ((False, False), ["cuEventQuery"])


@pytest.mark.parametrize(
    "status", ["NOT_SUPPORTED", "STREAM_CAPTURE_UNSUPPORTED", "ILLEGAL_ADDRESS"]
)
def test_a_failing_record_hides_no_event_that_was_reached(look: Looks, status: str) -> None:
    look.fail("cuCtxRecordEvent", status, 2)
    assert look(record=True) == ((False, False), ["cuCtxRecordEvent", "cuMemFree"])
    assert look(query=True, record=True)[0] == (True, False)


@pytest.mark.parametrize(
    ("function", "what"),
    [("cuMemFree", {}), ("cuEventQuery", {"query": True}), ("cuMemFree", {"record": True})],
)
def test_each_look_at_a_failed_device_raises(look: Looks, function: str, what: Any) -> None:
    look.machine.faults.poison(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    with pytest.raises(DriverError, match=f"{function} failed with CUDA_ERROR_ILLEGAL_ADDRESS"):
        look(**what)
    look.machine.faults.clear()
    look.fail(_MODE, "ILLEGAL_ADDRESS")
    with pytest.raises(DriverError, match=_MODE):
        look(**what)
    assert look(query=True, record=True)[0] == (True, True), "the mode was restored"


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
    by_address = []
    record = look.machine.driver.cuCtxRecordEvent

    def note(context: Any, event: Any) -> Any:
        caller = inspect.currentframe().f_back.f_code.co_name  # type: ignore[union-attr]
        by_address.append(caller == "call")  # of AddressedDriver
        return record(context, event)

    monkeypatch.setattr(look.machine.driver, "cuCtxRecordEvent", note)
    for busy in (False, True, False):
        look.machine.driver.busy = {LEGACY_STREAM} if busy else set()
        for query in (False, True):
            assert look(query=query, record=True)[0] == (query, True)
            assert by_address.pop() is not busy


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
    assert look(record=True)[0] == (False, False)
    assert look(query=True, record=True)[0] == (True, False)
    with look.device:
        assert cuda.cuStreamEndCapture(stream)[0] == 0
    assert look(query=True, record=True)[0] == (True, True)
