"""On real GPUs: tasks capture graphs while others on their device return, send and spill."""

from __future__ import annotations

import importlib
from collections import Counter
from threading import Lock
from typing import Any

import pytest
from distributed import wait

from dask_devctx import report
from tests.gpu.own_process import answer_of, connected

pytestmark = pytest.mark.timeout(320)

CAPTURES = 100
ELEMENTS = 1 << 22
MIB = 2**20

# The others' work allocates, by the libraries' pools: in the mode "global" that is forbidden.
MODES = {"cupy": ("ThreadLocal", "Relaxed"), "torch": ("thread_local", "relaxed")}
WORKERS: dict[str, dict[str, Any]] = {
    "on one GPU": {"devices": [0], "shared": True},
    "on two GPUs": {"devices_per_worker": 1},
}


def capture_with_cupy(index: int, mode: str) -> float:
    """Capture sums into a graph, launch it, and return its result."""
    import cupy

    x = cupy.full(1024, float(index))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        x + x  # its kernel is compiled, and its memory is in the pool
        stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
        for _ in range(200):
            cupy.add(x, 1.0, out=x)
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    return float(x[0].get())


# torch's graphs of a device share a set that has no lock: two threads at once abort the process.
torch_graphs = Lock()


def capture_with_torch(index: int, mode: str) -> float:
    import torch

    x = torch.full((1024,), float(index), device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch_graphs, torch.cuda.stream(stream):
        x.add_(0.0)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode=mode)
        for _ in range(200):
            x.add_(1.0)
        graph.capture_end()
        graph.replay()
        stream.synchronize()
        del graph
    return float(x[0].item())


def make(index: int, name: str) -> Any:
    library = importlib.import_module(name)
    if name == "cupy":
        return library.full(ELEMENTS, index, dtype="f4")
    return library.full((ELEMENTS,), float(index), device="cuda")


def same(value: Any, again: int) -> Any:
    return value


def mean(value: Any) -> float:
    return float(value.mean())


def capture_all(name: str, mode: str, workers_are: str) -> dict[str, Any]:
    """Return what the captures gave, and the other tasks."""
    capture = {"cupy": capture_with_cupy, "torch": capture_with_torch}[name]
    options = {"tasks_per_device": 3, "device_memory_limit": 256 * MIB, **WORKERS[workers_are]}
    with connected(n_workers=2, **options) as client:
        workers = list(client.scheduler_info()["workers"])
        here, there = {"workers": workers[:1], "pure": False}, {"workers": workers[1:]}
        made = client.map(make, range(32), name=name, **here)  # twice the limit
        wait(made)
        client.submit(capture, 0, mode, **here).result()  # loads the library's modules
        captured = client.map(capture, range(CAPTURES), mode=mode, priority=10, **here)
        returned = [client.submit(same, made[i % 32], i, **here) for i in range(64)]
        sent = client.map(mean, made, **there)
        wait(captured, timeout=200)  # a worker that died never comes back by its address
        return {
            "ended": Counter(future.status for future in captured),
            "captured": client.gather(captured),
            "sent": client.gather(sent),
            "returned": client.gather(client.map(mean, returned, **there)),
            "spills": sum(row.spills for row in report(client).devices),
        }


@pytest.mark.parametrize(("name", "mode"), [(name, m) for name in MODES for m in MODES[name]])
@pytest.mark.parametrize(
    "workers_are",
    [
        pytest.param(where, marks=pytest.mark.gpu(count=count))
        for count, where in enumerate(WORKERS, start=1)
    ],
)
def test_no_graph_is_spoiled_and_all_values_are_right(
    name: str, mode: str, workers_are: str
) -> None:
    pytest.importorskip(name)
    seen = answer_of(capture_all, name, mode, workers_are)
    assert seen["ended"] == {"finished": CAPTURES}
    assert seen["captured"] == [index + 200.0 for index in range(CAPTURES)]
    assert seen["sent"] == list(range(32))
    assert seen["returned"] == [*range(32), *range(32)]
    assert seen["spills"] > 0
