"""The mark on a task that may have broken its device: who runs it next is to watch it."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

from distributed import Scheduler, Worker

logger = logging.getLogger(__name__)

# An annotation, because dask sends those to whichever worker runs the task.
WATCHED: Final = "devctx-watched"

_TOPIC: Final = "devctx"
_ACTION: Final = "device-failed"


def tell(worker: Worker, error: str, suspects: Sequence[Hashable]) -> None:
    """Tell the scheduler which tasks may have broken a worker's devices; on any thread.

    Parameters
    ----------
    worker
        The worker.
    error
        What happened, for whoever reads the events of ``devctx``.
    suspects
        The keys of the tasks.

    Notes
    -----
    An event goes the same way as what becomes of the tasks: if this is called before a task raises,
    the mark is there before the task is run again. A scheduler that does not know this package
    keeps it with its other events.
    """
    try:
        worker.log_event(_TOPIC, {"action": _ACTION, "error": error, "suspects": list(suspects)})
    except Exception as untold:  # the worker ends all the same
        logger.warning("the scheduler was not told which tasks to watch: %r", untold)


def put(scheduler: Scheduler, topic: str, event: Any) -> None:
    """Mark the tasks that an event names, if it is one of :func:`tell`; on the scheduler."""
    if topic != _TOPIC or not isinstance(event, Mapping) or event.get("action") != _ACTION:
        return
    for key in event.get("suspects", ()):
        ts = scheduler.tasks.get(key)
        if ts is not None:
            # Another dictionary: one may belong to many tasks.
            ts.annotations = {**(ts.annotations or {}), WATCHED: True}


def is_watched(annotations: Mapping[str, Any] | None) -> bool:
    """Return whether a task with these annotations is to be watched."""
    return bool(annotations) and WATCHED in annotations  # type: ignore[operator]
