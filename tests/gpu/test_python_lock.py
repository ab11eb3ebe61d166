"""Calls of a worker into the driver that wait for the device: other threads go on meanwhile."""

from __future__ import annotations

import threading
import time

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


def test_an_event_that_waits_for_a_full_queue_stops_no_other_thread() -> None:
    cupy = pytest.importorskip("cupy")
    gaps: list[float] = []
    over = threading.Event()

    def watch() -> None:
        before = time.perf_counter()
        while not over.is_set():
            time.sleep(0.005)
            now = time.perf_counter()
            gaps.append(now - before)
            before = now

    with driver.use(backends.real()), Device(0) as device:
        spin = cupy.RawKernel(SPIN, "spin")
        stream = cupy.cuda.Stream(non_blocking=True)

        def fill() -> None:
            with device, stream:
                spin((1,), (1,), (3_000_000_000,))
                for _ in range(5000):
                    spin((1,), (1,), (0,))

        spin((1,), (1,), (0,))
        device.sync()
        event = Event(device)
        filling, watching = threading.Thread(target=fill), threading.Thread(target=watch)
        filling.start()
        time.sleep(1)  # by then, it waits in a launch
        watching.start()
        begun = time.perf_counter()
        event.record_context(device._handle)
        took = time.perf_counter() - begun
        over.set()
        watching.join()
        filling.join()
        device.sync()
    print(f"the record took {took:.3f} s, and the longest pause was {max(gaps):.3f} s")
    if took < 0.5:
        pytest.skip(f"the driver did not wait: the record took {took:.3f} s")
    assert max(gaps) < took / 2
