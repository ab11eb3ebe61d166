"""Batch inference over images: the CPU decodes them beside the GPUs, which run the model.

Run it as ``python examples/batch_inference.py --out DIR``. It first writes a directory of
images. Decoding takes no device (``device=None``), so it runs on dask's own threads. The model is
made once, on one device, and is an input of each batch's task: each other device gets one copy of
it. One worker has all GPUs (``n_workers=1``), so each batch goes to the GPU that is free first.
With a worker for each GPU, dask prefers workers that have the model, and the shares differ more
unless ``threads_per_worker=2`` lets dask hand the batches out one by one.
The model is torch's on GPUs; on simulated devices, it has the same layers of `SimulatedArray`.

Needs torch on GPUs, NumPy elsewhere. Without a GPU, set ``DASK_DEVCTX__SIMULATED_DEVICES=4``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client, wait
from needs import needs
from pictures import lanes

from dask_devctx import Device, LocalDeviceCluster, driver, report
from dask_devctx.simulated_array import SimulatedArray

SIDE = 64
WIDTH = 1024
CLASSES = ("dark", "bright")


def make_images(folder: Path, count: int) -> list[str]:
    """Write grey images in the format PGM, every second one bright, and return their paths."""
    random = np.random.default_rng(0)
    paths = []
    for number in range(count):
        pixels = random.integers(0, 100, (SIDE, SIDE)) + 150 * (number % 2)
        paths.append(str(folder / f"{number:04}.pgm"))
        header = f"P5 {SIDE} {SIDE} 255\n".encode()
        Path(paths[-1]).write_bytes(header + pixels.astype(np.uint8).tobytes())
    return paths


def decode(paths: list[str]) -> Any:
    """Return a batch of images as numbers from 0 to 1; this is work of the CPU."""
    images = [np.frombuffer(Path(path).read_bytes()[-SIDE * SIDE :], np.uint8) for path in paths]
    return np.stack(images).astype(np.float32) / 255


@dataclass
class Layers:
    """The model on simulated devices: two layers of arrays. They move with the object."""

    first: Any
    second: Any

    def __call__(self, x: Any) -> Any:
        return (x.dot(self.first) - 0.5).dot(self.second)


def make_model() -> Any:
    """Return a model on the task's device: the mean of an image less 0.5, for and against.

    Each of `WIDTH` inner values is that mean, so that there is some work.
    """
    mean = np.full((SIDE * SIDE, WIDTH), 1 / SIDE**2, np.float32)
    sides = np.tile(np.array([[-1.0, 1.0]], np.float32) / WIDTH, (WIDTH, 1))
    if driver.backend().simulated:
        return Layers(SimulatedArray.asarray(mean), SimulatedArray.asarray(sides))
    import torch

    inner, last = torch.nn.Linear(SIDE * SIDE, WIDTH), torch.nn.Linear(WIDTH, 2, bias=False)
    model = torch.nn.Sequential(inner, last)
    with torch.no_grad():
        inner.weight.copy_(torch.from_numpy(mean.T))
        inner.bias.fill_(-0.5)
        last.weight.copy_(torch.from_numpy(sides.T))
    return model.to("cuda")  # the task's own GPU


def infer(batch: Any, model: Any) -> tuple[list[str], str]:
    """Return the class of each image, and the device."""
    if driver.backend().simulated:
        scores = model(SimulatedArray.asarray(batch)).get()
    else:
        import torch

        with torch.inference_mode():
            scores = model(torch.from_numpy(batch).to("cuda")).cpu().numpy()
    return [CLASSES[best] for best in scores.argmax(axis=1)], str(Device.current())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="the folder for the picture")
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    needs("numpy", on_gpus="torch")

    with (
        tempfile.TemporaryDirectory() as folder,
        LocalDeviceCluster(n_workers=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        paths = make_images(Path(folder), options.images)
        parts = [paths[i : i + options.batch] for i in range(0, len(paths), options.batch)]
        model = client.submit(make_model)
        wait(model)
        with dask.annotate(device=None):  # beside the GPUs
            batches = client.map(decode, parts)
        results = client.gather(client.map(infer, batches, model=model))
        done = report(client)

    print(done)
    lanes(done, options.out / "batch_inference.png", ("decode", "make_model", "infer"))
    found = [name for names, _ in results for name in names]
    right = found == [CLASSES[number % 2] for number in range(options.images)]
    print(f"{len(found)} images: {dict(Counter(found))}")
    print(f"batches by device: {dict(Counter(device for _, device in results))}")
    print("classes are right" if right else "classes are WRONG")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
