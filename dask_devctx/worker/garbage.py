"""Python's garbage collector in a worker's process: one for all of its GPUs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from distributed import Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx import config
from dask_devctx.dask_internals.worker import has_nanny

_LOOK_INTERVAL_MS = 1000


@contextmanager
def short_collections(worker: Worker) -> Iterator[None]:
    """While it is open, full garbage collections skip the objects of imported modules.

    A full collection visits every object, and all GPUs wait for it. ``devctx.gc-freeze`` excludes
    the objects of modules (``gc.freeze``): each time that new modules were imported and the worker
    has no task whose objects could be among them. This needs a nanny, because the process then
    belongs to the worker alone. When memory runs out, all objects are included again.
    """
    if not (config.get("gc-freeze") and has_nanny(worker)):
        yield
        return
    modules = 0

    def freeze_when_idle() -> None:
        nonlocal modules
        if len(sys.modules) > modules and not worker.state.tasks:
            modules = len(sys.modules)
            gc.collect()
            gc.freeze()

    looking = PeriodicCallback(freeze_when_idle, _LOOK_INTERVAL_MS)
    looking.start()
    try:
        yield
    finally:
        looking.stop()
        gc.unfreeze()
