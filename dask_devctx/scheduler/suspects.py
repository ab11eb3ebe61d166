"""The tasks that may have broken a device: the next worker that runs them watches them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from distributed import Scheduler

from dask_devctx.annotations import WATCHED
from dask_devctx.dask_internals.scheduler import annotate

logger = logging.getLogger(__name__)

# The event in which a worker names these tasks; see
# :mod:`dask_devctx.worker.failures.attribution`.
TOPIC: Final = "devctx"
ACTION: Final = "device-failed"

# More tasks than a worker's devices run at a time.
_LIMIT = 10_000


def mark(scheduler: Scheduler, topic: str, event: Any) -> None:
    """Mark the tasks that the event of a failure names; refuse a malformed event."""
    if topic != TOPIC or not isinstance(event, Mapping) or event.get("action") != ACTION:
        return
    suspects: Any = event.get("suspects")
    worker = event.get("worker")  # dask adds it
    wrong = _what_is_wrong(suspects)
    if not isinstance(worker, str) or worker not in scheduler.workers:
        wrong = "come from no worker of this cluster"
    if wrong:
        logger.warning("An event %s was refused: its suspects %s", ACTION, wrong)
        return
    for key in suspects:
        ts = scheduler.tasks.get(key)
        if ts is not None:
            annotate(ts, WATCHED, True)


def _what_is_wrong(suspects: Any) -> str:
    if not isinstance(suspects, list | tuple):
        return f"are no list, but {type(suspects).__name__}"
    if len(suspects) > _LIMIT:
        return f"are {len(suspects)}; {_LIMIT} at most"
    for key in suspects:
        try:
            hash(key)
        except TypeError:
            return f"have one that is no key: {type(key).__name__}"
    return ""
