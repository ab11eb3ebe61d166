"""The page ``/devices`` of dask's dashboard, and each of its plots alone."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

from distributed import Scheduler

from dask_devctx.dask_internals.scheduler import has_dashboard

logger = logging.getLogger(__name__)


def device_pages(scheduler: Scheduler) -> AbstractContextManager[None]:
    """Return a context manager; while it is open, a scheduler's dashboard has the pages.

    A scheduler without a dashboard, for example because Bokeh is missing, stays as it is. The same
    holds for one whose distributed lacks a name that the pages need: its log says so.
    """
    if not has_dashboard(scheduler):
        logger.debug("The scheduler shows no dashboard, so that there is no page /devices")
        return nullcontext()
    try:
        from dask_devctx.scheduler.dashboard.page import shown  # imports Bokeh, and dask's names
    except ImportError as error:
        logger.warning("The dashboard gets no page /devices: %s", error)
        return nullcontext()
    return shown(scheduler)
