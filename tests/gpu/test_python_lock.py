"""Calls of a worker into the driver that wait for the device: other threads go on meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from dask_devctx import Device, driver
from dask_devctx.driver import backends
from dask_devctx.transfer.events import Event

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


@pytest.fixture
def full_stream() -> Iterator[tuple[Device, int]]:
    """A stream of a device that is full for two seconds, as its number: a thread waits for it."""
    cupy = pytest.importorskip("cupy")
    with driver.use(backends.real()), Device(0) as device:
        spin = cupy.RawKernel(SPIN, "spin")
        stream = cupy.cuda.Stream(non_blocking=True)
        launched = 0

        def fill() -> None:
            nonlocal launched
            with device, stream:
                spin((1,), (1,), (3_000_000_000,))
                for launched in range(5000):  # noqa: B007
                    spin((1,), (1,), (0,))

        spin((1,), (1,), (0,))
        device.sync()
        filling = threading.Thread(target=fill)
        filling.start()
        time.sleep(1)
        assert launched < 4999, "all launches had room"
        yield device, stream.ptr
        filling.join()
        device.sync()


def test_a_wait_for_a_full_stream_stops_no_other_thread(full_stream: tuple[Device, int]) -> None:
    device, stream = full_stream
    gaps: list[float] = []
    over = threading.Event()

    def watch() -> None:
        before = time.perf_counter()
        while not over.is_set():
            time.sleep(0.005)
            now = time.perf_counter()
            gaps.append(now - before)
            before = now

    event = Event(device)
    event.record_context(device._handle)
    watching = threading.Thread(target=watch)
    watching.start()
    begun = time.perf_counter()
    event.holds_back(stream)
    took = time.perf_counter() - begun
    over.set()
    watching.join()
    print(f"the call took {took:.3f} s, and the longest pause was {max(gaps):.3f} s")
    assert took > 0.5, "the stream was not full"
    assert max(gaps) < took / 2


def test_an_event_of_the_context_waits_for_no_full_stream(full_stream: tuple[Device, int]) -> None:
    device, _ = full_stream
    begun = time.perf_counter()
    event = Event(device)
    assert event.record_context(device._handle)
    took = time.perf_counter() - begun
    print(f"the record took {took:.6f} s")
    assert took < 0.1
    assert not event.done()
