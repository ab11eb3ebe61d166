"""Further pages in the dashboard of a scheduler that runs, and parts of dask's own pages.

This module imports Bokeh, which dask needs for its dashboard only. Import it where there is one:
see :func:`dask_devctx.dask_internals.scheduler.has_dashboard`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import dask
from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.server.server import BokehTornado
from distributed import Scheduler
from distributed.dashboard.components.scheduler import env
from distributed.dashboard.core import DaskBokehTornado
from distributed.dashboard.scheduler import template_variables
from distributed.utils import color_of as color_of
from distributed.utils import sync
from jinja2 import ChoiceLoader, FileSystemLoader, Template
from tornado.ioloop import IOLoop

# Fills a new document of one page: the arguments are the scheduler, variables for its template,
# and the document.
FillDocument = Callable[[Scheduler, Mapping[str, Any], Document], None]

_SETTINGS: Final = "distributed.scheduler.dashboard.bokeh-application"


@contextmanager
def added_pages(
    scheduler: Scheduler, pages: Mapping[str, tuple[str, FillDocument]]
) -> Iterator[None]:
    """While it is open, the dashboard of a scheduler has further pages: path, name and filler.

    An ``/individual-…`` page is one plot: it is listed among dask's plots, and for programs such as
    JupyterLab.
    """
    theirs = next(app for app in _applications(scheduler) if isinstance(app, BokehTornado))
    variables = template_variables(scheduler)
    extra = {"prefix": theirs.prefix, **variables}
    settings = dict(dask.config.get(_SETTINGS))
    settings.pop("allow_websocket_origin", None)  # the dashboard's own has it
    ours = _FurtherPages(
        {
            path: Application(FunctionHandler(partial(_filled, scheduler, fill, extra)))
            for path, (_, fill) in pages.items()
        },
        theirs,
        prefix=theirs.prefix,
        use_index=False,
        extra_websocket_origins=sorted(theirs.websocket_origins),
        absolute_url="",
        **settings,
    )
    entries = [
        ("plots", {"url": path.strip("/"), "name": name})
        if path.startswith("/individual-")
        else ("pages", path.strip("/"))
        for path, (name, _) in pages.items()
    ]
    ours.initialize(IOLoop.current())
    ours.start()
    # The first application that has a page shows it, and tells which plots there are.
    _applications(scheduler).insert(0, ours)
    # Every page shows these lists.
    for place, entry in entries:
        variables[place].append(entry)
    variables["plots"].sort(key=lambda plot: plot["name"])
    try:
        yield
    finally:
        for place, entry in entries:
            if entry in variables[place]:
                variables[place].remove(entry)
        if ours in _applications(scheduler):
            _applications(scheduler).remove(ours)
        ours.end()


def template(name: str, folder: str) -> Template:
    """Return a template from a folder, which may extend dask's templates."""
    return env.overlay(loader=ChoiceLoader([FileSystemLoader(folder), env.loader])).get_template(
        name
    )


def update_regularly(document: Document, component: Any, interval_ms: int) -> None:
    """Call a component's ``update`` on the event loop, while somebody looks at its document."""

    async def update() -> None:  # Bokeh calls plain functions on other threads, from 3.10 on
        component.update()

    document.add_periodic_callback(update, interval_ms)


def _filled(
    scheduler: Scheduler, fill: FillDocument, extra: Mapping[str, Any], document: Document
) -> None:
    """Fill a document on the scheduler's event loop; from Bokeh 3.10 on, this is another thread."""

    async def filled() -> None:
        fill(scheduler, extra, document)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        sync(scheduler.loop, filled)
    else:
        fill(scheduler, extra, document)


class _FurtherPages(DaskBokehTornado):  # type: ignore[misc]
    """The pages of this package, beside dask's own."""

    def __init__(
        self, applications: Mapping[str, Application], others: BokehTornado, **kwargs: Any
    ) -> None:
        super().__init__(applications, **kwargs)
        self._others = others

    @property
    def app_paths(self) -> set[str]:
        """The paths of these pages and of dask's; dask asks the first application only."""
        paths: set[str] = super().app_paths | self._others.app_paths
        return paths

    def end(self) -> None:
        """Stop; a page that is open somewhere changes no more."""
        for context in self.applications.values():
            for session in context.sessions:
                for callback in list(session.document.session_callbacks):
                    session.document.remove_periodic_callback(callback)
        self.stop(wait=False)  # from Bokeh 3.10 on, its own event loop may not wait for it


def _applications(scheduler: Scheduler) -> list[Any]:
    return scheduler.http_application.applications  # type: ignore[no-any-return]
