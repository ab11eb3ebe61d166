"""What a worker tells the scheduler of a device that failed: which tasks may have done it."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

from distributed import Worker

from dask_devctx.scheduler.suspects import ACTION, TOPIC

logger = logging.getLogger(__name__)


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
        worker.log_event(TOPIC, {"action": ACTION, "error": error, "suspects": list(suspects)})
    except Exception as untold:  # the worker ends all the same
        logger.warning("the scheduler was not told which tasks to watch: %r", untold)
