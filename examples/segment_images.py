"""Find and measure the regions in photographs and micrographs, on every GPU of this machine.

Run it as ``make demo``, or as ``python examples/segment_images.py --out DIR``. Each image goes
through a graph: load, denoise, threshold, label, measure, with a small and with a large window of
the filter. For two images, the windows are pinned to different devices, so that `compare`
gets an input from another device. CuPy computes on GPUs, NumPy and SciPy on simulated devices. The
measurements are compared with a run without dask.

It needs scikit-image and SciPy. Without a GPU, set ``DASK_DEVCTX__SIMULATED_DEVICES=4``.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client
from needs import needs
from pictures import contact_sheet, lanes

from dask_devctx import LocalDeviceCluster, devices, driver, report, timeline, to_device
from dask_devctx.simulated_array import SimulatedArray

IMAGES = "astronaut camera cell chelsea clock coffee coins gravel moon page retina text".split()  # noqa: SIM905
STAGES = ("load", "denoise", "threshold", "label", "measure", "compare")
WINDOWS, SMALLEST_REGION = (3, 5), 20  # pixels


def stage(function: Any) -> Any:
    """Let a function compute with CuPy on GPUs, and with NumPy on simulated devices."""

    @functools.wraps(function)
    def run(*values: Any, **options: Any) -> Any:
        if not driver.backend().simulated:
            import cupy
            from cupyx.scipy import ndimage

            return function(cupy, ndimage, *map(cupy.asarray, values), **options)
        from scipy import ndimage

        values = tuple(v if isinstance(v, np.ndarray) else v.get() for v in values)
        found = function(np, ndimage, *values, **options)
        return SimulatedArray.asarray(found) if isinstance(found, np.ndarray) else found

    return run


def load(name: str) -> Any:
    """Read an image as grey levels, uint8 of (rows, columns), in host memory."""
    from skimage import data

    image = getattr(data, name)()
    grey = image if image.ndim == 2 else image[..., :3].astype(int) @ [299, 587, 114] // 1000
    return grey.astype(np.uint8)


@stage
def denoise(xp: Any, ndimage: Any, pixels: Any, *, window: int) -> Any:
    """Take the median of each pixel's neighbourhood."""
    return ndimage.median_filter(pixels, size=window)


@stage
def threshold(xp: Any, ndimage: Any, pixels: Any) -> Any:
    """Split the grey levels in two by Otsu's method; the rarer side is the foreground."""
    counts = xp.bincount(pixels.ravel(), minlength=256)
    below, sums = xp.cumsum(counts), xp.cumsum(counts * xp.arange(256))
    above = below[-1] - below
    apart = sums / xp.maximum(below, 1) - (sums[-1] - sums) / xp.maximum(above, 1)
    level = int(xp.argmax(below * above * apart**2))
    return pixels > level if above[level] <= below[level] else pixels <= level


@stage
def label(xp: Any, ndimage: Any, foreground: Any) -> Any:
    """Number the connected regions of the foreground; the background is 0."""
    return ndimage.label(foreground)[0]


@stage
def measure(xp: Any, ndimage: Any, pixels: Any, labels: Any) -> Any:
    """Return each region's area, the row and column of its centre, and its mean grey level."""
    index = xp.arange(1, int(labels.max()) + 1)
    areas = ndimage.sum_labels(xp.ones_like(labels), labels, index)
    means = [ndimage.mean(part, labels, index) for part in (*xp.indices(labels.shape), pixels)]
    return xp.stack([areas, *means], axis=1)[areas >= SMALLEST_REGION].tolist()


@stage
def compare(xp: Any, ndimage: Any, one: Any, other: Any) -> float:
    """Return the share of the pixels that are background in both, or in neither."""
    return float(((one > 0) == (other > 0)).mean())


def same(measured: Any, image: str) -> bool:
    """Return whether a run on the CPU without dask finds the same regions, in any order."""
    from scipy import ndimage

    pixels = denoise.__wrapped__(np, ndimage, load(image), window=WINDOWS[0])
    labels = label.__wrapped__(np, ndimage, threshold.__wrapped__(np, ndimage, pixels))
    expected = measure.__wrapped__(np, ndimage, pixels, labels)
    return len(measured) == len(expected) and np.allclose(sorted(measured), sorted(expected))


def submit(client: Client, image: str, pinned: bool) -> tuple[Any, ...]:
    """Send an image's graph; return its measurements, pixels, labels and agreement."""
    with dask.annotate(device=None):
        pixels = client.submit(load, image)
    found = []
    for window, device in zip(WINDOWS, devices()[:1] + devices()[-1:], strict=True):
        with dask.annotate(device=device if pinned else "auto"):
            smooth = client.submit(denoise, pixels, window=window, pure=False)
            labels = client.submit(label, client.submit(threshold, smooth))
            found.append((smooth, labels, client.submit(measure, smooth, labels)))
    (smooth, labels, table), (_, others, _) = found
    shown = [client.submit(to_device, array, "cpu") for array in (smooth, labels)]
    return table, *shown, client.submit(compare, labels, others)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="the folder for the pictures")
    parser.add_argument("--images", nargs="+", default=IMAGES, choices=IMAGES, metavar="NAME")
    options = parser.parse_args()
    needs("skimage", "scipy", "matplotlib")
    options.out.mkdir(parents=True, exist_ok=True)
    with LocalDeviceCluster(dashboard_address=":0") as cluster, Client(cluster) as client:
        print("The devices at work:", cluster.dashboard_link.replace("status", "devices"))
        sent = {name: submit(client, name, name in options.images[:2]) for name in options.images}
        results = client.gather(sent)
        print(done := report(client))
        timeline(client, options.out / "timeline.json")

    contact_sheet(results, options.out / "segmented.png")
    lanes(done, options.out / "devices.png", STAGES)
    for name, (table, _, _, agreed) in results.items():
        print(f"{name:12}{len(table):6} regions, both windows agree on {agreed:.1%}")
    wrong = [name for name, (table, *_) in results.items() if not same(table, name)]
    print(f"regions of {wrong} are WRONG" if wrong else "regions are right")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
