"""Solve a least-squares problem on several GPUs at once, while small tasks share the rest.

The rows of a matrix are divided among the devices of one task (``devices=2``). In each step, every
device computes the gradient of its rows, and the first device adds the gradients up. Beside it, a
stream of small tasks (``device_share=0.25``, ``device_memory="64 MiB"``) computes statistics of
columns: four at a time on a device that is free.

The same lines compute with CuPy on GPUs, and with NumPy on simulated devices. The solution is
compared with NumPy's. Run it as ``python examples/several_devices.py --out DIR``. Without a GPU,
set ``DASK_DEVCTX__SIMULATED_DEVICES=4``.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client
from needs import needs
from pictures import lanes

from dask_devctx import LocalDeviceCluster, devices, driver, report, task_devices, to_device
from dask_devctx.simulated_array import SimulatedArray


def on_this_device(values: Any) -> Any:
    """Return an array on the current device."""
    if driver.backend().simulated:
        return SimulatedArray.asarray(values)
    import cupy

    return cupy.asarray(values)


def problem(rows: int, columns: int) -> tuple[Any, Any]:
    """Return a matrix and the right-hand side."""
    random = np.random.default_rng(0)
    matrix = random.normal(size=(rows, columns))
    return matrix, matrix @ np.arange(columns) + random.normal(size=rows)


def solve(rows: int, columns: int, steps: int) -> tuple[Any, list[str]]:
    """Return the solution, and the devices that found it."""
    matrix, right = problem(rows, columns)
    mine = task_devices()
    parts = []
    for device, some, goal in zip(
        mine, np.array_split(matrix, len(mine)), np.array_split(right, len(mine)), strict=True
    ):
        with device:
            parts.append((device, on_this_device(some), on_this_device(goal)))
    rate = 1 / np.linalg.norm(matrix, 2) ** 2
    found = on_this_device(np.zeros(columns))
    for _ in range(steps):
        gradients = []
        for device, some, goal in parts:
            here = to_device(found, device)
            with device:
                gradients.append(some.T @ (some @ here - goal))
        for gradient in gradients:
            found = found - to_device(gradient, mine[0]) * rate
    return to_device(found, "cpu"), [str(device) for device in mine]


def statistics(number: int, rows: int) -> tuple[float, str]:
    """Return the mean of a random column, and the device that found it."""
    column = on_this_device(np.random.default_rng(number).normal(size=rows))
    time.sleep(0.005)  # as a kernel of some size would take
    return float(column.sum()) / rows, str(task_devices()[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(), help="the folder for the picture")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--columns", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--columns-beside", type=int, default=200)
    options = parser.parse_args()
    needs("numpy")
    count = min(2, len(devices()))
    with LocalDeviceCluster(n_workers=1, dashboard_address=":0") as cluster, Client(cluster) as c:
        with dask.annotate(devices=list(range(count))):
            solution = c.submit(solve, options.rows, options.columns, options.steps)
        with dask.annotate(device_share=0.25, device_memory="64 MiB"):
            beside = c.map(statistics, range(options.columns_beside), rows=options.rows)
        found, used = solution.result()
        means = c.gather(beside)
        lanes(report(c), options.out / "several_devices.png", ("solve", "statistics"))
    expected = np.linalg.lstsq(*problem(options.rows, options.columns), rcond=None)[0]
    same = np.allclose(np.asarray(found), expected, atol=1e-3)
    close = all(abs(mean) < 6 / np.sqrt(options.rows) for mean, _ in means)
    shared = sorted({device for _, device in means})
    print(f"{len(means)} columns beside it on {', '.join(shared)}")
    print(f"{options.steps} steps on {', '.join(used)}")
    print("the solution is right" if same and close else "the solution is WRONG")
    return int(not (same and close))


if __name__ == "__main__":
    sys.exit(main())
