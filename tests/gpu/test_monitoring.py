"""The report and the timeline of real GPUs, beside NVML's own numbers.

One process has a cluster with both GPUs, and works on one of them while it looks.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import dask
import pytest

from dask_devctx import report, timeline
from tests.gpu.own_process import answer_of, connected

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(320)]


def observe(n_workers: int) -> dict[str, Any]:
    import cupy
    import pynvml

    def work(seconds: float) -> Any:
        x = cupy.random.random((4096, 4096), dtype="float32")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            x = x @ x
            x /= cupy.abs(x).max()
            cupy.cuda.Device().synchronize()
        return x

    pynvml.nvmlInit()
    with connected(n_workers=n_workers, devices=[0, 1]) as client:
        with dask.annotate(device=1):
            made = client.submit(work, 6.0)
        time.sleep(4)
        devices = sorted(report(client).devices, key=lambda device: device.device_id)
        used, computing = [], []
        for device in devices:
            handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid)
            used.append(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            computing.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        with dask.annotate(device=0):
            client.submit(lambda x: float(x.sum()), made).result()
        found = timeline(client, Path(tempfile.mkdtemp()) / "timeline.json")
        return {
            "nvml utilization": computing,
            "utilization": [device.utilization for device in devices],
            "occupied_s": [device.occupied_s for device in devices],
            "used": [device.memory_total - device.memory_free for device in devices],
            "nvml": used,
            "transfers": [[row.transport, row.nbytes] for row in report(client).transfers],
            "tasks": found.tasks,
        }


@pytest.mark.parametrize("n_workers", [1, 2])
def test_numbers_are_those_of_nvml(n_workers: int) -> None:
    pytest.importorskip("cupy")
    seen = answer_of(observe, n_workers)
    idle, busy = seen["utilization"]
    assert busy > 0.5
    assert seen["occupied_s"][1] > 2 > seen["occupied_s"][0]
    for ours, nvml in zip(seen["used"], seen["nvml"], strict=True):
        assert abs(ours - nvml) < 2 * 2**30
    assert seen["tasks"] == 2
    nbytes = 4 * 4096**2
    ways = {"peer"} if n_workers == 1 else {"ipc", "host"}
    assert any(way in ways and moved == nbytes for way, moved in seen["transfers"])
    assert seen["nvml utilization"][1] > 0.5
    if seen["nvml utilization"][0] > 0.5:
        pytest.skip("the GPU that is to be idle has other work")
    assert idle < 0.5
