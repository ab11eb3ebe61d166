"""Tasks capture graphs while others on their device return, send and spill: none is spoiled."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
import pytest
from cuda.bindings.driver import CUresult, CUstreamCaptureMode
from distributed import Client, Event, wait

from dask_devctx import Device, LocalDeviceCluster, SimulatedArray, driver, report
from tests.distributed import peers
from tests.distributed.devices import make

GLOBAL, THREAD_LOCAL, RELAXED = CUstreamCaptureMode
MIB = 2**20
CAPTURES = 40


def capture(index: int, mode: int, blocking: bool) -> str:
    calls = driver.backend().machine.driver
    stream = calls.cuStreamCreate(0 if blocking else 1)[1]
    calls.cuStreamBeginCapture(stream, CUstreamCaptureMode(mode))
    time.sleep(0.02)
    return CUresult(calls.cuStreamEndCapture(stream)[0]).name


def same(value: SimulatedArray, again: int) -> SimulatedArray:
    """Return an input: it is moved, and its new owner is stamped."""
    return value


def total(value: SimulatedArray) -> float:
    device = Device.current()
    assert value.device is device
    return float(value.get().sum()) / (MIB // 8)


@pytest.mark.parametrize(
    ("mode", "blocking"), [(THREAD_LOCAL, True), (RELAXED, False), (GLOBAL, True), (GLOBAL, False)]
)
def test_no_capture_is_spoiled_and_all_values_are_right(mode: Any, blocking: bool) -> None:
    """On two workers: values are made before, as a graph in global mode forbids to allocate."""
    options = {"device_memory_limit": 8 * MIB, "tasks_per_device": 3, "memory_limit": 0}
    with peers.cluster(2, **options) as (client, workers):
        here = {"workers": workers[:1], "pure": False}
        made = client.map(make, range(24), n=MIB // 8, **here)
        wait(made, timeout=60)
        graphs = {"mode": int(mode), "blocking": blocking}
        captures = client.map(capture, range(CAPTURES), priority=10, **graphs, **here)
        returned = [client.submit(same, one, n, **here) for n in range(4) for one in made[:4]]
        sent = client.map(total, made, workers=workers[1:], pure=False)
        assert Counter(client.gather(captures)) == {"CUDA_SUCCESS": CAPTURES}
        assert client.gather(sent) == [float(index) for index in range(24)]
        totals = client.gather(client.map(total, returned, workers=workers[1:]))
        assert totals == [0.0, 1.0, 2.0, 3.0] * 4
        assert peers.ways(client)["ipc"] > 0
        assert sum(row.spills for row in report(client).devices) > 0


def capture_at_the_gate() -> None:
    """Capture a graph, whose end needs the worker's event loop."""
    calls = driver.backend().machine.driver
    calls.cuStreamBeginCapture(stream := calls.cuStreamCreate(0)[1], THREAD_LOCAL)
    Event("captures").set()
    Event("read").wait(timeout=30)
    calls.cuStreamEndCapture(stream)


def test_the_event_loop_runs_on_while_a_client_of_its_process_reads_a_value() -> None:
    options = {"processes": False, "tasks_per_device": 3, "dashboard_address": ":0"}
    with LocalDeviceCluster(n_workers=1, **options) as cluster, Client(cluster) as client:
        with dask.annotate(device=0):
            value = client.submit(make, 3, MIB // 8, pure=False)
            wait(value)
            captures = client.submit(capture_at_the_gate, pure=False)
            Event("captures").wait()
            returned = client.submit(same, value, 1, pure=False)
            wait(returned)
        begun = time.monotonic()
        reading = ThreadPoolExecutor(1).submit(returned.result)
        time.sleep(0.2)
        Event("read").set()
        assert float(reading.result(timeout=20).get().sum()) == 3.0 * (MIB // 8)
        captures.result(timeout=20)
        assert time.monotonic() - begun < 30  # it would wait for a minute
