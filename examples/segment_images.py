"""Find and measure the regions in photographs and micrographs, on every GPU of this machine.

Each image goes through a small graph of its own: load, denoise, threshold, label, measure. This
happens in rounds, in turns with a small and a large window of the denoising. The last step of each
round, compare, tells how much of an image both windows agree on. Its two inputs are often on
different devices, so that one of them moves.

Loading is not GPU work and stays on dask's own threads. The two largest images are assigned to
devices, others each round. Each other task gets a device automatically. The same lines compute with
CuPy on GPUs, and with NumPy and SciPy on simulated devices. The measurements are compared with a
run without dask.

    pip install -e ".[demo]"  # in a checkout
    python examples/segment_images.py --out results

A page of dask's dashboard shows the devices while it runs, and so does the terminal. At the end it
writes ``segmented.png``, a contact sheet, ``devices.png``, the tasks on each device and the bytes
between devices, and ``timeline.json`` for https://ui.perfetto.dev. The exit status is 1 if a
measurement differs.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Literal

import dask
import numpy as np
from distributed import Client, Future, wait
from skimage import data

from dask_devctx import (
    Device,
    DriverUnavailableError,
    LocalDeviceCluster,
    devices,
    driver,
    report,
    timeline,
)
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.simulated_array import SimulatedArray

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
STAGES = ("load", "denoise", "threshold", "label", "measure", "compare")
WINDOWS = (3, 5)  # pixels
SMALLEST_REGION = 20  # pixels


@dataclass(frozen=True)
class Segmented:
    """An image with its regions: label 0 is the background."""

    pixels: Any
    labels: Any
    count: int


@dataclass(frozen=True)
class Library:
    """The library that computes: CuPy on GPUs, otherwise NumPy with SciPy.

    Arrays of simulated devices are read before NumPy computes, and kept on their device after it.
    """

    kind: Literal["gpu", "simulated", "host"]

    @property
    def modules(self) -> tuple[Any, Any]:
        names = (
            ("cupy", "cupyx.scipy.ndimage") if self.kind == "gpu" else ("numpy", "scipy.ndimage")
        )
        return import_module(names[0]), import_module(names[1])

    def read(self, array: Any) -> Any:
        return (
            array.get() if self.kind == "simulated" and not isinstance(array, np.ndarray) else array
        )

    def keep(self, array: Any) -> Any:
        return SimulatedArray.asarray(array) if self.kind == "simulated" else array

    def to_host(self, array: Any) -> Any:
        return array.get() if self.kind == "gpu" else array


# -- the stages, which know nothing of dask


def load(name: str) -> Any:
    """Read an image as grey levels, uint8 of (rows, columns)."""
    image = getattr(data, name)()
    if image.ndim == 3:  # luminance, in whole numbers
        red, green, blue = np.moveaxis(image[..., :3].astype(np.uint32), -1, 0)
        image = (299 * red + 587 * green + 114 * blue) // 1000
    return image.astype(np.uint8)


def denoise(pixels: Any, library: Library, window: int) -> Any:
    """Take the median of each pixel's neighbourhood."""
    xp, ndimage = library.modules
    return library.keep(ndimage.median_filter(xp.asarray(library.read(pixels)), size=window))


def threshold(pixels: Any, library: Library) -> tuple[Any, Any]:
    """Split the grey levels in two by Otsu's method; the rarer side is the foreground."""
    xp, _ = library.modules
    levels_of_pixels = library.read(pixels)
    counts = library.to_host(xp.bincount(levels_of_pixels.ravel(), minlength=256)).astype(float)
    below, levels = np.cumsum(counts), np.arange(256)
    above = below[-1] - below
    weighted = np.cumsum(counts * levels)
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = weighted / below - (weighted[-1] - weighted) / above
    level = int(np.nanargmax(below * above * apart**2))
    bright = levels_of_pixels > level
    return pixels, library.keep(bright if above[level] <= below[level] else ~bright)


def label(split: tuple[Any, Any], library: Library) -> Segmented:
    """Number the connected regions of the foreground."""
    _, ndimage = library.modules
    pixels, foreground = split
    labels, number = ndimage.label(library.read(foreground))
    return Segmented(pixels, library.keep(labels), int(number))


def measure(segmented: Segmented, library: Library) -> tuple[Any, Any, Any]:
    """Return the measurements of each region, the pixels and the labels, all in host memory.

    A region's row is its area in pixels, its centre's row and column, and its mean grey level.
    """
    xp, ndimage = library.modules
    pixels, labels = library.read(segmented.pixels), library.read(segmented.labels)
    index = xp.arange(1, segmented.count + 1)
    rows, columns = (xp.asarray(axis) for axis in xp.indices(labels.shape))
    areas = ndimage.sum_labels(xp.ones_like(labels), labels, index)
    sums = [ndimage.sum_labels(what, labels, index) for what in (rows, columns, pixels)]
    table = xp.stack([areas, *(one / areas for one in sums)], axis=1)
    table = table[areas >= SMALLEST_REGION]
    return library.to_host(table), library.to_host(pixels), library.to_host(labels)


def compare(one: Segmented, other: Segmented, library: Library) -> float:
    """Return the share of the pixels that are background in both, or in neither."""
    first, second = library.read(one.labels), library.read(other.labels)
    return float(((first > 0) == (second > 0)).mean())


# -- the same, as tasks


@dataclass
class Round:
    """The tasks of one round for one image."""

    segmented: Future
    measured: Future
    agreed: Future | None


def submit(
    client: Client, image: str, device: Device | None, library: Library, number: int,
    before: Round | None,
) -> Round:  # fmt: skip
    """Send an image's graph of one round to the cluster."""
    window, name = WINDOWS[number % len(WINDOWS)], (image, number)
    with dask.annotate(device=None):
        pixels = client.submit(load, image, key=("load", *name))
    with dask.annotate(device="auto" if device is None else device.uuid):
        denoised = client.submit(denoise, pixels, library, window, key=("denoise", *name))
        split = client.submit(threshold, denoised, library, key=("threshold", *name))
        segmented = client.submit(label, split, library, key=("label", *name))
        measured = client.submit(measure, segmented, library, key=("measure", *name))
        agreed = None
        if before is not None:
            agreed = client.submit(
                compare, segmented, before.segmented, library, key=("compare", *name)
            )
    return Round(segmented, measured, agreed)


def without_dask(image: str) -> Any:
    """Return an image's measurements, computed here on the CPU, one stage after the other."""
    library = Library("host")
    split = threshold(denoise(load(image), library, WINDOWS[0]), library)
    return measure(label(split, library), library)[0]


def same(measured: Any, expected: Any) -> bool:
    """Return whether two tables have the same regions, in any order of their numbers."""
    if measured.shape != expected.shape:
        return False
    ordered = [table[np.lexsort(table.T)] for table in (measured, expected)]
    return bool(np.allclose(*ordered, rtol=1e-12, atol=0))


# -- the pictures and the text


def draw_contact_sheet(results: dict[str, Any], path: Path) -> None:
    """Write every image with its regions in colour."""
    plt = headless_pyplot()
    from skimage.color import label2rgb

    columns = min(6, len(results))
    rows = -(-len(results) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(2.6 * columns, 2.8 * rows + 0.4),
        squeeze=False,
        layout="constrained",
    )
    figure.suptitle("Each image with the regions that were found in it, in colour", fontsize=12)
    for axis in axes.flat:
        axis.axis("off")
    for axis, (name, (table, pixels, labels)) in zip(axes.flat, results.items(), strict=False):
        axis.imshow(label2rgb(labels, pixels, alpha=0.35, bg_label=0))
        axis.set_title(f"{name}: {len(table)} regions", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_devices(done: Any, names: dict[str, str], path: Path) -> None:
    """Write the tasks on each device over time, and the bytes that moved between the devices."""
    plt = headless_pyplot()
    runs = [run for run in [*done, *done.without_device] if run.prefix in STAGES and run.start]
    origin = min(run.start for run in runs)
    lanes = [*names.values(), "no device"]
    figure, (tasks, moves) = plt.subplots(
        1, 2, figsize=(15, 1.8 + 0.5 * len(lanes)), width_ratios=(3, 1), layout="constrained"
    )
    colours = dict(zip(STAGES, plt.get_cmap("tab10").colors, strict=False))
    for stage in STAGES:
        of_stage = [run for run in runs if run.prefix == stage]
        tasks.barh(
            [lanes.index(names.get(run.uuid, "no device")) for run in of_stage],
            [run.stop - run.start for run in of_stage],
            left=[run.start - origin for run in of_stage],
            color=colours[stage],
            edgecolor="white",
            linewidth=0.2,
            label=stage,
        )
    tasks.set_yticks(range(len(lanes)), lanes)
    tasks.invert_yaxis()
    tasks.set_xlabel("seconds since the first task began")
    tasks.set_title("Which device ran which step, and when; a gap is idle time")
    tasks.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=len(STAGES), frameon=False)
    table = moved(done, names)
    moves.imshow(table, cmap="Greens")
    for (row, column), megabytes in np.ndenumerate(table):
        if megabytes:
            dark = megabytes > table.max() / 2
            text = f"{megabytes:.3g}"
            moves.text(column, row, text, ha="center", va="center", color="w" if dark else "k")
    for set_ticks in (moves.set_xticks, moves.set_yticks):
        set_ticks(range(len(names)), names.values())
    moves.set_ylabel("from")
    moves.set_xlabel("to")
    moves.set_title("Megabytes copied between devices")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def moved(done: Any, names: dict[str, str]) -> Any:
    """Return the megabytes from each device to each other one."""
    order = list(names)
    table = np.zeros((len(order), len(order)))
    for row in done.transfers:
        if row.source in names and row.destination in names:
            table[order.index(row.source), order.index(row.destination)] += row.nbytes / 1e6
    return table


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
    parser.add_argument(
        "--seconds", type=float, default=20, help="begin further rounds for this long"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    with ExitStack() as stack:
        found, simulated = find_devices(stack)
        library = Library("simulated" if simulated else "gpu")
        return segment(options.images, options.seconds, options.out, found, library)


def segment(
    images: list[str], seconds: float, out: Path, found: tuple[Device, ...], library: Library
) -> int:
    """Segment the images, show the results, and return the exit status."""
    sizes = {name: load(name).size for name in images}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:2]

    with LocalDeviceCluster(synchronize=True) as cluster, Client(cluster) as client:
        page = cluster.dashboard_link.replace("/status", "/devices")
        print(f"See the devices at work for the next {seconds:.0f} s:\n\n    {page}\n", flush=True)
        with live_view(cluster.scheduler_address):
            first, latest, rounds = run_rounds(client, images, largest, seconds, found, library)
        results = client.gather({name: one.measured for name, one in first.items()})
        agreed = client.gather({name: one.agreed for name, one in latest.items()})
        done = report(client)
        timeline(client, out / "timeline.json")

    names = {device.uuid: f"cuda:{device.device_id}" for device in found}
    draw_contact_sheet(results, out / "segmented.png")
    draw_devices(done, names, out / "devices.png")
    print(f"\n{rounds} rounds of {len(images)} images.\n\n{done}\n")
    wrong = print_images(results, agreed, done, names)
    print(
        f"\n{out / 'segmented.png'}: the images with their regions in colour"
        f"\n{out / 'devices.png'}: the tasks on each device, and the bytes between devices"
        f"\n{out / 'timeline.json'}: each task and each copy; open it at https://ui.perfetto.dev"
    )
    if wrong:
        print(f"{wrong} of {len(results)} images differ from the run without dask.")
    return int(wrong > 0)


def run_rounds(
    client: Client, images: list[str], largest: list[str], seconds: float,
    found: tuple[Device, ...], library: Library,
) -> tuple[dict[str, Round], dict[str, Round], int]:  # fmt: skip
    """Run rounds for some time, two at least; return the first, the last, and their number."""
    begin = time.monotonic()
    first: dict[str, Round] = {}
    before: dict[str, Round] = {}
    for number in count():
        # The two largest images go to other devices each round.
        turn = (number, -1 - number)
        assigned = {name: found[n % len(found)] for name, n in zip(largest, turn, strict=False)}
        latest = {
            name: submit(client, name, assigned.get(name), library, number, before.get(name))
            for name in images
        }
        first = first or latest
        # One round runs while the next one waits.
        wait([one.measured for one in before.values()])
        before = latest
        if number > 0 and time.monotonic() - begin > seconds:
            break
    wait([future for one in latest.values() for future in (one.measured, one.agreed)])
    return first, latest, number + 1


@contextmanager
def live_view(address: str) -> Iterator[None]:
    """Show the devices live while it is open, where there is a terminal."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        yield
        return
    view = subprocess.Popen([sys.executable, "-m", "dask", "devctx", "top", address])
    try:
        yield
    finally:
        view.send_signal(signal.SIGINT)
        view.wait()


def print_images(
    results: dict[str, Any], agreed: dict[str, float], done: Any, names: dict[str, str]
) -> int:
    """Print a line for each image; return the number of images that differ."""
    ran: defaultdict[str, set[str]] = defaultdict(set)
    for run in done:
        ran[run.key[1]].add(names[run.uuid])
    wrong = 0
    print(f"{'image':22}{'regions':>8}{'agreement':>11}  {'check':8}devices")
    for name, (table, _, _) in results.items():
        fits = same(table, without_dask(name))
        wrong += not fits
        where = " ".join(sorted(ran[name]))
        check = "same" if fits else "DIFFERS"
        print(f"{name:22}{len(table):8}{agreed[name]:11.1%}  {check:8}{where}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
