"""The tasks that may have broken a device: whoever runs them next is to watch them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from distributed import Scheduler

from dask_devctx.annotations import WATCHED
from dask_devctx.dask_internals.scheduler import annotate

# The event by which a worker names them; see :mod:`dask_devctx.worker.failures.marks`.
TOPIC: Final = "devctx"
ACTION: Final = "device-failed"


def mark(scheduler: Scheduler, topic: str, event: Any) -> None:
    """Mark the tasks that an event names, if it is a failure's."""
    if topic != TOPIC or not isinstance(event, Mapping) or event.get("action") != ACTION:
        return
    for key in event.get("suspects", ()):
        ts = scheduler.tasks.get(key)
        if ts is not None:
            annotate(ts, WATCHED, True)
