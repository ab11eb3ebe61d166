"""The documents of the page ``/devices`` and of each of its plots alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

from bokeh.document import Document
from distributed import Scheduler

from dask_devctx.dask_internals.dashboard import added_pages, template, update_regularly
from dask_devctx.scheduler.dashboard.feed import Feed
from dask_devctx.scheduler.dashboard.figures import TEMPLATES, Axes
from dask_devctx.scheduler.dashboard.levels import memory_plot, utilization_plot
from dask_devctx.scheduler.dashboard.tables import FailuresTable, Glance, TransferMatrix
from dask_devctx.scheduler.dashboard.timeline import Timeline

_INTERVAL_MS: Final = 1000

_MAKE: Final[Mapping[str, Callable[[Scheduler, Axes], Any]]] = {
    "glance": lambda scheduler, axes: Glance(),
    "timeline": lambda scheduler, axes: Timeline(axes),
    "memory": lambda scheduler, axes: memory_plot(axes),
    "utilization": lambda scheduler, axes: utilization_plot(axes),
    "transfers": lambda scheduler, axes: TransferMatrix(scheduler),
    "failures": lambda scheduler, axes: FailuresTable(),
}
_TABLES: Final = {"glance", "transfers", "failures"}


def shown(scheduler: Scheduler) -> AbstractContextManager[None]:
    """Return a context manager; while it is open, a scheduler's dashboard has the pages."""
    pages = {"/devices": ("Devices", [*_MAKE])}
    pages |= {f"/individual-device-{name}": (f"Device {name.title()}", [name]) for name in _MAKE}
    fill = {path: (title, partial(_fill, names, title)) for path, (title, names) in pages.items()}
    return added_pages(scheduler, fill)


def _fill(
    names: Sequence[str],
    title: str,
    scheduler: Scheduler,
    extra: Mapping[str, Any],
    document: Document,
) -> None:
    """Add some of the plots to a document, and keep them up to date."""
    context = document.session_context
    wanted = () if context is None else context.request.arguments.get("theme", ())
    if dark := b"dark" in wanted:
        document.theme = "dark_minimal"
    axes = Axes()
    plots = {name: _MAKE[name](scheduler, axes) for name in names}
    feed = Feed(scheduler, [axes, *plots.values()])
    feed.update()
    if not _TABLES.issuperset(names):
        plots["range"] = axes
    for name, plot in plots.items():
        plot.root.name = f"device_{name}"
        document.add_root(plot.root)
    document.title = f"Dask: {title}"
    document.template_variables.update(extra, names=[*plots], lanes=feed.count(), dark=dark)
    document.template = template("devices.html", str(TEMPLATES))
    update_regularly(document, feed, _INTERVAL_MS)
