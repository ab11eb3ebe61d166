"""One dask.array job on one worker with all devices, on one worker for each, and in between.

Prints a line of JSON for each layout. Run by ``test_layouts.py``, in a process of its own.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client

from dask_devctx import Device, LocalDeviceCluster, devices, driver, report

cupy = None
if not driver.backend().simulated:
    with suppress(ImportError):
        import cupy


def to_device(block: np.ndarray[Any, Any]) -> Any:
    return block if cupy is None else cupy.asarray(block)


def to_host(block: Any) -> np.ndarray[Any, Any]:
    return np.asarray(block if cupy is None else cupy.asnumpy(block))


def where() -> str:
    device = Device.current()
    assert device is not None
    return device.uuid


def run(n_workers: int) -> dict[str, Any]:
    with (
        LocalDeviceCluster(n_workers=n_workers, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        found = []
        for device in devices():
            with dask.annotate(device=device.uuid):
                found.append(client.submit(where, pure=False).result(timeout=60))
        values = np.arange(1024 * 1024, dtype="float64").reshape(1024, 1024) % 7
        x = da.from_array(values, chunks=(256, 256)).map_blocks(to_device)
        total = (x @ x.T).map_blocks(to_host, dtype="float64").sum().compute()
        return {
            "n_workers": len(cluster.workers),
            "n_devices": len(devices()),
            "total": float(total),
            "expected": float((values @ values.T).sum()),
            "reached": found == [device.uuid for device in devices()],
            "used": sorted({task.device_id for task in report(client)}),
        }


if __name__ == "__main__":
    count = len(devices())
    for n_workers in (n for n in (1, 2, 4, 8) if n <= count):
        print(json.dumps(run(n_workers)), flush=True)
