"""Tasks that hold all places of a device while they wait for tasks that need a place.

Such a job never ends. It is noticed by a look once a second, which costs the tasks nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Final

from distributed import Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals import tasks
from dask_devctx.dask_internals.threads import calls_waited_in
from dask_devctx.errors.base import counted
from dask_devctx.worker.metrics.history import History
from dask_devctx.worker.placement.admission import Admission

# A child of dask's own: a worker shows its warnings.
logger = logging.getLogger("distributed.worker.dask_devctx")

_LOOK_INTERVAL_S: Final = 1.0
# For so long the same tasks wait in the same calls before it is said.
_PATIENCE_S: Final = 3.0
_SHOWN: Final = 8  # the most tasks that the message names

_REMEDY: Final = (
    "Let a task give its place to others while it waits: call distributed.secede() before, or wait "
    "inside `with distributed.worker_client()`. Or raise tasks_per_device, or start more workers"
)


class Standstill:
    """Notices tasks that hold all places of a device while they wait for others.

    Parameters
    ----------
    worker
        The worker.
    admission
        Knows the tasks that run on its devices, and those that wait for a place.
    history
        Gets a row for each standstill.

    Attributes
    ----------
    text
        The message about the present standstill; "" if there is none.

    Notes
    -----
    A task waits if its thread is blocked in one of dask's own calls, such as ``Event.wait`` or
    ``Future.result``. While any task of the worker does something else, it may be the one for which
    the others wait. A task that seceded holds no place.
    """

    def __init__(self, worker: Worker, admission: Admission, history: History) -> None:
        self.text = ""
        self._worker = worker
        self._admission = admission
        self._history = history
        self._calls: Mapping[Hashable, str] = {}
        self._since = 0.0

    def look(self) -> None:
        """Say it once if the worker stands still."""
        full, waiting = self._full()
        calls = calls_waited_in(self._worker) if waiting else {}
        if not calls or calls != self._calls:
            self._calls, self._since, self.text = calls, monotonic(), ""
        elif not self.text and monotonic() - self._since >= _PATIENCE_S:
            self._say(full, waiting)

    def _full(self) -> tuple[list[Device], int]:
        """Return the devices without a free place, and how many tasks wait for one there."""
        with self._admission.lock:
            occupancy = self._admission.occupancy
            claims = self._admission.waiting()
            waiting = {
                device: queue.waiting() + sum(device in claim.devices for claim in claims)
                for device, queue in occupancy.queues.items()
            }
            taken = [one for one in waiting if occupancy.free(one)[0] < occupancy.place]
        full = [device for device in taken if waiting[device]]
        if not full and len(taken) == len(waiting):
            # With few threads, dask holds tasks back before they come to a device.
            return taken, tasks.ready(self._worker)
        return full, sum(waiting[device] for device in full)

    def _say(self, full: Sequence[Device], waiting: int) -> None:
        names = [f"{key!r} in {call}" for key, call in self._calls.items()]
        more = len(names) - _SHOWN
        shown = ", ".join(names[:_SHOWN]) + (f", and {more} more" if more > 0 else "")
        self.text = (
            f"All places of {', '.join(map(str, full))} are taken by tasks that wait: {shown}. "
            f"{counted(waiting, 'task')} {'waits' if waiting == 1 else 'wait'} for a place there. "
            f"If the first wait for the others, none of them ever ends. {_REMEDY}"
        )
        logger.warning("%s", self.text)
        self._worker.log_event("devctx", {"level": "warning", "message": self.text})
        self._history.happened("standstill", full[0].uuid, next(iter(self._calls)), self.text)


@contextmanager
def noticing_standstill(
    worker: Worker, admission: Admission, history: History
) -> Iterator[Standstill]:
    """While it is open, a worker whose tasks all wait for others says so."""
    standstill = Standstill(worker, admission, history)
    looking = PeriodicCallback(standstill.look, _LOOK_INTERVAL_S * 1000)
    looking.start()
    try:
        yield standstill
    finally:
        looking.stop()
