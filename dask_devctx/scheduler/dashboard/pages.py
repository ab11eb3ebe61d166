"""The documents of the page ``/devices`` and of each of its plots alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final

from bokeh.document import Document
from distributed import Scheduler

from dask_devctx.dask_internals.dashboard import added_pages, template, update_regularly
from dask_devctx.scheduler.dashboard.batches import Feed, Plot
from dask_devctx.scheduler.dashboard.failures import FailuresTable
from dask_devctx.scheduler.dashboard.figures import LaneAxis, TimeAxis
from dask_devctx.scheduler.dashboard.memory import MemoryPlot
from dask_devctx.scheduler.dashboard.theme import Colours, bokeh_theme, chosen
from dask_devctx.scheduler.dashboard.timeline import Timeline
from dask_devctx.scheduler.dashboard.transfers import TransferMatrix
from dask_devctx.scheduler.dashboard.utilization import UtilizationPlot

_INTERVAL_MS: Final = 500
_TEMPLATES: Final = str(Path(__file__).parent / "templates")

# Makes a plot: the arguments are the scheduler, the axes that it may share, and the colours.
MakePlot = Callable[[Scheduler, TimeAxis, LaneAxis, Colours], Any]

_PLOTS: Final[Mapping[str, tuple[str, MakePlot]]] = {
    "timeline": ("Timeline", lambda s, times, lanes, colours: Timeline(times, lanes, colours)),
    "memory": ("Memory", lambda s, times, lanes, colours: MemoryPlot(times, lanes, colours)),
    "utilization": (
        "Utilization",
        lambda s, times, lanes, colours: UtilizationPlot(times, lanes, colours),
    ),
    "transfers": ("Transfers", lambda s, times, lanes, colours: TransferMatrix(s, colours)),
    "failures": ("Failures", lambda s, times, lanes, colours: FailuresTable(colours)),
}
# dask's own pages show one device of each worker, and only where the scheduler has a GPU.
_REDIRECTS: Final = {
    "/gpu": "/devices",
    "/individual-gpu-memory": "/individual-device-memory",
    "/individual-gpu-utilization": "/individual-device-utilization",
}


def shown(scheduler: Scheduler) -> AbstractContextManager[None]:
    """Return a context manager; while it is open, a scheduler's dashboard has the pages."""
    alone = {f"/individual-device-{name}": name for name in _PLOTS}
    pages = {path: partial(_plot_alone, name) for path, name in alone.items()}
    menu = {path: f"Device {_PLOTS[name][0]}" for path, name in alone.items()}
    return added_pages(
        scheduler,
        {"/devices": _all_plots, **pages},
        menu={"/devices": "Devices", **menu},
        redirects=_REDIRECTS,
    )


def _all_plots(scheduler: Scheduler, extra: Mapping[str, Any], document: Document) -> None:
    _fill(scheduler, document, _PLOTS)
    document.title = "Dask: Devices"
    document.template = template("devices.html", _TEMPLATES)
    document.template_variables.update(extra)


def _plot_alone(
    name: str, scheduler: Scheduler, extra: Mapping[str, Any], document: Document
) -> None:
    _fill(scheduler, document, [name])
    document.title = f"Dask: Device {_PLOTS[name][0]}"
    document.template = template("plot.html", _TEMPLATES)


def _fill(scheduler: Scheduler, document: Document, names: Any) -> None:
    colours = chosen(document)
    times, lanes = TimeAxis(), LaneAxis()
    plots = [_PLOTS[name][1](scheduler, times, lanes, colours) for name in names]
    shown: list[Plot] = [lanes, times, *plots]
    feed = Feed(scheduler, shown)
    feed.update()
    for plot in plots:
        document.add_root(plot.root)
    document.theme = bokeh_theme(colours)
    document.template_variables["colours"] = colours
    update_regularly(document, feed, _INTERVAL_MS)
