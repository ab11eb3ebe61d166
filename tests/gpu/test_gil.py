"""Calls of a worker into the driver that wait for the device: other threads go on meanwhile."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from cuda.bindings import driver as types

from dask_devctx import Device, driver
from dask_devctx.driver import backends
from dask_devctx.driver.relaxed import LEGACY_STREAM
from dask_devctx.transfer import copy_streams
from dask_devctx.transfer.events import Event, Stamp

pytestmark = pytest.mark.gpu(count=1)

SPIN = r"""
extern "C" __global__ void spin(long long ns) {
    long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < ns);
}
"""


@pytest.fixture(params=["legacy", "user's"])
def full(request: pytest.FixtureRequest) -> Iterator[Full]:
    """A stream of a device that is full for two seconds: a thread waits for room in it."""
    cupy = pytest.importorskip("cupy")
    with driver.use(backends.real()), Device(0) as device:
        spin = cupy.RawKernel(SPIN, "spin")
        legacy = request.param == "legacy"
        stream = cupy.cuda.Stream.null if legacy else cupy.cuda.Stream(non_blocking=True)
        launched = 0

        def fill() -> None:
            nonlocal launched
            with device, stream:
                spin((1,), (1,), (3_000_000_000,))
                for launched in range(5000):  # noqa: B007
                    spin((1,), (1,), (0,))

        spin((1,), (1,), (0,))
        event = Event(device).record(LEGACY_STREAM)
        for one in [copy_streams.take(device) for _ in range(100)]:  # more than a GPU has queues
            copy_streams.give(one)
        memory = device._backend.calls.work.allocate(2**20)
        device.sync()
        filling = threading.Thread(target=fill)
        filling.start()
        time.sleep(1)
        assert launched < 4999, "all launches had room"
        yield Full(device, LEGACY_STREAM if legacy else stream.ptr, event, legacy, memory)
        filling.join()
        device.sync()
        device._backend.calls.work.free(memory)


class Full(NamedTuple):
    device: Device
    stream: int
    event: Event  # reached
    legacy: bool
    memory: int  # a MiB


def pauses(call: Callable[[], object]) -> tuple[float, float]:
    """Return how long a call took, and the longest pause of another thread meanwhile, in s."""
    gaps: list[float] = []
    over = threading.Event()

    def watch() -> None:
        before = time.perf_counter()
        while not over.is_set():
            time.sleep(0.005)
            now = time.perf_counter()
            gaps.append(now - before)
            before = now

    watching = threading.Thread(target=watch)
    watching.start()
    begun = time.perf_counter()
    call()
    took = time.perf_counter() - begun
    over.set()
    watching.join()
    return took, max(gaps)


def test_a_wait_in_a_full_stream_stops_no_other_thread(full: Full) -> None:
    took, pause = pauses(lambda: full.event.holds_back(full.stream))
    assert took > 0.5, "the stream was not full"
    assert pause < took / 2


def test_a_stamp_stops_no_other_thread(full: Full) -> None:
    took, pause = pauses(lambda: Stamp.of_devices([full.device]))
    assert took > 0.5 or not full.legacy, "the stream was not full"
    assert pause < max(took / 2, 0.1)  # streams may share a queue with one that is full


@pytest.fixture
def busy() -> Iterator[None]:
    """A thread that keeps the GIL whenever it can."""
    over = False

    def compute() -> None:
        while not over:
            sum(range(100))

    computing = threading.Thread(target=compute)
    computing.start()
    yield
    over = True
    computing.join()


def test_a_few_copies_keep_the_gil(busy: None) -> None:
    with driver.use(backends.real()), Device(0) as device:
        work = device._backend.calls.work
        memory = work.allocate(2**20)
        took = []
        for _ in range(50):
            stream = copy_streams.take(device)
            begun = time.perf_counter()
            assert stream.keep_lock(3, 24), "the device is idle"
            for place in range(3):
                stream.copy(memory + 2**19 + 256 * place, memory + 256 * place, 8)
            stream.mark()
            took.append(time.perf_counter() - begun)
            copy_streams.finish(stream)
        work.free(memory)
    assert statistics.median(took) < sys.getswitchinterval() / 5


def test_copies_wait_for_no_stream_that_is_full_but_the_legacy_one(full: Full) -> None:
    device, memory = full.device, full.memory
    begun = time.perf_counter()
    taken = [copy_streams.take(device) for _ in range(100)]
    assert [stream.keep_lock(1, 8) for stream in taken] == [not full.legacy] * 100
    if full.legacy:
        for stream in taken:
            copy_streams.give(stream)
        return
    for stream in taken:
        stream.copy(memory + 2**19, memory, 8)
        stream.mark()
    took = time.perf_counter() - begun
    assert types.cuStreamQuery(types.CUstream(full.stream))[0] != 0, "the stream was not full"
    for stream in taken:
        copy_streams.finish(stream)
    assert took < 0.5  # the stream is full for longer; other processes use the GPU, too
