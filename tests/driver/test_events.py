"""Events and peer access, on both drivers."""

from __future__ import annotations

import pytest
from cuda.bindings.driver import CUstreamCaptureMode

from dask_devctx.driver.relaxed import LEGACY_STREAM, PER_THREAD_STREAM
from dask_devctx.errors import DeviceMemoryError, DriverError


@pytest.mark.parametrize("stream", [0, LEGACY_STREAM, PER_THREAD_STREAM])
def test_an_event_of_an_idle_stream_is_done(calls, stream):
    event = calls.work.event_create()
    assert calls.work.event_done(event)  # also before it is recorded
    calls.work.event_record(event, stream)
    calls.work.stream_wait(stream, event)
    calls.synchronize()
    assert calls.work.event_done(event)
    calls.work.event_destroy(event)


def test_the_time_between_two_events(calls):
    begin, end = (calls.work.event_create(timed=True) for _ in range(2))
    pointer = calls.work.allocate(1 << 20)
    try:
        calls.work.event_record(begin, LEGACY_STREAM)
        context = calls.contexts[0]
        half = 1 << 19
        calls.work.copy_peer(pointer, context, pointer + half, context, half, LEGACY_STREAM)
        calls.work.event_record(end, LEGACY_STREAM)
        calls.synchronize()
        assert 0 <= calls.work.event_seconds(begin, end) < 10
    finally:
        calls.work.free(pointer)


def test_only_timed_events_that_were_recorded_tell_the_time(calls):
    begin, end, untimed = (calls.work.event_create(timed=timed) for timed in (True, True, False))
    with pytest.raises(DriverError, match="INVALID_HANDLE"):
        calls.work.event_seconds(begin, end)
    for event in (begin, untimed):
        calls.work.event_record(event, LEGACY_STREAM)
    calls.synchronize()
    with pytest.raises(DriverError, match="INVALID_HANDLE"):
        calls.work.event_seconds(begin, untimed)
    with pytest.raises(DriverError, match="INVALID_HANDLE"):
        calls.work.event_seconds(begin, end)


@pytest.mark.parametrize("blocking", [True, False])
def test_whether_a_stream_is_captured(calls, blocking):
    driver = calls.driver
    stream = driver.cuStreamCreate(0 if blocking else 1)[1]
    every = 0, LEGACY_STREAM, PER_THREAD_STREAM, int(stream)
    assert [calls.work.is_capturing(one) for one in every] == [False] * 4
    driver.cuStreamBeginCapture(stream, CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
    assert [calls.work.is_capturing(one) for one in every] == [blocking, blocking, False, True]
    assert driver.cuStreamEndCapture(stream)[0] == 0  # no question spoilt it
    calls.set_current(0)
    with pytest.raises(DriverError, match=r"cuStreamIsCapturing failed .*INVALID_CONTEXT"):
        calls.work.is_capturing(LEGACY_STREAM)


def test_another_contexts_stream_waits_for_an_event(calls):
    event = calls.work.event_create()
    calls.work.event_record(event, LEGACY_STREAM)
    calls.set_current(calls.contexts[1])
    calls.work.stream_wait(LEGACY_STREAM, event)
    calls.synchronize()


def test_an_event_is_recorded_in_its_own_context_only(calls):
    event = calls.work.event_create()
    with pytest.raises(DriverError, match="INVALID_HANDLE"):
        calls.work.event_record_context(event, calls.contexts[1])
    calls.set_current(calls.contexts[1])
    with pytest.raises(DriverError, match="INVALID_HANDLE"):
        calls.work.event_record(event, LEGACY_STREAM)


def test_memory_that_runs_out_has_its_own_error(calls):
    with pytest.raises(DeviceMemoryError, match="OUT_OF_MEMORY"):
        calls.work.allocate(2**50)
    calls.work.free(calls.work.allocate(8))
