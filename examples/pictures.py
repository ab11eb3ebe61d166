"""The pictures of the examples; without matplotlib there are none."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# A few colours that differ for most eyes.
COLOURS = ("#4477aa", "#ee8866", "#44aa99", "#bbaa33", "#aa4499", "#777777")


def picture(path: Path, draw: Callable[[Any], None], *, height: float = 2.4) -> None:
    """Write a picture; `draw` gets the axes."""
    if find_spec("matplotlib") is None:
        print(f"no {path.name}: matplotlib is not installed")
        return
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axis = plt.subplots(figsize=(7, height), layout="constrained")
    draw(axis)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    print(f"{path}: a picture")


def above(axis: Any) -> None:
    """Put a legend above the axes, as wide as they are at most."""
    axis.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)


def lanes(done: Any, path: Path, prefixes: tuple[str, ...]) -> None:
    """Write the tasks of some names on each device over time; `done` is a report."""
    ordered = sorted(done.devices, key=lambda device: device.device_id)
    names = {(device.worker, device.device_id): f"cuda:{device.device_id}" for device in ordered}
    runs = [run for run in [*done, *done.without_device] if run.prefix in prefixes and run.start]
    origin = min((run.start for run in runs), default=0)
    colours = dict(zip(prefixes, COLOURS, strict=False))

    def draw(axis: Any) -> None:
        last = [] if all(run.device_ids for run in runs) else ["no device"]
        axis.barh([*dict.fromkeys(names.values()), *last][::-1], 0)  # the order of the lanes
        for prefix in sorted({run.prefix for run in runs}, key=prefixes.index):
            bars = [
                (names.get((run.worker, ordinal), "no device"), run)
                for run in runs
                if run.prefix == prefix
                for ordinal in run.device_ids or (None,)
            ]
            axis.barh(
                [name for name, _ in bars],
                [run.stop - run.start for _, run in bars],
                left=[run.start - origin for _, run in bars],
                color=colours[prefix],
                edgecolor="white",
                linewidth=0.3,
                label=prefix,
            )
        axis.set_xlabel("seconds since the first task began")
        above(axis)

    picture(path, draw, height=1.6 + 0.3 * len(names))


def contact_sheet(results: dict[str, Any], path: Path) -> None:
    """Write images with their regions in colour: the table, the pixels and the labels of each."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from skimage.color import label2rgb

    columns = min(6, len(results))
    rows = -(-len(results) // columns)
    size = (1.7 * columns, 1.9 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.axis("off")
    for axis, (name, (table, pixels, labels, _)) in zip(axes.flat, results.items(), strict=False):
        axis.imshow(label2rgb(labels, pixels, alpha=0.35, bg_label=0))
        axis.set_title(f"{name}: {len(table)} regions", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)
    print(f"{path}: a picture")
