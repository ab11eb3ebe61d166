"""The news of the history for the plots of one document, read once for all of them."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import localtime
from typing import Any, Final, NamedTuple, Protocol

from bokeh.core.properties import without_property_validation
from distributed import Scheduler
from distributed.metrics import time

from dask_devctx.scheduler.cluster import device_names
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

# The space between two hosts, as a part of a lane's height.
HOST_PADDING: Final = 0.6
# The label of the lane for tasks without a device.
NO_DEVICE: Final = "no device"

_Row = TaskRun | Copy | Incident
Place = tuple[str, str | None]  # a host, and the UUID of a device there


class Member(NamedTuple):
    """A device of a host: its ordinal there, or None twice for the tasks without a device."""

    host: str
    uuid: str | None
    device_id: int | None


class Lanes:
    """The positions of lanes on an axis with the labels ``factors``, from the bottom to the top.

    A device that several workers use has one lane, and so do the tasks without a device of one
    host. With several hosts, a factor is the pair of the host and the device.

    Examples
    --------
    >>> lanes = Lanes(Member("node-1", f"GPU-{n}", n) for n in range(2))
    >>> lanes.factors
    ['cuda:1', 'cuda:0']
    >>> lanes.position("node-1", "GPU-0"), lanes.label("node-1", "GPU-0")
    (1.5, 'cuda:0')
    """

    def __init__(self, members: Iterable[Member] = ()) -> None:
        labels = _labels(set(members))
        several = len({host for host, _ in labels}) > 1
        self.factors: list[str | tuple[str, str]] = []
        self.positions: dict[tuple[str, str | None], float] = {}
        self.labels: dict[tuple[str, str | None], str] = {}
        position, last = 0.5, None
        for place, label in reversed(labels.items()):
            host = place[0]
            if last not in (None, host):
                position += HOST_PADDING
            last = host
            self.positions[place] = position
            self.labels[place] = f"{host} {label}" if several else label
            self.factors.append((host, label) if several else label)
            position += 1

    def position(self, host: str, uuid: str | None) -> float | None:
        """Return the middle of a device's lane, or None if it has no lane."""
        return self.positions.get((host, uuid))

    def label(self, host: str, uuid: str | None) -> str:
        """Return the name of a device's lane, with its host if there are several."""
        return self.labels.get((host, uuid), NO_DEVICE if uuid is None else uuid)


def _labels(members: set[Member]) -> dict[tuple[str, str | None], str]:
    """Return the label of each lane, from the top to the bottom."""
    ordered = sorted(members, key=_order)
    names = device_names((m.host, m.device_id or 0, m.uuid) for m in ordered if m.uuid is not None)
    return {(m.host, m.uuid): NO_DEVICE if m.uuid is None else names[m.uuid] for m in ordered}


def _order(member: Member) -> tuple[object, ...]:
    last = member.device_id is None
    return _natural(member.host), last, member.device_id or 0, member.uuid


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers in a text by their value: node-2 comes before node-10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)
    ]


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
