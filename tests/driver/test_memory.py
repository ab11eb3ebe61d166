"""Contents of device memory, streams and events, on both drivers."""

# ruff: noqa: F821 - the functions run elsewhere, where the fixture `child` defines these names

from __future__ import annotations

import ctypes
import resource
import signal
import sys
from array import array
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import pytest
from cuda.bindings.driver import CUresult, CUstreamCaptureMode

from dask_devctx import Device
from dask_devctx.driver.relaxed import LEGACY_STREAM, PER_THREAD_STREAM
from dask_devctx.driver.work import BOX_NBYTES, MOST
from dask_devctx.errors import DeviceMemoryError, DriverError
from tests.device_memory import read, write

SOME = bytes(range(256)) * 16


@pytest.fixture
def pointer(calls):
    """Memory of the current context that begins with ``SOME``."""
    pointer = calls.work.allocate(3 * len(SOME))
    write(calls.work, pointer, SOME)
    return pointer


@pytest.fixture
def stream(calls):
    stream = calls.work.stream_create()
    yield stream
    calls.driver.cuStreamDestroy(stream)


def test_memory_keeps_what_was_written(calls, pointer):
    write(calls.work, pointer + 100, b"here")
    assert read(calls.work, pointer, 110) == SOME[:100] + b"here" + SOME[104:110]
    assert read(calls.work, pointer, 0) == b""


@pytest.mark.parametrize("which", [0, LEGACY_STREAM, PER_THREAD_STREAM, "own"])
def test_a_copy_within_a_device(calls, pointer, stream, which):
    which = stream if which == "own" else which
    calls.work.copy(pointer + len(SOME) + 8, pointer, len(SOME), which)
    calls.work.stream_synchronize(which)
    assert read(calls.work, pointer + len(SOME) + 8, len(SOME)) == SOME


def box(source, target, pitches, rows, shape, kind=2):
    """A `CUDA_MEMCPY3D`: from device memory, or from host memory with the kind 1."""
    found = array("Q", bytes(BOX_NBYTES))
    found[4], found[6 if kind == 2 else 5], found[9], found[10] = kind, source, pitches[0], rows
    found[15], found[17], found[20], found[21] = 2, target, pitches[1], shape[1]
    found[22], found[23], found[24] = shape
    return found


@pytest.mark.parametrize("how", ["driver", "host", "kernel", "kernel at once"])
def test_copies_of_rows_at_a_pitch(calls, pointer, stream, how):
    """Two planes of three rows of five bytes, and a single row."""
    kind = 1 if how == "host" else 2
    host = ctypes.create_string_buffer(SOME, len(SOME))
    source = pointer if kind == 2 else ctypes.addressof(host)
    target, zeros = pointer + 2 * len(SOME), bytes(64)
    write(calls.work, target, zeros)
    boxes = box(source + 7, target, (16, 6), 4, (5, 3, 2), kind)
    boxes += box(source, target + 50, (4, 4), 1, (4, 1, 1), kind)
    if how.startswith("kernel"):
        boxes += array("Q", bytes(MOST * BOX_NBYTES))
        at_once = how.endswith("once")
        calls.work.copy_boxes_here(boxes.buffer_info()[0], 2, (5, 6), stream, at_once=at_once)
    else:
        calls.work.copy_boxes(boxes.buffer_info()[0], 2, stream)
    calls.work.stream_synchronize(stream)
    expected = bytearray(zeros)
    for plane in range(2):
        for row in range(3):
            at, of = (plane * 3 + row) * 6, 7 + (plane * 4 + row) * 16
            expected[at : at + 5] = SOME[of : of + 5]
    expected[50:54] = SOME[:4]
    assert read(calls.work, target, len(zeros)) == bytes(expected)


@pytest.mark.parametrize("unit", [1, 4, 16])
def test_many_boxes_in_a_few_launches(calls, stream, unit):
    """Of rows of whole units of 1, 4 or 16 bytes, in columns that change places."""
    n, rows = 2 * MOST + 5, 40
    widths = [unit * (1 + i * 7 % 300) for i in range(n)]
    pitch = sum(widths)
    source, target = calls.work.allocate(rows * pitch), calls.work.allocate(rows * pitch)
    data = bytes(i * 31 % 251 for i in range(rows * pitch))
    write(calls.work, source, data)
    ends = [sum(widths[: i + 1]) for i in range(n)]
    boxes = array("Q")
    for width, end in zip(widths, ends, strict=True):
        shape = (width, rows, 1)
        boxes += box(source + end - width, target + pitch - end, (pitch, pitch), rows, shape)
    boxes += array("Q", bytes(MOST * BOX_NBYTES))
    calls.work.copy_boxes_here(boxes.buffer_info()[0], n, (max(widths), rows), stream)
    calls.work.stream_synchronize(stream)
    found = read(calls.work, target, rows * pitch)
    for row in range(rows):
        line = data[row * pitch : (row + 1) * pitch]
        pieces = [line[end - width : end] for width, end in zip(widths, ends, strict=True)]
        assert found[row * pitch : (row + 1) * pitch] == b"".join(reversed(pieces))
    for pointer in (source, target):
        calls.work.free(pointer)


def test_the_kernel_is_of_its_source():
    source = Path(__file__).parents[2] / "csrc" / "copy_boxes.cu"
    code = files("dask_devctx.driver").joinpath("copy_boxes.ptx").read_text()
    assert sha256(source.read_bytes()).hexdigest() in code, "make kernel"
    assert f"BOXES = {MOST};" in source.read_text()


def test_a_pitch_less_than_a_row_is_refused(calls, pointer, stream):
    boxes = box(pointer, pointer + 2 * len(SOME), (4, 8), 2, (8, 2, 1))
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        calls.work.copy_boxes(boxes.buffer_info()[0], 1, stream)


@pytest.mark.parametrize("which", ["another device", "its context", "a context of this device"])
def test_a_copy_between_contexts_needs_no_peer_access(calls, pointer, stream, which):
    if which == "a context of this device":
        target = calls.create(0, 0)
    else:
        target = calls.contexts[1]
        calls.set_current(target)
    there = calls.work.allocate(len(SOME))
    calls.set_current(calls.contexts[0])
    if which == "its context":
        calls.work.copy_peer(there, target, pointer, calls.contexts[0], len(SOME), stream)
    else:
        calls.work.copy(there, pointer, len(SOME), stream)
    calls.work.stream_synchronize(stream)
    assert read(calls.work, there, len(SOME)) == SOME
    if which == "a context of this device":
        calls.destroy(target)


def test_memory_of_a_destroyed_context_is_none(calls):
    own = calls.create(0, 0)
    pointer = calls.work.allocate(len(SOME))
    calls.destroy(own)
    calls.set_current(calls.contexts[0])
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        read(calls.work, pointer, 4)


def freed(kind, use):
    from dask_devctx.driver.calls import Calls
    from dask_devctx.errors import DriverError

    calls = Calls(make(kind))
    calls.init()
    calls.set_current(calls.primary_retain(0))
    pointer, gone = calls.work.allocate(4096), calls.work.allocate(64 * 2**20)
    write(calls.work, pointer, b"kept")
    calls.work.free(gone)
    try:
        {
            "from": lambda: calls.work.copy(pointer, gone, 4, 0),
            "to": lambda: calls.work.copy(gone, pointer, 4, 0),
            "to host": lambda: read(calls.work, gone, 4),
            "from host": lambda: write(calls.work, gone, b"four"),
            "export": lambda: calls.work.ipc_export(gone),
            "close": lambda: calls.work.ipc_close(gone),
        }[use]()
    except DriverError as error:
        print(error.status)
    assert read(calls.work, pointer, 4) == b"kept"  # the context still works


@pytest.mark.parametrize("use", ["from", "to", "to host", "from host", "export", "close"])
def test_memory_that_was_freed_is_an_invalid_value(kind, use, child):
    done = child(freed, kind, use, check=False, beside=(read, write))
    if kind == "real" and use in ("from", "to") and done.returncode == -signal.SIGSEGV:
        return  # the driver takes an address that it does not know for one of the host's
    assert done.stdout.split() == ["CUDA_ERROR_INVALID_VALUE"], done.stderr


def test_without_a_context_there_is_no_work(calls, pointer):
    calls.set_current(0)
    for use in (
        lambda: calls.work.stream_create(),
        lambda: calls.work.stream_synchronize(0),
        lambda: calls.work.copy(pointer, pointer + 8, 4, 0),
        lambda: read(calls.work, pointer, 4),
        lambda: calls.work.ipc_export(pointer),
        lambda: calls.work.ipc_open(bytes(64)),
        lambda: calls.work.ipc_close(pointer),
    ):
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_CONTEXT"):
            use()


def test_a_copy_past_the_end_is_an_invalid_value(machine):
    """Only on simulated devices: a real one may have other memory there, or a whole page."""
    with Device(0) as device:
        pointer = device._backend.calls.work.allocate(100)
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
            read(device._backend.calls.work, pointer + 97, 4)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_contents_that_nobody_writes_take_no_host_memory(machine):
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with Device(0) as device:
        before, work = resident(), device._backend.calls.work
        pointers = [work.allocate(4 * 2**30) for _ in range(3)]
        write(work, pointers[2] + 2**31, b"a little")
        assert read(work, pointers[2] + 2**31, 8) == b"a little"
        assert resident() < before + 64 * 2**20


@pytest.mark.parametrize("wrong", [b"", bytes(65)])
def test_a_handle_has_64_bytes(calls, wrong):
    with pytest.raises(ValueError, match=f"a handle has 64 bytes, got {len(wrong)}"):
        calls.work.ipc_open(wrong)


def test_memory_that_runs_out_has_its_own_error(calls):
    with pytest.raises(DeviceMemoryError, match="OUT_OF_MEMORY"):
        calls.work.allocate(2**50)
    calls.work.free(calls.work.allocate(8))


# -- events


@pytest.mark.parametrize("which", [0, LEGACY_STREAM, PER_THREAD_STREAM, "own"])
def test_an_event_of_an_idle_stream_is_done(calls, stream, which):
    which = stream if which == "own" else which
    event = calls.work.event_create()
    assert calls.work.look.reached(event)  # also before it is recorded
    calls.work.event_record(event, which)
    calls.work.stream_wait(LEGACY_STREAM, event)
    calls.synchronize()
    assert calls.work.look.reached(event)


def test_the_time_between_two_events(calls, pointer):
    begin, end, untimed = (calls.work.event_create(timed=timed) for timed in (True, True, False))
    for wrong in (end, untimed):  # not recorded
        with pytest.raises(DriverError, match="INVALID_HANDLE"):
            calls.work.event_seconds(begin, wrong)
    calls.work.event_record(begin, LEGACY_STREAM)
    calls.work.copy(pointer + len(SOME), pointer, len(SOME), LEGACY_STREAM)
    for event in (end, untimed):
        calls.work.event_record(event, LEGACY_STREAM)
    calls.synchronize()
    assert 0 <= calls.work.event_seconds(begin, end) < 10
    with pytest.raises(DriverError, match="INVALID_HANDLE"):
        calls.work.event_seconds(begin, untimed)


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


def test_an_event_is_recorded_in_its_own_context_only(calls, stream):
    event = calls.work.event_create()
    (status,) = calls.driver.cuCtxRecordEvent(calls.contexts[1], event)
    assert status == CUresult.CUDA_ERROR_INVALID_HANDLE
    calls.set_current(calls.contexts[1])
    theirs = calls.work.event_create()
    for one, where in ((event, LEGACY_STREAM), (theirs, stream)):
        with pytest.raises(DriverError, match="INVALID_HANDLE"):
            calls.work.event_record(one, where)
    calls.work.stream_wait(stream, theirs)  # it may wait for any context's event
    calls.work.stream_wait(LEGACY_STREAM, event)
    calls.synchronize()
    calls.set_current(calls.contexts[0])
