"""The news of the history for the plots of one document, read once for all of them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import localtime
from typing import Any, Final, Protocol

from bokeh.core.properties import without_property_validation
from distributed import Scheduler
from distributed.metrics import time

from dask_devctx.scheduler.dashboard.lanes import Lanes, Member
from dask_devctx.scheduler.history import DeviceHistory
from dask_devctx.scheduler.rows import Copy, Incident, Sample, TaskRun

# How long a device is shown after its last worker left; a worker may be restarting.
_LINGER_S = 60.0
# The most tasks and copies of an update, and of one that begins from nothing: the scheduler's event
# loop does nothing else meanwhile.
_MOST: Final = 2_500
_MOST_AT_FIRST: Final = 10_000

_Rows = list[tuple[str, TaskRun | Copy | Incident]]


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows since the last update, each with its worker's host; a sample has the worker too.

    ``lanes`` are those of tasks and copies, ``devices`` those of devices only. With ``again``, the
    plots begin from nothing. ``offset`` is the seconds from UTC to the scheduler's local time.
    """

    lanes: Lanes
    devices: Lanes
    again: bool
    now: float
    offset: float
    left_out: int
    tasks: list[tuple[str, TaskRun]]
    copies: list[tuple[str, Copy]]
    incidents: list[tuple[str, Incident]]
    samples: list[tuple[str, str, Sample]]

    def ms(self, seconds: float) -> float:
        """Return a time as Bokeh's axes show it: local time in milliseconds."""
        return 1000 * (seconds + self.offset)


class Plot(Protocol):
    """A plot that shows the rows of a batch beside those of earlier batches."""

    def show(self, batch: Batch) -> None: ...


class Feed:
    """Reads the history on the scheduler's event loop, and gives its news to a document's plots."""

    def __init__(self, scheduler: Scheduler, plots: Sequence[Plot]) -> None:
        self._scheduler = scheduler
        self._plots = plots
        self._members: set[Member] = set()
        self._lanes = self._devices = Lanes()
        self._next = 0
        # The time of the last sample that was shown of each device, by worker and UUID.
        self._sampled: dict[tuple[str, str], float] = {}
        self._seen_at: dict[str, float] = {}

    def count(self) -> int:
        """Return the number of lanes, as far as it is known before the history is collected."""
        plugins = self._scheduler.plugins.values()
        known = (getattr(plugin, "devices", {}) for plugin in plugins)
        uuids = {uuid for devices in known for used in devices.values() for uuid in used}
        return max(len(uuids), len(self._lanes.factors))

    @without_property_validation  # type: ignore[untyped-decorator]
    def update(self) -> None:
        """Give all plots the latest rows."""
        history = DeviceHistory.of(self._scheduler)
        if history is None:  # the plugin was unregistered
            return
        now, reading, workers = time(), history.read(self._next), history.workers
        members = set(self._with_devices(history, now))
        members |= {member for member in self._members if member.uuid is None}
        members |= {
            Member(workers[worker].host, "", None, None)
            for worker, row in reading.rows
            if row.__class__ is TaskRun and row.uuid is None
        }
        again = members != self._members
        if again:
            self._members, self._lanes = members, Lanes(members)
            self._devices = Lanes(member for member in members if member.uuid is not None)
            self._sampled.clear()
            reading = history.read(0)
        self._next = reading.next
        rows = _latest(reading.rows) if again else _longest(reading.rows)
        of: dict[type, list[Any]] = {kind: [] for kind in (TaskRun, Copy, Incident)}
        for worker, row in rows:
            of[row.__class__].append((workers[worker].host, row))
        batch = Batch(
            lanes=self._lanes,
            devices=self._devices,
            again=again,
            now=now,
            offset=localtime(now).tm_gmtoff,
            left_out=0 if again else len(reading.rows) - len(rows),
            tasks=of[TaskRun],
            copies=of[Copy],
            incidents=of[Incident],
            samples=self._new_samples(history),
        )
        for plot in self._plots:
            plot.show(batch)

    def _with_devices(self, history: DeviceHistory, now: float) -> Iterator[Member]:
        for (worker, uuid), device in history.devices.items():
            known = history.workers[worker]
            if known.present:
                self._seen_at[worker] = now
            if now - self._seen_at.get(worker, 0.0) < _LINGER_S:
                yield Member(known.host, known.name, uuid, device.device_id)

    def _new_samples(self, history: DeviceHistory) -> list[tuple[str, str, Sample]]:
        found: list[tuple[str, str, Sample]] = []
        for place, samples in history.samples.items():
            last = self._sampled.get(place, 0.0)
            fresh = [sample for sample in samples if sample.time > last]
            if fresh:
                self._sampled[place] = fresh[-1].time
                found += [(history.workers[place[0]].host, place[0], one) for one in fresh]
        return found


def _latest(rows: _Rows) -> _Rows:
    """Return the latest rows, and all earlier incidents."""
    earlier = [pair for pair in rows[:-_MOST_AT_FIRST] if isinstance(pair[1], Incident)]
    return earlier + rows[-_MOST_AT_FIRST:]


def _longest(rows: _Rows) -> _Rows:
    """Return the rows without the shortest tasks and copies, if there are too many."""
    if len(rows) <= _MOST:
        return rows
    kept = heapq.nlargest(_MOST, range(len(rows)), key=lambda n: _weight(rows[n][1]))
    return [rows[n] for n in sorted(kept)]


def _weight(row: TaskRun | Copy | Incident) -> float:
    if isinstance(row, Incident) or (isinstance(row, TaskRun) and row.outcome == "error"):
        return math.inf
    return (row.stop or 0.0) - (row.start or 0.0)
