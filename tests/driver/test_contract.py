"""The contract of a CUDA driver: the same tests run on the simulated and on the real driver.

Each test runs in a new process, where nothing else has used the driver. The expectations were
measured on two H200s with driver 580, but those of stream capture are from CUDA's documentation. A
test that fails on a real driver shows a new behaviour.
"""

# ruff: noqa: F821 - the functions run elsewhere, where the fixture `child` defines these names

from __future__ import annotations

import inspect
import os
import signal

import pytest
from cuda.bindings.driver import CUstreamCaptureMode

from dask_devctx import Device

# -- before and without a context


def uninitialised(kind):
    d = make(kind)
    null = types.CUcontext(0)
    assert set(
        names(
            d.cuCtxGetCurrent(),
            d.cuCtxSetCurrent(null),
            d.cuDeviceGetCount(),
            d.cuMemFree(0),
            d.cuCtxSynchronize(),
            d.cuCtxGetDevice(),
        )
    ) == {"NOT_INITIALIZED"}
    assert d.cuCtxGetCurrent()[1] is None
    assert ok(d.cuDriverGetVersion()) >= 12000


def nothing_current(d):
    null = types.CUcontext(0)
    assert int(ok(d.cuCtxGetCurrent())) == 0
    assert set(
        names(
            d.cuCtxGetDevice(),
            d.cuCtxGetFlags(),
            d.cuCtxSynchronize(),
            d.cuMemGetInfo(),
            d.cuMemAlloc(10),
            d.cuCtxGetLimit(types.CUlimit.CU_LIMIT_STACK_SIZE),
            d.cuCtxGetId(null),
            d.cuCtxPopCurrent(),
            d.cuCtxEnablePeerAccess(null, 0),
            d.cuCtxSetFlags(0),
        )
    ) == {"INVALID_CONTEXT"}
    assert names(d.cuMemFree(0), d.cuCtxDestroy(null), d.cuCtxSetCurrent(null)) == [
        "SUCCESS",
        "INVALID_VALUE",
        "SUCCESS",
    ]
    # a call that fails returns None in place of each value
    assert d.cuMemGetInfo()[1:] == (None, None)
    assert d.cuMemAlloc(10)[1:] == (None,)
    assert d.cuCtxSynchronize()[1:] == ()


def describes_devices(d):
    import re

    wrong = d.cuDeviceGet(99), d.cuDeviceGetName(64, 99), d.cuDevicePrimaryCtxRetain(99)
    assert {*names(*wrong)} == {"INVALID_DEVICE"}
    assert ok(d.cuDeviceGetCount()) >= 1
    device = ok(d.cuDeviceGet(0))
    assert ok(d.cuDeviceGetName(64, device)).split(b"\0")[0]
    bus_id = ok(d.cuDeviceGetPCIBusId(64, device)).split(b"\0")[0].decode()
    assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0", bus_id), bus_id
    assert ok(d.cuDeviceTotalMem(device)) > 2**30
    assert len(bytes(ok(d.cuDeviceGetUuid(device)).bytes)) == 16
    assert ok(d.cuDeviceCanAccessPeer(device, device)) == 0
    kind = types.CUdevice_attribute
    assert ok(d.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0)) >= 5
    assert ok(d.cuDevicePrimaryCtxGetState(device)) == (0, 0)  # none of these calls made a context


def error_strings(kind):
    d = make(kind)
    text = ok(d.cuGetErrorString(types.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS))
    assert isinstance(text, bytes)
    assert text


# -- primary contexts


def primary_is_counted(d):
    assert names(d.cuDevicePrimaryCtxRelease(0)) == ["INVALID_CONTEXT"]  # it is not retained
    context = ok(d.cuDevicePrimaryCtxRetain(0))
    assert int(ok(d.cuDevicePrimaryCtxRetain(0))) == int(context)
    assert ok(d.cuDevicePrimaryCtxGetState(0)) == (0, 1)
    assert int(ok(d.cuCtxGetCurrent())) == 0  # to retain it does not make it current
    assert names(d.cuCtxDestroy(context)) == ["INVALID_CONTEXT"]
    ok(d.cuDevicePrimaryCtxRelease(0))
    assert ok(d.cuDevicePrimaryCtxGetState(0)) == (0, 1)
    ok(d.cuDevicePrimaryCtxRelease(0))
    assert ok(d.cuDevicePrimaryCtxGetState(0)) == (0, 0)
    assert names(d.cuDevicePrimaryCtxRelease(0)) == ["INVALID_CONTEXT"]


def primary_flags(d):
    ok(d.cuDevicePrimaryCtxSetFlags(0, 4))
    assert ok(d.cuDevicePrimaryCtxGetState(0)) == (4, 0)
    ok(d.cuDevicePrimaryCtxRetain(0))
    assert ok(d.cuDevicePrimaryCtxGetState(0)) == (4, 1)
    ok(d.cuDevicePrimaryCtxSetFlags(0, 2))
    assert names(d.cuDevicePrimaryCtxSetFlags(0, 3), d.cuDevicePrimaryCtxSetFlags(0, 512)) == [
        "INVALID_VALUE",
        "INVALID_VALUE",
    ]
    assert ok(d.cuDevicePrimaryCtxGetState(0)) == (2, 1)
    ok(d.cuDevicePrimaryCtxRelease(0))
    assert ok(d.cuDevicePrimaryCtxGetState(0)) == (0, 0)  # the flags go with the context


def primary_dies_while_current(d):
    context = ok(d.cuDevicePrimaryCtxRetain(0))
    ok(d.cuCtxSetCurrent(context))
    null = types.CUcontext(0)
    assert ok(d.cuCtxGetId(context)) == ok(d.cuCtxGetId(null))
    ok(d.cuDevicePrimaryCtxRelease(0))
    assert int(ok(d.cuCtxGetCurrent())) == int(context)
    assert int(ok(d.cuCtxGetDevice())) == 0
    assert set(
        names(d.cuCtxSynchronize(), d.cuMemFree(0), d.cuMemAlloc(16), d.cuCtxGetId(null))
    ) == {"CONTEXT_IS_DESTROYED"}
    again = ok(d.cuDevicePrimaryCtxRetain(0))
    assert int(again) == int(context)  # the same handle, alive again where it was current
    assert int(ok(d.cuCtxGetCurrent())) == int(context)
    ok(d.cuMemAlloc(16))


def dead_primary_can_be_made_current(d):
    context = ok(d.cuDevicePrimaryCtxRetain(0))
    ok(d.cuDevicePrimaryCtxRelease(0))
    ok(d.cuCtxSetCurrent(context))
    assert int(ok(d.cuCtxGetCurrent())) == int(context)
    assert int(ok(d.cuCtxGetDevice())) == 0
    assert names(d.cuMemAlloc(16), d.cuCtxGetId(context)) == ["CONTEXT_IS_DESTROYED"] * 2
    assert ok(d.cuDevicePrimaryCtxGetState(0)) == (0, 0)
    ok(d.cuCtxSetCurrent(types.CUcontext(0)))
    assert int(ok(d.cuCtxGetCurrent())) == 0


# -- created contexts


def creating_makes_current(d):
    assert names(d.cuCtxCreate(None, 3, 0)) == ["INVALID_VALUE"]
    assert int(ok(d.cuCtxGetCurrent())) == 0
    for flags in (0, 1, 2, 4):
        context = ok(d.cuCtxCreate(None, flags, 0))
        assert int(ok(d.cuCtxGetCurrent())) == int(context)
        assert ok(d.cuCtxGetFlags()) == flags
        assert ok(d.cuDevicePrimaryCtxGetState(0)) == (0, 0)  # it is not the primary context
        ok(d.cuCtxSetCurrent(types.CUcontext(0)))
        assert int(ok(d.cuCtxGetCurrent())) == 0
        ok(d.cuCtxDestroy(context))


def creating_stacks(d):
    first = ok(d.cuCtxCreate(None, 0, 0))
    second = ok(d.cuCtxCreate(None, 0, 0))
    assert int(ok(d.cuCtxGetCurrent())) == int(second)
    ok(d.cuCtxSetCurrent(types.CUcontext(0)))  # takes the top off the stack
    assert int(ok(d.cuCtxGetCurrent())) == int(first)
    ok(d.cuCtxSetCurrent(second))  # replaces the top
    assert int(ok(d.cuCtxPopCurrent())) == int(second)
    assert int(ok(d.cuCtxGetCurrent())) == 0
    ok(d.cuCtxDestroy(first))
    ok(d.cuCtxDestroy(second))


def setting_none_pops_one(d):
    context = ok(d.cuDevicePrimaryCtxRetain(0))
    ok(d.cuCtxPushCurrent(context))
    ok(d.cuCtxPushCurrent(context))
    ok(d.cuCtxSetCurrent(types.CUcontext(0)))
    assert int(ok(d.cuCtxGetCurrent())) == int(context)
    ok(d.cuCtxSetCurrent(types.CUcontext(0)))
    assert int(ok(d.cuCtxGetCurrent())) == 0
    assert names(d.cuCtxPopCurrent()) == ["INVALID_CONTEXT"]


def destroying_current_uncovers_the_next(d):
    first = ok(d.cuCtxCreate(None, 0, 0))
    second = ok(d.cuCtxCreate(None, 0, 0))
    ok(d.cuCtxDestroy(second))
    assert int(ok(d.cuCtxGetCurrent())) == int(first)
    ok(d.cuCtxDestroy(first))
    assert int(ok(d.cuCtxGetCurrent())) == 0


def numbers_of_contexts(d):
    seen = []
    for _ in range(6):
        context = ok(d.cuCtxCreate(None, 0, 0))
        seen.append(ok(d.cuCtxGetId(context)))
        ok(d.cuCtxDestroy(context))
    assert len(set(seen)) == len(seen), seen  # numbers are never used again


def destroyed_while_current_elsewhere(d):
    context = ok(d.cuCtxCreate(None, 0, 0))
    made, destroyed, answers = threading.Event(), threading.Event(), []

    def other():
        assert int(ok(d.cuCtxGetCurrent())) == 0  # what is current is each thread's own
        ok(d.cuCtxSetCurrent(context))
        made.set()
        destroyed.wait()
        answers.append(int(ok(d.cuCtxGetCurrent())))
        answers.extend(names(d.cuCtxGetId(context), d.cuCtxSynchronize(), d.cuMemAlloc(8)))
        ok(d.cuCtxSetCurrent(types.CUcontext(0)))
        answers.append(int(ok(d.cuCtxGetCurrent())))

    thread = threading.Thread(target=other)
    thread.start()
    assert made.wait(30)
    assert int(ok(d.cuCtxGetCurrent())) == int(context)
    ok(d.cuCtxSetCurrent(types.CUcontext(0)))
    ok(d.cuCtxDestroy(context))
    assert names(d.cuCtxGetId(context)) == ["CONTEXT_IS_DESTROYED"]
    for _ in range(4):
        ok(d.cuCtxDestroy(ok(d.cuCtxCreate(None, 0, 0))))
    assert names(d.cuCtxGetId(context)) == ["CONTEXT_IS_DESTROYED"]
    destroyed.set()
    thread.join()
    assert answers == [int(context), *["CONTEXT_IS_DESTROYED"] * 3, 0]


# -- the properties of a context


def limits(d):
    ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(0))))
    which = types.CUlimit
    for limit in (
        which.CU_LIMIT_STACK_SIZE,
        which.CU_LIMIT_PRINTF_FIFO_SIZE,
        which.CU_LIMIT_MALLOC_HEAP_SIZE,
        which.CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT,
    ):
        value = ok(d.cuCtxGetLimit(limit))
        assert value > 0
        ok(d.cuCtxSetLimit(limit, value))
        assert ok(d.cuCtxGetLimit(limit)) == value
        ok(d.cuCtxSetLimit(limit, 2 * value + 1))
        assert ok(d.cuCtxGetLimit(limit)) >= 2 * value + 1  # rounded up


def limits_of_this_architecture(d):
    major = types.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    if ok(d.cuDeviceGetAttribute(major, 0)) != 9:
        print("skip: not compute capability 9")
        return
    ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(0))))
    which = types.CUlimit
    for limit in (which.CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, which.CU_LIMIT_CIG_SHMEM_FALLBACK_ENABLED):
        assert names(d.cuCtxGetLimit(limit), d.cuCtxSetLimit(limit, 4)) == ["UNSUPPORTED_LIMIT"] * 2


# -- memory


def memory(d):
    ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(0))))
    free, total = ok(d.cuMemGetInfo())
    assert 0 < free <= total
    assert names(d.cuMemAlloc(1 << 40), d.cuMemAlloc(0), d.cuMemFree(12345)) == [
        "OUT_OF_MEMORY",
        "INVALID_VALUE",
        "INVALID_VALUE",
    ]
    pointer = ok(d.cuMemAlloc(1 << 20))
    assert int(pointer)
    ok(d.cuMemFree(pointer))
    assert names(d.cuMemFree(pointer)) == ["INVALID_VALUE"]  # twice
    ok(d.cuMemFree(0))
    # it goes with its context
    before, _ = ok(d.cuMemGetInfo())
    ok(d.cuMemAlloc(1 << 30))
    during, _ = ok(d.cuMemGetInfo())
    assert before - during >= 1 << 30
    ok(d.cuDevicePrimaryCtxRelease(0))
    ok(d.cuDevicePrimaryCtxRetain(0))
    after, _ = ok(d.cuMemGetInfo())
    assert after - during >= 1 << 29


def peer_access(d):
    context = ok(d.cuDevicePrimaryCtxRetain(0))
    ok(d.cuCtxSetCurrent(context))
    assert names(d.cuCtxEnablePeerAccess(context, 0)) == ["PEER_ACCESS_UNSUPPORTED"]
    if ok(d.cuDeviceGetCount()) < 2 or not ok(d.cuDeviceCanAccessPeer(0, 1)):
        print("skip: no two devices that reach each other")
        return
    other = ok(d.cuDevicePrimaryCtxRetain(1))
    assert names(d.cuCtxEnablePeerAccess(other, 0), d.cuCtxEnablePeerAccess(other, 0)) == [
        "SUCCESS",
        "PEER_ACCESS_ALREADY_ENABLED",
    ]


# -- host memory


def page_locking(kind):
    import mmap

    d = make(kind)
    ok(d.cuInit(0))
    nbytes, portable = 2**20, int(types.CU_MEMHOSTREGISTER_PORTABLE)
    pages = mmap.mmap(-1, nbytes)
    host = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    without = names(d.cuMemHostRegister(host, nbytes, portable), d.cuMemHostUnregister(host))
    assert without == ["INVALID_CONTEXT", "HOST_MEMORY_NOT_REGISTERED"]
    ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(0))))
    assert names(
        d.cuMemHostUnregister(host),
        d.cuMemHostRegister(host, 0, portable),
        d.cuMemHostRegister(0, nbytes, portable),
        d.cuMemHostRegister(host, nbytes, portable),
        d.cuMemHostRegister(host, nbytes, portable),
    ) == [
        "HOST_MEMORY_NOT_REGISTERED",
        "INVALID_VALUE",
        "INVALID_VALUE",
        "SUCCESS",
        "HOST_MEMORY_ALREADY_REGISTERED",
    ]
    memory, stream = ok(d.cuMemAlloc(nbytes)), types.CUstream(0)
    pages[:] = b"ab" * (nbytes // 2)
    ok(d.cuMemcpyHtoDAsync(memory, host, nbytes, stream))
    ok(d.cuStreamSynchronize(stream))
    pages[:] = bytes(nbytes)
    ok(d.cuMemcpyDtoHAsync(host, memory, nbytes, stream))
    ok(d.cuStreamSynchronize(stream))
    assert pages[:] == b"ab" * (nbytes // 2)
    assert names(d.cuMemHostUnregister(host), d.cuMemHostUnregister(host)) == [
        "SUCCESS",
        "HOST_MEMORY_NOT_REGISTERED",
    ]
    assert pages[:2] == b"ab"  # they stay as they are


# -- streams that are captured into graphs


def capturing(d):
    ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(0))))
    mode, status = types.CUstreamCaptureMode, types.CUstreamCaptureStatus
    own, thread, legacy = ok(d.cuStreamCreate(1)), types.CUstream(2), types.CUstream(1)
    memory, event = ok(d.cuMemAlloc(8)), ok(d.cuEventCreate(2))
    host, zeros = ctypes.create_string_buffer(b"1234567", 8), bytes(8)
    ok(d.cuMemcpyHtoDAsync(memory, ctypes.addressof(ctypes.create_string_buffer(8)), 8, legacy))
    for stream in (own, thread):
        ok(d.cuStreamBeginCapture(stream, mode.CU_STREAM_CAPTURE_MODE_RELAXED))
        assert ok(d.cuStreamIsCapturing(stream)) == status.CU_STREAM_CAPTURE_STATUS_ACTIVE
        ok(d.cuMemcpyHtoDAsync(memory, ctypes.addressof(host), 8, stream))
        ok(d.cuEventRecord(event, stream))
        ok(d.cuStreamWaitEvent(stream, event, 0))
        assert names(d.cuStreamBeginCapture(stream, mode.CU_STREAM_CAPTURE_MODE_RELAXED)) == [
            "ILLEGAL_STATE"
        ]
        assert int(ok(d.cuStreamEndCapture(stream)))
        assert ok(d.cuStreamIsCapturing(stream)) == status.CU_STREAM_CAPTURE_STATUS_NONE
        assert d.cuStreamEndCapture(stream)[0].name == "CUDA_ERROR_ILLEGAL_STATE"
        ok(d.cuStreamSynchronize(stream))
    ok(d.cuMemcpyDtoHAsync(ctypes.addressof(host), memory, 8, legacy))
    ok(d.cuStreamSynchronize(legacy))
    assert host.raw == zeros  # what was captured was not done
    assert names(d.cuStreamBeginCapture(legacy, mode.CU_STREAM_CAPTURE_MODE_RELAXED)) == [
        "STREAM_CAPTURE_UNSUPPORTED"
    ]
    ok(d.cuEventRecord(event, own))
    ok(d.cuStreamSynchronize(own))
    ok(d.cuEventQuery(event))


def recording_a_context_spoils_its_captures(d):
    context = ok(d.cuDevicePrimaryCtxRetain(0))
    ok(d.cuCtxSetCurrent(context))
    event = ok(d.cuEventCreate(2))
    relaxed = types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    ok(d.cuThreadExchangeStreamCaptureMode(relaxed))  # does not help
    for mode in types.CUstreamCaptureMode:
        streams = [ok(d.cuStreamCreate(flags)) for flags in (0, 1)]
        for stream in streams:
            ok(d.cuStreamBeginCapture(stream, mode))
        assert names(d.cuCtxRecordEvent(context, event)) == ["STREAM_CAPTURE_UNSUPPORTED"]
        for stream in streams:
            assert ok(d.cuStreamIsCapturing(stream)) == 2
            assert (
                names(d.cuEventRecord(event, stream), d.cuStreamEndCapture(stream))
                == ["STREAM_CAPTURE_INVALIDATED"] * 2
            )
            assert ok(d.cuStreamIsCapturing(stream)) == 0
        ok(d.cuCtxRecordEvent(context, event))


def other_contexts_spoil_no_capture(d):
    if ok(d.cuDeviceGetCount()) < 2:
        print("skip: one device")
        return
    other = ok(d.cuDevicePrimaryCtxRetain(1))
    ok(d.cuCtxSetCurrent(other))
    event, stream, legacy = ok(d.cuEventCreate(2)), ok(d.cuStreamCreate(0)), types.CUstream(1)
    ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(0))))
    mine = ok(d.cuStreamCreate(0))
    ok(d.cuStreamBeginCapture(mine, types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    ok(d.cuCtxSetCurrent(other))
    ok(d.cuCtxRecordEvent(other, event))
    assert ok(d.cuStreamIsCapturing(legacy)) == 0
    ok(d.cuEventRecord(event, legacy))
    ok(d.cuStreamWaitEvent(stream, event, 0))
    assert int(ok(d.cuStreamEndCapture(mine)))


def the_legacy_stream_while_another_is_captured(d):
    ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(0))))
    relaxed = types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    event, host, memory = (
        ok(d.cuEventCreate(2)),
        ctypes.create_string_buffer(8),
        ok(d.cuMemAlloc(8)),
    )
    blocking, nonblocking = ok(d.cuStreamCreate(0)), ok(d.cuStreamCreate(1))
    for use in (
        lambda legacy: d.cuEventRecord(event, legacy),
        lambda legacy: d.cuStreamWaitEvent(legacy, event, 0),
        lambda legacy: d.cuStreamSynchronize(legacy),
        lambda legacy: d.cuMemcpyAsync(memory, memory, 8, legacy),
        lambda legacy: d.cuMemcpyDtoHAsync(ctypes.addressof(host), memory, 8, legacy),
    ):
        for legacy in map(types.CUstream, (0, 1)):
            ok(d.cuStreamBeginCapture(nonblocking, relaxed))
            assert ok(d.cuStreamIsCapturing(legacy)) == 0
            assert names(use(legacy)) == ["SUCCESS"]
            assert int(ok(d.cuStreamEndCapture(nonblocking)))
            ok(d.cuStreamBeginCapture(blocking, relaxed))
            assert names(d.cuStreamIsCapturing(legacy)) == ["STREAM_CAPTURE_IMPLICIT"]
            assert ok(d.cuStreamIsCapturing(blocking)) == 1  # the question spoils nothing
            assert names(use(legacy), d.cuStreamEndCapture(blocking)) == [
                "STREAM_CAPTURE_IMPLICIT",
                "STREAM_CAPTURE_INVALIDATED",
            ]


def what_a_capture_cannot_depend_on(d):
    context = ok(d.cuDevicePrimaryCtxRetain(0))
    ok(d.cuCtxSetCurrent(context))
    mode = types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    stream, other, outside, inside = (
        *(ok(d.cuStreamCreate(1)) for _ in range(2)),
        *(ok(d.cuEventCreate(2)) for _ in range(2)),
    )
    ok(d.cuEventRecord(outside, other))
    for expected, calls in {
        "CAPTURED_EVENT": [d.cuEventQuery],
        "STREAM_CAPTURE_UNSUPPORTED": [
            lambda event: d.cuStreamSynchronize(stream),
            lambda event: d.cuCtxSynchronize(),
        ],
        "STREAM_CAPTURE_ISOLATION": [lambda event: d.cuStreamWaitEvent(stream, outside, 0)],
    }.items():
        for call in calls:
            ok(d.cuStreamBeginCapture(stream, mode))
            ok(d.cuEventRecord(inside, stream))
            assert names(call(inside), d.cuStreamEndCapture(stream)) == [
                expected,
                "STREAM_CAPTURE_INVALIDATED",
            ]


def unsafe_calls_while_a_stream_is_captured(d):
    context = ok(d.cuDevicePrimaryCtxRetain(0))
    ok(d.cuCtxSetCurrent(context))
    stream, mode = ok(d.cuStreamCreate(1)), types.CUstreamCaptureMode
    everywhere, relaxed = mode.CU_STREAM_CAPTURE_MODE_GLOBAL, mode.CU_STREAM_CAPTURE_MODE_RELAXED

    def allocates(own, answers):
        ok(d.cuCtxSetCurrent(context))
        before = ok(d.cuThreadExchangeStreamCaptureMode(own))
        answers.append(names(d.cuMemAlloc(8))[0])
        ok(d.cuThreadExchangeStreamCaptureMode(before))

    for captured in mode:
        for own in mode:
            for same in (True, False):
                answers = []
                ok(d.cuStreamBeginCapture(stream, captured))
                if same:
                    allocates(own, answers)
                else:
                    thread = threading.Thread(target=allocates, args=(own, answers))
                    thread.start()
                    thread.join()
                refused = relaxed not in (captured, own)
                if not same:
                    refused = captured == own == everywhere
                ended = names(d.cuStreamEndCapture(stream))
                expected = ["SUCCESS"] * 2
                if refused:
                    expected = ["STREAM_CAPTURE_UNSUPPORTED", "STREAM_CAPTURE_INVALIDATED"]
                assert answers + ended == expected, (captured, own, same)


# -- fork


def forked_after_init(d):
    context = ok(d.cuDevicePrimaryCtxRetain(0))
    ok(d.cuCtxSetCurrent(context))
    pid = os.fork()
    if pid == 0:
        answers = names(
            d.cuCtxGetCurrent(),
            d.cuCtxSetCurrent(context),
            d.cuInit(0),
            d.cuDeviceGetCount(),
            d.cuMemAlloc(5),
            d.cuDevicePrimaryCtxRetain(0),
        )
        os._exit(0 if set(answers) == {"NOT_INITIALIZED"} else 1)
    assert os.waitpid(pid, 0)[1] == 0
    ok(d.cuCtxSynchronize())  # the parent still works


def forked_before_init(kind):
    d = make(kind)
    pid = os.fork()
    if pid == 0:
        ok(d.cuInit(0))
        os._exit(0 if ok(d.cuDeviceGetCount()) >= 1 else 1)
    assert os.waitpid(pid, 0)[1] == 0


def environment_is_read_once(d):
    count = ok(d.cuDeviceGetCount())
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    assert ok(d.cuDeviceGetCount()) == count
    ok(d.cuInit(0))
    assert ok(d.cuDeviceGetCount()) == count


def initialised(clause, kind):
    """Run a clause that gets a driver, after ``cuInit``."""
    d = make(kind)
    ok(d.cuInit(0))
    globals()[clause](d)


CONTRACT = [
    function
    for function in filter(inspect.isfunction, list(globals().values()))
    if [*inspect.signature(function).parameters] in (["d"], ["kind"])
]


def run(child, clause, kind, **options):
    options["env"] = {"CUDA_VISIBLE_DEVICES": None}
    if "d" in inspect.signature(clause).parameters:
        return child(initialised, clause.__name__, kind, beside=(clause,), **options)
    return child(clause, kind, **options)


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
def test_contract(clause, kind, child):
    done = run(child, clause, kind)
    if done.stdout.startswith("skip: "):
        pytest.skip(done.stdout)


def making_a_destroyed_context_current(d):
    context = ok(d.cuCtxCreate(None, 0, 0))
    ok(d.cuCtxDestroy(context))
    print("destroyed", flush=True)
    d.cuCtxSetCurrent(context)
    d.cuCtxGetDevice()
    d.cuMemAlloc(5)
    d.cuCtxSetCurrent(types.CUcontext(0))
    print("survived", flush=True)


def making_garbage_current(d):
    print("destroyed", flush=True)
    d.cuCtxSetCurrent(types.CUcontext(0x1234))
    print("survived", flush=True)


@pytest.mark.parametrize(
    "clause",
    [making_a_destroyed_context_current, making_garbage_current],
    ids=lambda clause: clause.__name__,
)
def test_crash(clause, kind, child):
    """The real driver crashes the process; the simulated one raises an error instead."""
    done = run(child, clause, kind, check=False)
    assert done.stdout.split() == ["destroyed"]
    if kind == "real":
        assert done.returncode in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)
    else:
        assert "SimulatedCrashError" in done.stderr


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ["SUCCESS", 2]),
        ("", ["NO_DEVICE", None]),
        ("1", ["SUCCESS", 1]),
        ("0,0", ["INVALID_DEVICE", None]),
        ("99", ["NO_DEVICE", None]),
    ],
)
@pytest.mark.parametrize(
    "kind", ["simulated", pytest.param("real", marks=pytest.mark.gpu(count=2))]
)
def test_visible_devices(value, expected, kind, child):
    def starts(kind):
        d = make(kind)
        status = names(d.cuInit(0))[0]
        print(status, d.cuDeviceGetCount()[1])

    done = child(starts, kind, env={"CUDA_VISIBLE_DEVICES": value})
    assert done.stdout.split()[0] == expected[0]
    if expected[1] is not None and kind == "simulated":
        assert int(done.stdout.split()[1]) == expected[1]


def test_refuses_what_it_cannot_simulate(machine):
    with pytest.raises(AttributeError, match="has no cuLaunchKernel: it cannot be simulated"):
        machine.driver.cuLaunchKernel  # noqa: B018
    with pytest.raises(AttributeError, match="has no nvmlDeviceGetPowerUsage"):
        machine.nvml.nvmlDeviceGetPowerUsage  # noqa: B018


def test_refuses_a_stream_that_joins_a_capture(machine):
    driver = machine.driver
    with Device(0):
        streams = [driver.cuStreamCreate(1)[1] for _ in range(2)]
        event = driver.cuEventCreate(2)[1]
        driver.cuStreamBeginCapture(streams[0], CUstreamCaptureMode(2))
        driver.cuEventRecord(event, streams[0])
        with pytest.raises(AttributeError, match="no streams that join a capture"):
            driver.cuStreamWaitEvent(streams[1], event, 0)
        driver.cuStreamEndCapture(streams[0])
