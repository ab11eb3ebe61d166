"""A hyperparameter search: each device trains one model at a time, and the best one wins.

Run it as ``python examples/hyperparameters.py --out DIR``. Each task fits a ridge regression by
gradient steps with its own strength of regularisation, on the GPU that it gets. CuPy computes on
GPUs, `SimulatedArray` on simulated devices. Results arrive in the order in which they are ready.

Without a GPU, set ``DASK_DEVCTX__SIMULATED_DEVICES=4``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client, as_completed
from needs import needs
from pictures import picture

from dask_devctx import Device, LocalDeviceCluster, driver, report

FEATURES, ROWS, STEPS = 20, 200, 150


def make_data(seed: int) -> tuple[Any, Any]:
    """Return features and targets with noise; only five features matter."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(ROWS, FEATURES))
    truth = np.zeros(FEATURES)
    truth[:5] = [3.0, -2.0, 1.5, 1.0, -1.0]
    return x, x @ truth + random.normal(size=ROWS)


def on_gpu(array: Any) -> Any:
    """Return a host array as an array on the task's device."""
    if driver.backend().simulated:
        from dask_devctx import SimulatedArray

        return SimulatedArray.asarray(array)
    import cupy

    return cupy.asarray(array)


def fit(strength: float) -> tuple[float, float, str]:
    """Return the strength, the error on data that the model did not see, and the device."""
    x, y = map(on_gpu, make_data(0))
    weights = on_gpu(np.zeros(FEATURES))
    for _ in range(STEPS):
        slope = x.T.dot(x.dot(weights) - y) / ROWS + strength * weights
        weights = weights - 0.1 * slope
    unseen_x, unseen_y = map(on_gpu, make_data(1))
    error = ((unseen_x.dot(weights) - unseen_y) ** 2).mean()
    return strength, float(error.get()), str(Device.current())


def draw(results: list[tuple[float, float, str]], path: Path) -> None:
    """Write the errors over the strength, coloured by device."""

    def points(axis: Any) -> None:
        for device in sorted({device for *_, device in results}):
            mine = [(strength, error) for strength, error, where in results if where == device]
            axis.scatter(*zip(*mine, strict=True), label=device)
        axis.set_xscale("log")
        axis.set_xlabel("strength of regularisation; a point is a model")
        axis.set_ylabel("error on unseen data")
        axis.legend(frameon=False)

    picture(path, points, height=3.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="the folder for the picture")
    parser.add_argument("--models", type=int, default=24)
    options = parser.parse_args()
    needs("numpy")
    strengths = np.logspace(-4, 1, options.models).tolist()

    with LocalDeviceCluster(dashboard_address=":0") as cluster, Client(cluster) as client:
        results = []
        for future in as_completed(client.map(fit, strengths)):
            results.append(future.result())
        print(report(client))

    draw(results, options.out / "hyperparameters.png")
    strength, error, where = min(results, key=lambda one: one[1])
    print(f"the best of {len(results)} models: strength {strength:.3g}, on {where}")
    right = error < 1.2 and strength < 1  # the noise has a variance of 1
    print("the best model is right" if right else f"the best model is WRONG: error {error:.3f}")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
