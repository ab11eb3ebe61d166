"""Looks at a device's work and health: the same in one call by address and in calls from Python."""

from __future__ import annotations

from typing import Any

import pytest
from cuda.bindings.driver import CUresult, CUstreamCaptureMode

from dask_devctx import Device
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.errors import DriverError

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
            assert self.machine.faults.calls[_MODE] in (2, 4), "the thread's mode is restored"
        mode = self.machine.driver.cuThreadExchangeStreamCaptureMode(0)[1]
        assert mode == CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        return answer, [name for name in called if name != _MODE]

    def fail(self, function: str, status: str, times: int = 1) -> None:
        self.machine.faults.inject(function, getattr(CUresult, f"CUDA_ERROR_{status}"), times=times)


@pytest.fixture
def look(machine: SimulatedMachine) -> Looks:
    return Looks(machine)


def test_each_look_probes(look: Looks) -> None:
    assert look() == ((False, False), ["cuMemFree"])
    assert look(record=True) == ((False, True), ["cuMemFree", "cuCtxRecordEvent"])
    assert look(query=True) == ((True, False), ["cuEventQuery", "cuMemFree"])
    every = ["cuEventQuery", "cuMemFree", "cuCtxRecordEvent"]
    assert look(query=True, record=True) == ((True, True), every)


def test_an_event_that_is_not_reached_stays_as_it_is(machine: SimulatedMachine) -> None:
    look = Looks(machine)
    look.fail("cuEventQuery", "NOT_READY")
    with look.device:
        machine.faults.calls.clear()
        answer = look.work.look(look.event, look.device._handle, query=True, record=True)
    assert answer == (False, False)
    assert machine.faults.calls["cuMemFree"] == 1
    assert machine.faults.calls["cuCtxRecordEvent"] == 0


@pytest.mark.parametrize(
    "status", ["NOT_SUPPORTED", "STREAM_CAPTURE_UNSUPPORTED", "ILLEGAL_ADDRESS"]
)
def test_a_failing_record_hides_no_event_that_was_reached(look: Looks, status: str) -> None:
    look.fail("cuCtxRecordEvent", status, 2)
    assert look(record=True)[0] == (False, False)
    assert look(query=True, record=True)[0] == (True, False)


@pytest.mark.parametrize("function", [_MODE, "cuEventQuery", "cuMemFree"])
def test_a_failure_names_its_function_and_restores_the_mode(look: Looks, function: str) -> None:
    look.fail(function, "ILLEGAL_ADDRESS")
    with pytest.raises(DriverError, match=f"{function} failed with CUDA_ERROR_ILLEGAL_ADDRESS"):
        look(query=True, record=True)
    assert look(query=True, record=True)[0] == (True, True)


def test_without_addresses_of_events_a_look_does_the_same(
    look: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dask_devctx.driver.relaxed.invoke_relaxed", None)
    test_each_look_probes(look)


@pytest.mark.parametrize("own", [True, False], ids=["own", "the user's"])
def test_only_streams_of_its_own_are_called_with_pythons_lock_held(
    look: Looks, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Another may be full: the call waits for the device then, and by address it keeps the lock."""
    work = look.work
    by_address: list[str] = []
    called = work._called
    monkeypatch.setattr(
        work,
        "_called",
        lambda function, *args: by_address.append(function) or called(function, *args),
    )
    with look.device:
        stream = work.stream_create() if own else int(look.machine.driver.cuStreamCreate(1)[1])
        work.event_record(look.event, stream)
        work.stream_wait(stream, look.event)
    assert by_address == (["cuEventRecord", "cuStreamWaitEvent"] if own else [])
    assert look.machine.faults.calls["cuEventRecord"] == 1
    assert look.machine.faults.calls["cuStreamWaitEvent"] == 1
