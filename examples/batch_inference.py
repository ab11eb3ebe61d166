"""Batch inference over images: the CPU decodes them beside the GPUs, which run the model.

Run it as ``python examples/batch_inference.py --out DIR``. Decoding takes no device
(``device=None``), so it runs on dask's own threads. Each batch goes to the GPU that is free first.
The model is two layers of torch on GPUs; on simulated devices, the same layers on `SimulatedArray`.
The images are made and written to a folder first.

Without a GPU, set ``DASK_DEVCTX__SIMULATED_DEVICES=4``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client

from dask_devctx import Device, LocalDeviceCluster, driver, report

SIDE = 16
CLASSES = ("dark", "bright")


def make_images(folder: Path, count: int) -> list[str]:
    """Write images, every second one bright, and return their paths."""
    random = np.random.default_rng(0)
    paths = []
    for number in range(count):
        image = random.integers(0, 100, (SIDE, SIDE)) + 150 * (number % 2)
        paths.append(str(folder / f"{number:04}.npy"))
        np.save(paths[-1], image.astype(np.uint8))
    return paths


def decode(paths: list[str]) -> Any:
    """Return a batch of images as numbers from 0 to 1; this is work of the CPU."""
    return np.stack([np.load(path).ravel() for path in paths]).astype(np.float32) / 255


def layers() -> tuple[Any, Any]:
    """Return the weights of two layers that tell bright from dark."""
    first = np.full((SIDE * SIDE, 1), 1 / SIDE**2, np.float32)
    return first, np.array([[-1.0, 1.0]], np.float32)


def infer(batch: Any) -> tuple[list[str], str]:
    """Return the class of each image, and the device."""
    first, second = layers()
    if driver.backend().simulated:
        from dask_devctx import SimulatedArray

        x, one, two = map(SimulatedArray.asarray, (batch, first, second))
        scores = ((x.dot(one) - 0.5).dot(two)).get()
    else:
        import torch

        with torch.inference_mode():  # "cuda" is the task's own GPU
            x, one, two = (torch.from_numpy(part).to("cuda") for part in (batch, first, second))
            scores = ((x @ one - 0.5) @ two).cpu().numpy()
    return [CLASSES[best] for best in scores.argmax(axis=1)], str(Device.current())


def draw(client: Client, path: Path) -> None:
    """Write the tasks on each device over time; nothing without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    done = report(client)
    runs = [*done, *done.without_device]
    origin = min(run.start for run in runs)
    names = {device.uuid: f"cuda:{device.device_id}" for device in done.devices}
    figure, axis = plt.subplots(figsize=(7, 2.4), layout="constrained")
    for prefix, colour in (("decode", "tab:gray"), ("infer", "tab:green")):
        mine = [run for run in runs if run.prefix == prefix and run.start]
        lanes = [names.get(run.uuid, "no device") for run in mine]
        lengths = [run.stop - run.start for run in mine]
        starts = [run.start - origin for run in mine]
        axis.barh(lanes, lengths, left=starts, color=colour, edgecolor="white", label=prefix)
    axis.set_xlabel("seconds")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="the folder for the picture")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    with (
        tempfile.TemporaryDirectory() as folder,
        LocalDeviceCluster(dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        paths = make_images(Path(folder), options.images)
        parts = [paths[i : i + options.batch] for i in range(0, len(paths), options.batch)]
        with dask.annotate(device=None):  # beside the GPUs
            batches = client.map(decode, parts)
        results = client.gather(client.map(infer, batches))
        draw(client, options.out / "batch_inference.png")

    found = [name for names, _ in results for name in names]
    right = found == [CLASSES[number % 2] for number in range(options.images)]
    print(f"{len(found)} images: {dict(Counter(found))}")
    print(f"batches by device: {dict(Counter(device for _, device in results))}")
    print("classes are right" if right else "classes are WRONG")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
