"""The page ``/devices`` of dask's dashboard, and each of its plots alone."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from distributed import Scheduler

from dask_devctx.dask_internals import check_dashboard
from dask_devctx.dask_internals.scheduler import has_dashboard
from dask_devctx.errors import UnsupportedDaskError

logger = logging.getLogger(__name__)


class DevicePages:
    """While it is open, a scheduler's dashboard has the pages of the devices.

    Parameters
    ----------
    scheduler
        The scheduler, on whose event loop all methods are called.

    Notes
    -----
    A scheduler without a dashboard, for example because Bokeh is missing, stays as it is. The same
    holds for one whose distributed lacks a name that the pages need: its log says so.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._opened: ExitStack | None = None

    def open(self) -> None:
        """Add the pages, unless they are there already."""
        if self._opened is not None:
            return
        self._opened = ExitStack()
        if not has_dashboard(self._scheduler):
            logger.debug("The scheduler shows no dashboard, so that there is no page /devices")
            return
        try:
            check_dashboard(self._scheduler)
        except UnsupportedDaskError as error:
            logger.warning("The dashboard gets no page /devices: %s", error)
            return
        from dask_devctx.scheduler.dashboard.page import shown  # imports Bokeh

        self._opened.enter_context(shown(self._scheduler))

    def close(self) -> None:
        """Remove the pages; a page that somebody looks at changes no more."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
