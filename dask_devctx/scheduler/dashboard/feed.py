"""The news of the history for the plots of one document, read once for all of them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import localtime
from typing import Any, Final, NamedTuple, Protocol

from bokeh.core.properties import without_property_validation
from distributed import Scheduler
from distributed.metrics import time

from dask_devctx.scheduler.dashboard.lanes import Lanes, Member
from dask_devctx.scheduler.history import DeviceHistory
from dask_devctx.scheduler.rows import Copy, Incident, Sample, TaskRun, merged

# How long a device is shown after its last worker left; a worker may be restarting.
_LINGER_S = 60.0
# The most tasks and copies of an update, and of one that begins from nothing: the scheduler's event
# loop does nothing else meanwhile.
_MOST: Final = 2_500
_MOST_AT_FIRST: Final = 10_000
# Two samples of a device further apart than this show nothing of the time between them.
_APART_S: Final = 5.0

_Row = TaskRun | Copy | Incident
Place = tuple[str, str | None]  # a host, and the UUID of a device there


class Interval(NamedTuple):
    """The time between two samples of a device, the middle of its lane and the lane's name."""

    middle: float
    lane: str
    before: Sample
    after: Sample

    @property
    def occupied(self) -> float:
        """The part of the time with a task on the device."""
        passed = self.after.time - self.before.time
        share = (self.after.occupied_s - self.before.occupied_s) / passed if passed else 0.0
        return min(max(share, 0.0), 1.0)


class Intervals:
    """Makes intervals of samples; ``latest`` has that of each device.

    Several workers may use one device. Each of them samples it, and their own values are added.
    """

    def __init__(self) -> None:
        self.latest: dict[Place, Interval] = {}
        self._samples: dict[Place, dict[str, Sample]] = {}

    def of(self, samples: Iterable[tuple[str, str, Sample]], lanes: Lanes) -> Iterator[Interval]:
        """Yield the intervals that end with samples, each with its host and worker."""
        for host, worker, sample in sorted(samples, key=lambda one: one[2].time):
            place = host, sample.uuid
            middle = lanes.positions.get(place)
            if middle is None:
                continue
            workers = self._samples.setdefault(place, {})
            workers.pop(worker, None)
            workers[worker] = sample  # the latest at the end
            for other in [w for w, s in workers.items() if sample.time - s.time > _APART_S]:
                del workers[other]
            last, after = self.latest.get(place), merged([*workers.values()])
            before = after if last is None else last.after
            interval = Interval(middle, lanes.label(*place), before, after)
            self.latest[place] = interval
            if 0 < after.time - before.time < _APART_S:
                yield interval


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows since the last update, each with its worker's host, and the intervals of samples.

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
    intervals: list[Interval]
    latest: Mapping[Place, Interval]

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
        self._intervals = Intervals()
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
            Member(workers[worker].host, None, None)
            for worker, row in reading.rows
            if row.__class__ is TaskRun and row.uuid is None
        }
        again = members != self._members
        if again:
            self._members, self._lanes = members, Lanes(members)
            self._devices = Lanes(member for member in members if member.uuid is not None)
            self._intervals = Intervals()
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
            intervals=[*self._intervals.of(self._new_samples(history), self._devices)],
            latest=self._intervals.latest,
        )
        for plot in self._plots:
            plot.show(batch)

    def _with_devices(self, history: DeviceHistory, now: float) -> Iterator[Member]:
        for (worker, uuid), device in history.devices.items():
            known = history.workers[worker]
            if known.present:
                self._seen_at[worker] = now
            if now - self._seen_at.get(worker, 0.0) < _LINGER_S:
                yield Member(known.host, uuid, device.device_id)

    def _new_samples(self, history: DeviceHistory) -> Iterator[tuple[str, str, Sample]]:
        for place, samples in history.samples.items():
            last = self._sampled.get(place, 0.0)
            for sample in samples:
                if sample.time > last:
                    self._sampled[place] = sample.time
                    yield history.workers[place[0]].host, place[0], sample


def _latest(rows: list[tuple[str, _Row]]) -> list[tuple[str, _Row]]:
    """Return the latest rows, and all earlier incidents."""
    earlier = [pair for pair in rows[:-_MOST_AT_FIRST] if isinstance(pair[1], Incident)]
    return earlier + rows[-_MOST_AT_FIRST:]


def _longest(rows: list[tuple[str, _Row]]) -> list[tuple[str, _Row]]:
    """Return the rows without the shortest tasks and copies, if there are too many."""
    if len(rows) <= _MOST:
        return rows
    kept = heapq.nlargest(_MOST, range(len(rows)), key=lambda n: _weight(rows[n][1]))
    return [rows[n] for n in sorted(kept)]


def _weight(row: _Row) -> float:
    if isinstance(row, Incident) or (isinstance(row, TaskRun) and row.outcome == "error"):
        return math.inf
    return (row.stop or 0.0) - (row.start or 0.0)
