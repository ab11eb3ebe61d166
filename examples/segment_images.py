"""Find and measure the regions in photographs and micrographs, on every GPU of this machine.

Each image goes through a small graph of its own: load, denoise, threshold, label, measure.
Loading is not GPU work and stays on dask's own threads. The two largest images are assigned to
the first and to the last device. Each other task gets a device automatically. The same lines
compute with CuPy on GPUs, and with NumPy and SciPy on simulated devices. The measurements are
compared with a run without dask.

    pip install -e ".[demo]"  # in a checkout
    python examples/segment_images.py --out results

writes ``segmented.png``, a contact sheet, and ``timeline.png``, the tasks by device and time.
The exit status is 1 if a measurement differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client, Future, progress
from skimage import data

from dask_devctx import Device, DriverUnavailableError, LocalDeviceCluster, devices, driver
from dask_devctx.driver.simulated import SimulatedMachine

IMAGES = [
    "astronaut",
    "brick",
    "camera",
    "cell",
    "chelsea",
    "clock",
    "coffee",
    "coins",
    "gravel",
    "hubble_deep_field",
    "immunohistochemistry",
    "microaneurysms",
    "moon",
    "page",
    "retina",
    "rocket",
    "text",
]
STAGES = ("load", "denoise", "threshold", "label", "measure")
SMALLEST_REGION = 20  # pixels


@dataclass(frozen=True)
class Step:
    """The result of a task: its value, and where and when it ran."""

    value: Any
    image: str
    stage: str
    device_id: int | None
    start: float
    stop: float


@dataclass(frozen=True)
class Segmented:
    """An image with its regions: label 0 is the background."""

    pixels: Any
    labels: Any
    count: int


def array_modules(simulated: bool) -> tuple[Any, Any]:
    """Return the modules to compute with: CuPy's on GPUs, otherwise NumPy's and SciPy's."""
    names = ("numpy", "scipy.ndimage") if simulated else ("cupy", "cupyx.scipy.ndimage")
    return import_module(names[0]), import_module(names[1])


# -- the five stages, which know nothing of dask


def load(name: str) -> Any:
    """Read an image as grey levels, uint8 of (rows, columns)."""
    image = getattr(data, name)()
    if image.ndim == 3:  # luminance, in whole numbers
        red, green, blue = np.moveaxis(image[..., :3].astype(np.uint32), -1, 0)
        image = (299 * red + 587 * green + 114 * blue) // 1000
    return image.astype(np.uint8)


def denoise(pixels: Any, *, simulated: bool) -> Any:
    """Take the median of each pixel's neighbourhood."""
    xp, ndimage = array_modules(simulated)
    return ndimage.median_filter(xp.asarray(pixels), size=3)


def threshold(pixels: Any, *, simulated: bool) -> Any:
    """Split the grey levels in two by Otsu's method; the rarer side is the foreground."""
    xp, _ = array_modules(simulated)
    counts = xp.bincount(pixels.ravel(), minlength=256)
    counts = np.asarray(counts if simulated else counts.get(), dtype=float)
    below, levels = np.cumsum(counts), np.arange(256)
    above = below[-1] - below
    weighted = np.cumsum(counts * levels)
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = weighted / below - (weighted[-1] - weighted) / above
    level = int(np.nanargmax(below * above * apart**2))
    bright = pixels > level
    return pixels, (bright if above[level] <= below[level] else ~bright)


def label(split: tuple[Any, Any], *, simulated: bool) -> Segmented:
    """Number the connected regions of the foreground."""
    _, ndimage = array_modules(simulated)
    pixels, foreground = split
    labels, count = ndimage.label(foreground)
    return Segmented(pixels, labels, int(count))


def measure(segmented: Segmented, *, simulated: bool) -> tuple[Any, Any, Any]:
    """Return the measurements of each region, the pixels and the labels, all in host memory.

    A region's row is its area in pixels, its centre's row and column, and its mean grey level.
    """
    xp, ndimage = array_modules(simulated)
    index = xp.arange(1, segmented.count + 1)
    ones = xp.ones_like(segmented.labels)
    rows, columns = (xp.asarray(axis) for axis in xp.indices(segmented.labels.shape))
    areas = ndimage.sum_labels(ones, segmented.labels, index)
    sums = [
        ndimage.sum_labels(what, segmented.labels, index)
        for what in (rows, columns, segmented.pixels)
    ]
    table = xp.stack([areas, *(one / areas for one in sums)], axis=1)
    table = table[areas >= SMALLEST_REGION]
    if not simulated:
        return table.get(), segmented.pixels.get(), segmented.labels.get()
    return table, segmented.pixels, segmented.labels


# -- the same, as tasks


def run_stage(fn: Callable[[Any], Any], image: str, stage: str, before: Step | None) -> Step:
    """Run a stage on the result of the stage before, and note where and when."""
    start = time.time()
    value = fn(image if before is None else before.value)
    device = Device.current()
    if device is not None:
        device.sync()  # a kernel may still run after its call returned
    device_id = None if device is None else device.device_id
    return Step(value, image, stage, device_id, start, time.time())


def submit(client: Client, image: str, device: Device | None, simulated: bool) -> list[Future]:
    """Send an image's graph to the cluster; one future per stage."""
    with dask.annotate(device=None):
        steps = [client.submit(run_stage, load, image, "load", None, pure=False)]
    with dask.annotate(device="auto" if device is None else device.uuid):
        for stage, fn in zip(STAGES[1:], (denoise, threshold, label, measure), strict=True):
            on = partial(fn, simulated=simulated)
            steps.append(client.submit(run_stage, on, image, stage, steps[-1], pure=False))
    return steps


def without_dask(image: str) -> Any:
    """Return an image's measurements, computed here on the CPU, one stage after the other."""
    value: Any = load(image)
    for fn in (denoise, threshold, label, measure):
        value = fn(value, simulated=True)
    return value[0]


def same(measured: Any, expected: Any) -> bool:
    """Return whether two tables have the same regions, in any order of their numbers."""
    if measured.shape != expected.shape:
        return False
    ordered = [table[np.lexsort(table.T)] for table in (measured, expected)]
    return bool(np.allclose(*ordered, rtol=1e-12, atol=0))


# -- the pictures and the text


def draw_contact_sheet(results: dict[str, Step], path: Path) -> None:
    """Write every image with its regions in colour."""
    plt = headless_pyplot()
    from skimage.color import label2rgb

    columns = min(6, len(results))
    rows = -(-len(results) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(2.6 * columns, 2.8 * rows), squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, (name, step) in zip(axes.flat, results.items(), strict=False):
        table, pixels, labels = step.value
        axis.imshow(label2rgb(labels, pixels, alpha=0.35, bg_label=0))
        axis.set_title(f"{name}: {len(table)}", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_timeline(steps: list[Step], path: Path) -> None:
    """Draw which task ran on which device, and when."""
    plt = headless_pyplot()
    origin = min(step.start for step in steps)
    places = sorted({-1 if step.device_id is None else step.device_id for step in steps})
    figure, axis = plt.subplots(figsize=(10, 1.2 + 0.5 * len(places)))
    colours = dict(zip(STAGES, plt.get_cmap("tab10").colors, strict=False))
    for stage in STAGES:
        bars = [
            (places.index(-1 if s.device_id is None else s.device_id), s)
            for s in steps
            if s.stage == stage
        ]
        axis.barh(
            [place for place, _ in bars],
            [1000 * (s.stop - s.start) for _, s in bars],
            left=[1000 * (s.start - origin) for _, s in bars],
            color=colours[stage],
            edgecolor="white",
            linewidth=0.3,
            label=stage,
        )
    axis.set_yticks(range(len(places)), ["no device" if p < 0 else f"device {p}" for p in places])
    axis.set_xlabel("milliseconds since the first task began")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=len(STAGES), frameon=False)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def headless_pyplot() -> Any:
    """Return matplotlib's pyplot, set to draw to files only."""
    import matplotlib as mpl

    mpl.use("Agg")
    return import_module("matplotlib.pyplot")


def find_devices(stack: ExitStack) -> tuple[tuple[Device, ...], bool]:
    """Return this machine's GPUs, or four simulated ones, and whether they are simulated."""
    try:
        found = devices()
    except DriverUnavailableError as error:
        print(f"No GPU here ({error.reason}): four simulated devices take their place.")
        os.environ[driver.SIMULATED_DEVICES_VARIABLE] = "4"  # for the worker's process
        stack.enter_context(driver.use(SimulatedMachine(4).backend()))  # for this one
        found = devices()
    if not found:
        sys.exit("CUDA_VISIBLE_DEVICES hides every GPU of this machine: unset it, or name some")
    simulated = driver.backend().simulated
    kind = "simulated devices" if simulated else found[0].name
    print(f"Using {len(found)} × {kind}: {', '.join(map(str, found))}")
    return found, simulated


def main() -> int:
    """Run the example; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="the folder for the pictures")
    parser.add_argument("--images", nargs="+", choices=IMAGES, default=IMAGES, metavar="NAME")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    with ExitStack() as stack:
        return segment(options.images, options.out, *find_devices(stack))


def segment(images: list[str], out: Path, found: tuple[Device, ...], simulated: bool) -> int:
    """Segment the images, show the results, and return the exit status."""
    sizes = {name: load(name).size for name in images}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)
    assigned = dict(zip(largest[:2], (found[0], found[-1]), strict=False))

    with LocalDeviceCluster(dashboard_address=":0") as cluster, Client(cluster) as client:
        graphs = {name: submit(client, name, assigned.get(name), simulated) for name in images}
        everything = [future for graph in graphs.values() for future in graph]
        progress(everything, notebook=False)
        print()
        results = client.gather({name: graph[-1] for name, graph in graphs.items()})
        with dask.annotate(device=None):
            steps = client.gather(client.map(strip, everything, pure=False))

    draw_contact_sheet(results, out / "segmented.png")
    draw_timeline(steps, out / "timeline.png")

    wrong = 0
    print(f"{'image':22}{'regions':>8}  {'device':16}{'ms':>8}  check")
    for name, step in results.items():
        own = [one for one in steps if one.image == name and one.device_id is not None]
        where = ",".join(map(str, sorted({one.device_id for one in own})))
        where += " (assigned)" if name in assigned else ""
        milliseconds = 1000 * sum(one.stop - one.start for one in own)
        fits = same(step.value[0], without_dask(name))
        wrong += not fits
        regions = len(step.value[0])
        print(
            f"{name:22}{regions:8}  {where:16}{milliseconds:8.1f}  {'same' if fits else 'DIFFERS'}"
        )
    print(f"\nWrote {out / 'segmented.png'} and {out / 'timeline.png'}.")
    if wrong:
        print(f"{wrong} of {len(results)} images differ from the run without dask.")
    return int(wrong > 0)


def strip(step: Step) -> Step:
    """Return a step without its value, which may be large."""
    return Step(None, step.image, step.stage, step.device_id, step.start, step.stop)


if __name__ == "__main__":
    sys.exit(main())
