"""The end of a worker whose devices failed, in an order that loses and passes on no result."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Collection, Hashable
from functools import partial
from typing import Any

from distributed import Worker
from distributed.core import Status

from dask_devctx.annotations import runs_once
from dask_devctx.dask_internals import tasks
from dask_devctx.dask_internals import worker as internals
from dask_devctx.scheduler.messages import ACTION, FAILED, PROTOCOL, TOPIC, Failure
from dask_devctx.worker.registration import tell

logger = logging.getLogger(__name__)

# How long each step of the end may take: the scheduler may be gone, and calls into CUDA may hang.
_STEP_S = 5.0
_POLL_S = 0.01
# The callers of actors' methods get their errors meanwhile.
_ANSWERS_S = 1.0
# The process stays this long to refuse workers that still ask for its data. Without an answer, dask
# tries to connect for half a minute.
_REFUSING_S = 0.5
_EXIT_STATUS = 70  # EX_SOFTWARE; the nanny's log shows it
_ENDING = frozenset({Status.closing, Status.closed, Status.failed})


def begin_the_end(worker: Worker, failure: Failure) -> None:
    """End a worker whose process cannot use its devices any more, soon; on any thread.

    Before it returns, others get no data from the worker, and the event about its suspects is on
    its way. It goes as the tasks' outcomes do, so the scheduler marks a task before it runs again.
    """
    worker.handlers["get_data"] = _refuse  # others may ask before the loop runs
    try:
        worker.log_event(TOPIC, {"action": ACTION, "protocol": PROTOCOL, **failure._asdict()})
    except Exception as error:  # the worker ends in any case
        logger.warning("the scheduler was not told which tasks to watch: %r", error)
    worker.loop.add_callback(_end, worker, failure)


async def _end(worker: Worker, failure: Failure) -> None:
    # No step calls the devices: any call may hang, and libraries do not survive a reset of their
    # primary context. A worker that is closing closes as it would, and dask runs its tasks
    # elsewhere: only the scheduler is told, if the worker can still reach it.
    error = failure.error
    confirmed = partial(tell, worker, FAILED, **failure._asdict())  # leaving may overtake the event
    if worker.status in _ENDING:
        logger.warning("While the worker closes: %s", error)
        if worker.status is Status.closing:
            await _bounded(confirmed(), "name its suspects to the scheduler")
        return
    logger.error("%s", error)
    # 1. It takes no more tasks. Not "paused": it would resume by itself when it has enough memory.
    worker.status = Status.closing_gracefully
    nanny = internals.leave_nanny(worker)
    if nanny:
        last_resort = threading.Timer(4 * _STEP_S, os._exit, [_EXIT_STATUS])
        last_resort.daemon = True
        last_resort.start()
    # 2. The scheduler knows the suspects, and watches them when they run again.
    marked = await _bounded(confirmed(), "name its suspects to the scheduler")
    # 3. Each error reaches the scheduler, also if the task does not end, and so does the end of
    # each task that must not run twice: else dask runs it again.
    erred = [key for key, _ in failure.erred]
    reported = await _bounded(_reported(worker, erred), "see a task's error reported")
    if not reported:
        for key, why in failure.erred:
            internals.report_error(worker, key, failure.error_for(why))
        reported = await _bounded(_reported(worker, erred), "report a task's error")
    if once := tasks.ended_here(worker, runs_once):
        await _bounded(_reported(worker, once), "see a task's end reported")
    if worker.state.actors:
        await asyncio.sleep(_ANSWERS_S)
    # 4. It leaves as expected, so that dask blames no other task, and computes the results again.
    # If the suspects are not marked and nobody errs, or an error was not sent, dask counts the loss
    # of the worker: no task runs without end.
    expected = reported and (marked or bool(erred))
    await _bounded(internals.leave_scheduler(worker, expected=expected), "leave the scheduler")
    await asyncio.sleep(_REFUSING_S)
    # 5. The process exits. A nanny starts another.
    if nanny:
        logger.error("the process of %s exits; its nanny starts another", worker.address)
        logging.shutdown()
        os._exit(_EXIT_STATUS)
    logger.error(
        "the worker closes and has no nanny that starts another. Start workers with a nanny "
        "(dask worker --nanny, LocalDeviceCluster(processes=True))"
    )
    await worker.close(nanny=False, executor_wait=False, reason=str(error))


async def _reported(worker: Worker, keys: Collection[Hashable]) -> None:
    """Wait until the scheduler has the outcomes of some tasks."""
    while await internals.unsettled(worker, keys):
        await asyncio.sleep(_POLL_S)


async def _bounded(step: Awaitable[Any], what: str) -> bool:
    """Return whether a step of the end succeeded within its time."""
    try:
        await asyncio.wait_for(step, _STEP_S)
    except Exception as error:  # the worker ends after any error
        logger.warning("the worker could not %s before it ends: %r", what, error)
        return False
    return True


async def _refuse(comm: Any, **kwargs: Any) -> Any:
    """Close the connection of a request for data, like a worker that is gone."""
    comm.abort()
    return Status.dont_reply
