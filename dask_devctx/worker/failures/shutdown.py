"""The end of a worker whose devices failed, in an order in which nothing is lost or handed on."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Collection, Hashable
from typing import Any

from distributed import Worker
from distributed.core import Status

from dask_devctx.dask_internals import worker as internals
from dask_devctx.worker.failures.attribution import Failure

logger = logging.getLogger(__name__)

# How long each step of the end may take: the scheduler may be gone, and calls into CUDA may hang.
_STEP_S = 5.0
_POLL_S = 0.01
# So long the process stays to refuse who had been told that the data is here. Where nobody answers,
# dask tries to connect for half a minute.
_REFUSING_S = 0.5
_EXIT_STATUS = 70  # EX_SOFTWARE: what the nanny's log says of the process


def refuse_data(worker: Worker) -> None:
    """Hand on nothing that is in this process from now on; on any thread."""
    internals.answer_for_good(worker, "get_data", _refuse)


async def end_failed_worker(
    worker: Worker, failure: Failure, answered: Callable[[Collection[Hashable]], Awaitable[None]]
) -> None:
    """End a worker whose process cannot use its devices any more.

    Parameters
    ----------
    worker
        The worker.
    failure
        What happened, and who errs with it.
    answered
        Given the keys of actors, waits until those who called their methods were told.

    Notes
    -----
    Runs on the worker's event loop. In this order: the worker takes no more tasks and hands on no
    more data; the error of each task that is to blame reaches the scheduler, also where the task
    does not end, and that of an actor's method its caller; the worker leaves the scheduler as one
    that was expected to, so that no task that happened to be there is blamed, and what it held is
    recomputed; the process exits. A nanny starts another.
    Nothing is done with the devices: a process whose primary context is reset under its libraries
    is worse than none, and any call may hang.

    Where the scheduler could not be told an error, the worker leaves it unexpected. Then dask
    counts, and ends the turns of a task that ends its worker each time.
    """
    error = failure.error
    logger.error("%s", error)
    # Not "paused": the worker would resume by itself when it finds that it has memory enough.
    worker.status = Status.closing_gracefully
    refuse_data(worker)
    nanny = internals.leave_nanny(worker)
    if nanny:
        last_resort = threading.Timer(4 * _STEP_S, os._exit, [_EXIT_STATUS])
        last_resort.daemon = True
        last_resort.start()
    reported = await _bounded(_reported(worker, failure.errors), "see a task's error reported")
    if not reported:
        for key, task_error in failure.errors.items():
            internals.report_error(worker, key, task_error)
        reported = await _bounded(_reported(worker, failure.errors), "report a task's error")
    await _bounded(answered(failure.errors), "answer who called an actor")
    await _bounded(internals.leave_scheduler(worker, expected=reported), "leave the scheduler")
    await asyncio.sleep(_REFUSING_S)
    if nanny:
        logger.error("the worker process exits; its nanny starts another")
        logging.shutdown()
        os._exit(_EXIT_STATUS)
    logger.error(
        "the worker closes and has no nanny that starts another. Start it with one "
        "(dask worker --nanny, LocalDeviceCluster(processes=True))"
    )
    await worker.close(nanny=False, executor_wait=False, reason=str(error))


async def _reported(worker: Worker, keys: Collection[Hashable]) -> None:
    """Wait until the scheduler has heard what became of some tasks."""
    while await internals.unsettled(worker, keys):
        await asyncio.sleep(_POLL_S)


async def _bounded(step: Awaitable[Any], what: str) -> bool:
    """Return whether a step of the end was taken in its time."""
    try:
        await asyncio.wait_for(step, _STEP_S)
    except Exception as error:  # whatever it is, the worker ends
        logger.warning("the worker could not %s before it ends: %r", what, error)
        return False
    return True


async def _refuse(comm: Any, **kwargs: Any) -> Any:
    """Answer whoever asks for data as a worker does that is gone."""
    comm.abort()
    return Status.dont_reply
