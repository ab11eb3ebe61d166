"""Tasks that hold all places of a device while they wait for tasks that need a place.

Such a job never ends. It is noticed by a look once a second, which costs the tasks nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, Final

from distributed import Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx.annotations import requested_device
from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals import tasks
from dask_devctx.dask_internals.threads import calls_waited_in
from dask_devctx.errors.base import counted, listed
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
    "inside `with distributed.worker_client()`. A task that uses no GPU needs no place: "
    "dask.annotate(device=None). Or raise tasks_per_device"
)
_MORE_WORKERS: Final = ", or start more workers"

_ACTORS_REMEDY: Final = (
    "Release the actor when it is not needed (del its future), or give it a smaller device_share"
)
_NAMED: Final = "The tasks name their device: without the name, another device runs them"
_NOWHERE: Final = (
    "No other device may run the tasks: actors hold those too, or workers= leaves them out"
)


class Standstill:
    """Notices tasks that hold all places of a device while they wait for others, and actors.

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
        self._worker = worker
        self._admission = admission
        self._history = history
        self._calls = _Notice()
        self._actors = _Notice()

    @property
    def text(self) -> str:
        return " ".join(filter(None, (self._calls.text, self._actors.text)))

    def look(self) -> None:
        """Say it once if the worker stands still, or if tasks wait for the end of an actor."""
        full, waiting = self._full()
        calls = calls_waited_in(self._worker) if waiting else {}
        if self._calls.is_due(calls):
            self._calls.text = _about_calls(calls, full, waiting, named=self._are_named())
            self._say(self._calls.text, full[0], next(iter(calls)))
        blocked = _actors_that_block(self._admission)
        if self._actors.is_due(blocked):
            first = next(iter(blocked))
            numbers = {device: self._admission.waiting_for(device) for device in blocked}
            self._actors.text = _about_actors(blocked, numbers, named=self._are_named())
            self._say(self._actors.text, first, blocked[first][0])

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

    def _are_named(self) -> bool:
        """Return whether each task that waits for a place names its devices."""
        return all(map(_names_devices, tasks.not_begun(self._worker)))

    def _say(self, text: str, device: Device, key: Hashable) -> None:
        logger.warning("%s", text)
        self._worker.log_event("devctx", {"level": "warning", "message": text})
        self._history.happened("standstill", device.uuid, key, text)


def _actors_that_block(admission: Admission) -> dict[Device, tuple[Hashable, ...]]:
    """Return the actors for whose end tasks wait, by device."""
    found, now = {}, monotonic()
    with admission.lock:
        occupancy, claims = admission.occupancy, admission.waiting()
        for device, holding in occupancy.holding.items():
            actors = tuple(claim.key for claim in holding if claim.for_life)
            queue = occupancy.queues.get(device)
            if not actors:
                continue
            plain = queue is not None and queue.waiting()
            if (plain and occupancy.free_at(device, occupancy.place, 0, now) == math.inf) or any(
                device in claim.devices and occupancy.expected_start(claim, now) == math.inf
                for claim in claims
            ):
                found[device] = actors
    return found


class _Notice:
    """The text about a state that lasts; "" until it was said."""

    def __init__(self) -> None:
        self.text = ""
        self._state: object = None
        self._since = 0.0

    def is_due(self, state: object) -> bool:
        """Return whether the state has lasted for long and was not said."""
        if not state or state != self._state:
            self._state, self._since, self.text = state, monotonic(), ""
            return False
        return not self.text and monotonic() - self._since >= _PATIENCE_S


def _names_devices(ts: Any) -> bool:
    task = getattr(ts.run_spec, "task", ts.run_spec)
    try:
        wanted = requested_device(ts.annotations, ts.key, "leave", task)
    except Exception:  # it does not wait for a place: it fails
        return True
    return bool(wanted.names)


def _about_calls(
    calls: Mapping[Hashable, str], full: Sequence[Device], waiting: int, *, named: bool
) -> str:
    one = waiting == 1
    by_name = (" that names its device" if one else " that name their device") if named else ""
    names = [f"{key!r} in {call}" for key, call in calls.items()]
    return (
        f"All places of {', '.join(map(str, full))} are taken by tasks that wait: "
        f"{listed(names, _SHOWN)}. "
        f"{counted(waiting, 'task')}{by_name} {'waits' if one else 'wait'} for a place there. "
        f"If the first wait for the others, none of them ever ends. {_REMEDY}"
        f"{'' if named else _MORE_WORKERS}"
    )


def _about_actors(
    actors: Mapping[Device, Sequence[Hashable]], waiting: Mapping[Device, int], *, named: bool
) -> str:
    held = [
        f"{device} is held by {', '.join(map(repr, keys[:_SHOWN]))} as long as "
        f"{'this actor lives' if len(keys) == 1 else 'these actors live'}, and "
        f"{counted(waiting[device], 'task')} {'waits' if waiting[device] == 1 else 'wait'} for it"
        for device, keys in actors.items()
    ]
    return f"{'; '.join(held)}. {_ACTORS_REMEDY}. {_NAMED if named else _NOWHERE}"


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
