"""The end of a worker whose devices failed, in an order that loses and passes on no result."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Collection, Hashable
from typing import Any

from distributed import Worker
from distributed.core import Status

from dask_devctx.annotations import runs_once
from dask_devctx.dask_internals import tasks
from dask_devctx.dask_internals import worker as internals
from dask_devctx.scheduler import messages
from dask_devctx.scheduler.messages import ACTION, FAILED, PROTOCOL, TOPIC
from dask_devctx.worker.failures.monitor import Failure

logger = logging.getLogger(__name__)

# How long each step of the end may take: the scheduler may be gone, and calls into CUDA may hang.
_STEP_S = 5.0
_POLL_S = 0.01
# The process stays this long to refuse workers that still ask for its data. Without an answer, dask
# tries to connect for half a minute.
_REFUSING_S = 0.5
_EXIT_STATUS = 70  # EX_SOFTWARE; the nanny's log shows it
_ENDING = frozenset({Status.closing, Status.closed, Status.failed})


def begin_the_end(
    worker: Worker,
    failure: Failure,
    answered: Callable[[], Awaitable[None]],
) -> None:
    """End a worker soon as :func:`end_failed_worker` does; on any thread.

    Before it returns, others get no data from the worker, and the message about its suspects is on
    its way.
    """
    internals.answer_for_good(worker, "get_data", _refuse)  # others may ask before the loop runs
    _tell(worker, failure)
    worker.loop.add_callback(end_failed_worker, worker, failure, answered)


async def end_failed_worker(
    worker: Worker,
    failure: Failure,
    answered: Callable[[], Awaitable[None]],
) -> None:
    """End a worker whose process cannot use its devices any more.

    Runs on the worker's event loop, in this order:

    1. The worker takes no more tasks.
    2. The scheduler knows the suspects, and watches them when they run again.
    3. The error of each task that errs reaches the scheduler, also if the task does not end, and
       so does the end of each task that must not run twice. The errors of actors' methods reach
       their callers.
    4. The worker leaves the scheduler as expected, so that dask blames no other task. dask computes
       the worker's results again.
    5. The process exits. A nanny starts another.

    This makes no call to the devices: any call may hang, and libraries do not survive a reset of
    their primary context.

    If an error could not be sent to the scheduler, the worker leaves unexpectedly. Then dask counts
    the loss of the worker, and fails a task that ends its worker each time.

    A worker that is closing closes as it would, and dask runs its tasks elsewhere: only the
    scheduler is told, if the worker can still reach it.
    """
    error = failure.error
    if worker.status in _ENDING:
        logger.warning("While the worker closes: %s", error)
        if failure.marks and worker.status is Status.closing:
            await _bounded(_confirm(worker, failure), "name its suspects to the scheduler")
        return
    logger.error("%s", error)
    # Not "paused": the worker would resume by itself when it has enough memory.
    worker.status = Status.closing_gracefully
    nanny = internals.leave_nanny(worker)
    if nanny:
        last_resort = threading.Timer(4 * _STEP_S, os._exit, [_EXIT_STATUS])
        last_resort.daemon = True
        last_resort.start()
    if failure.marks:
        await _bounded(_confirm(worker, failure), "name its suspects to the scheduler")
    reported = await _bounded(_reported(worker, failure.errors), "see a task's error reported")
    if not reported:
        for key, task_error in failure.errors.items():
            internals.report_error(worker, key, task_error)
        reported = await _bounded(_reported(worker, failure.errors), "report a task's error")
    once = tasks.ended_here(worker, runs_once)
    if once:  # else dask runs such a task again
        await _bounded(_reported(worker, once), "see a task's end reported")
    await _bounded(answered(), "answer the callers of its actors")
    # If nobody marks and nobody errs, dask itself counts the loss: no task runs without end.
    expected = reported and bool(failure.marks or failure.errors)
    await _bounded(internals.leave_scheduler(worker, expected=expected), "leave the scheduler")
    await asyncio.sleep(_REFUSING_S)
    if nanny:
        logger.error("the worker process exits; its nanny starts another")
        logging.shutdown()
        os._exit(_EXIT_STATUS)
    logger.error(
        "the worker closes and has no nanny that starts another. Start workers with a nanny "
        "(dask worker --nanny, LocalDeviceCluster(processes=True))"
    )
    await worker.close(nanny=False, executor_wait=False, reason=str(error))


def _tell(worker: Worker, failure: Failure) -> None:
    """Tell the scheduler which tasks may have broken a worker's devices; on any thread.

    An event goes the same way as the tasks' outcomes: if this is called before a task raises, the
    mark is there before the task runs again. A scheduler without this package only stores the
    event.
    """
    try:
        worker.log_event(TOPIC, {"action": ACTION, **_message(failure)})
    except Exception as error:  # the worker ends in any case
        logger.warning("the scheduler was not told which tasks to watch: %r", error)


async def _confirm(worker: Worker, failure: Failure) -> None:
    """Wait until the scheduler knows which tasks may have broken a worker's devices.

    dask computes the results of a worker again as soon as the worker has left. The worker leaves by
    a message that may overtake the event. So this tells the scheduler again, and waits for the
    answer.
    """
    told = getattr(worker.scheduler, FAILED)
    answer = await told(address=worker.contact_address, **_message(failure))
    if answer != "OK":
        raise RuntimeError(f"the scheduler answers {FAILED} with {answer!r}")


def _message(failure: Failure) -> dict[str, object]:
    told = messages.Failure(
        failure.error.uuid,
        str(failure.error),
        failure.error.args,
        failure.suspects,
        failure.bystanders,
        list(failure.errors),
    )
    return {"protocol": PROTOCOL, **told._asdict()}


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
