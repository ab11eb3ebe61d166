"""A model server: an actor keeps a model on one device, and answers many callers at a time.

Run it as ``python examples/model_server.py --out DIR``. Callers await `predict`, an `async`
method. The actor gathers the requests that arrive within some milliseconds, and computes them as
one batch on its device. While it is made, no other task runs there (``device_share=1``).
CuPy computes on GPUs, `SimulatedArray` on simulated devices.

Without a GPU, set ``DASK_DEVCTX__SIMULATED_DEVICES=4``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client
from needs import needs
from pictures import picture

from dask_devctx import Device, LocalDeviceCluster, driver


def on_gpu(array: Any) -> Any:
    """Return a host array as an array on the current device."""
    if driver.backend().simulated:
        from dask_devctx import SimulatedArray

        return SimulatedArray.asarray(array)
    import cupy

    return cupy.asarray(array)


class Server:
    """A linear model on the actor's device. Requests wait for each other in a batch."""

    def __init__(self, weights: Any, patience_s: float = 0.01) -> None:
        self.weights = on_gpu(weights)
        self.patience_s = patience_s
        self.waiting: list[tuple[Any, asyncio.Future[float]]] = []
        self.batches: list[int] = []

    async def predict(self, features: Any) -> float:
        """Return the model's answer to one request; it is computed in a batch."""
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((features, answer))
        if len(self.waiting) == 1:  # the first of a batch computes it
            await asyncio.sleep(self.patience_s)
            self.compute()
        return await answer

    def compute(self) -> None:
        """Answer all that wait, on the actor's device."""
        batch, self.waiting = self.waiting, []
        self.batches.append(len(batch))
        rows = on_gpu(np.stack([features for features, _ in batch]))
        for (_, answer), value in zip(batch, rows.dot(self.weights).get(), strict=True):
            answer.set_result(float(value))

    def state(self) -> tuple[str, list[int]]:
        """Return the actor's device, and the sizes of the batches."""
        return str(Device.current()), self.batches


def draw(batches: list[int], path: Path) -> None:
    """Write how many requests each batch answered."""

    def bars(axis: Any) -> None:
        axis.bar(range(1, len(batches) + 1), batches, color="#4477aa")
        axis.set_xlabel("batch")
        axis.set_ylabel("requests")
        axis.locator_params(integer=True)

    picture(path, bars)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="the folder for the picture")
    parser.add_argument("--requests", type=int, default=100)
    options = parser.parse_args()
    needs("numpy")
    weights = np.array([1.0, 2.0, 3.0])
    requests = np.random.default_rng(0).normal(size=(options.requests, 3))

    with LocalDeviceCluster(dashboard_address=":0") as cluster, Client(cluster) as client:
        with dask.annotate(device_share=1):  # alone there while it is made
            server = client.submit(Server, weights, actor=True).result()
        answers = [server.predict(one) for one in requests]  # all at once
        values = [answer.result() for answer in answers]
        where, batches = server.state().result()

    draw(batches, options.out / "model_server.png")
    right = np.allclose(values, requests @ weights)
    print(f"{len(values)} requests on {where} in {len(batches)} batches; largest {max(batches)}")
    print("answers are right" if right else "answers are WRONG")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
