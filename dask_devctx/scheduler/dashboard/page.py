"""The documents of the page ``/devices`` and of each of its plots alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final

from bokeh.document import Document
from distributed import Scheduler

from dask_devctx.dask_internals.dashboard import added_pages, template, update_regularly
from dask_devctx.scheduler.dashboard.feed import Feed
from dask_devctx.scheduler.dashboard.figures import DARK, LIGHT, LaneAxis, TimeAxis
from dask_devctx.scheduler.dashboard.levels import memory_plot, utilization_plot
from dask_devctx.scheduler.dashboard.tables import FailuresTable, Glance, TransferMatrix
from dask_devctx.scheduler.dashboard.timeline import Timeline

_INTERVAL_MS: Final = 1000
_TEMPLATES: Final = str(Path(__file__).parent / "templates")

PLOTS: Final = ("glance", "timeline", "memory", "utilization", "transfers", "failures")
# dask's own pages show one device of each worker, and only where the scheduler has a GPU.


def shown(scheduler: Scheduler) -> AbstractContextManager[None]:
    """Return a context manager; while it is open, a scheduler's dashboard has the pages."""
    plots = {"/devices": PLOTS, **{f"/individual-device-{name}": (name,) for name in PLOTS}}
    menu = {
        path: "Devices" if n is PLOTS else f"Device {n[0].title()}" for path, n in plots.items()
    }
    pages = {path: partial(_page, names, menu[path]) for path, names in plots.items()}
    return added_pages(scheduler, pages, menu=menu)


def _page(
    names: Sequence[str],
    title: str,
    scheduler: Scheduler,
    extra: Mapping[str, Any],
    document: Document,
) -> None:
    fill(scheduler, document, names)
    document.title = f"Dask: {title}"
    document.template = template("devices.html" if names is PLOTS else "plot.html", _TEMPLATES)
    document.template_variables.update(extra)


def fill(scheduler: Scheduler, document: Document, names: Sequence[str]) -> None:
    """Add some of the plots to a document, and keep them up to date."""
    context = document.session_context
    arguments = {} if context is None else context.request.arguments
    colours = DARK if arguments.get("theme", [b""])[0] == b"dark" else LIGHT
    times, lanes, devices = TimeAxis(), LaneAxis(devices=False), LaneAxis(devices=True)
    make: Mapping[str, Callable[[], Any]] = {
        "glance": lambda: Glance(colours),
        "timeline": lambda: Timeline(times, lanes, colours),
        "memory": lambda: memory_plot(times, devices, colours),
        "utilization": lambda: utilization_plot(times, devices, colours),
        "transfers": lambda: TransferMatrix(scheduler, colours),
        "failures": lambda: FailuresTable(colours),
    }
    plots = [make[name]() for name in names]
    feed = Feed(scheduler, [times, lanes, devices, *plots])
    feed.update()
    for plot in plots:
        document.add_root(plot.root)
    if colours.theme is not None:
        document.theme = colours.theme
    document.template_variables.update(colours=colours, lanes=feed.count())
    update_regularly(document, feed, _INTERVAL_MS)
