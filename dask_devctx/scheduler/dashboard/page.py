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
from dask_devctx.scheduler.dashboard.figures import Axes
from dask_devctx.scheduler.dashboard.levels import memory_plot, utilization_plot
from dask_devctx.scheduler.dashboard.tables import FailuresTable, Glance, TransferMatrix
from dask_devctx.scheduler.dashboard.timeline import Timeline

_INTERVAL_MS: Final = 1000
_TEMPLATES: Final = str(Path(__file__).parent / "templates")

_MAKE: Final[Mapping[str, Callable[[Scheduler, Axes], Any]]] = {
    "glance": lambda scheduler, axes: Glance("device_glance"),
    "timeline": lambda scheduler, axes: Timeline(axes),
    "memory": lambda scheduler, axes: memory_plot(axes),
    "utilization": lambda scheduler, axes: utilization_plot(axes),
    "transfers": lambda scheduler, axes: TransferMatrix("device_transfers", scheduler),
    "failures": lambda scheduler, axes: FailuresTable("device_failures"),
}


def shown(scheduler: Scheduler) -> AbstractContextManager[None]:
    """Return a context manager; while it is open, a scheduler's dashboard has the pages."""
    menu = {"/devices": "Devices"}
    menu |= {f"/individual-device-{name}": f"Device {name.title()}" for name in _MAKE}
    plots = {path: [path.rpartition("-")[2]] for path in menu} | {"/devices": [*_MAKE]}
    pages = {path: partial(_fill, plots[path], title) for path, title in menu.items()}
    return added_pages(scheduler, pages, menu=menu)


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
    plots = [_MAKE[name](scheduler, axes) for name in names]
    feed = Feed(scheduler, [axes, *plots])
    feed.update()
    for plot in plots:
        document.add_root(plot.root)
    document.title = f"Dask: {title}"
    document.template_variables.update(extra, names=names, lanes=feed.count(), dark=dark)
    if len(names) > 1:
        document.template = template("devices.html", _TEMPLATES)
    else:  # a plot alone has Bokeh's own page, as dask's have
        theme = (Path(_TEMPLATES) / "theme.html").read_text()
        document.template = f"{{% block preamble %}}{theme}{{% endblock %}}"
    update_regularly(document, feed, _INTERVAL_MS)
