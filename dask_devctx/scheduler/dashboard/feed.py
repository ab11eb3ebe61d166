"""The news of the history for the plots of one document, read once for all of them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import localtime
from typing import Any, Final, NamedTuple

from bokeh.core.properties import without_property_validation
from distributed import Scheduler
from distributed.metrics import time

from dask_devctx.scheduler.cluster import device_names
from dask_devctx.scheduler.history import DeviceHistory
from dask_devctx.scheduler.messages import ROUTING
from dask_devctx.scheduler.rows import Copy, Happened, Incident, Sample, TaskRun, merged

# The most tasks and copies of an update, and of one that begins from nothing: the scheduler's event
# loop does nothing else meanwhile.
_MOST: Final = 2_500
_MOST_AT_FIRST: Final = 10_000
# Without a sample for this long, a device's worker is gone or very busy.
STALE_S: Final = 3.0
# Two samples of a device further apart than this show nothing of the time between them.
_APART_S: Final = 5.0


class Lanes:
    """The lanes of devices: their ``names`` and ``positions`` by UUID, from the bottom to the top.

    A device is a host, an ordinal there and a UUID. One that several workers use has one lane.
    ``gone`` has the names of the other devices that are ``known``: their workers left.
    """

    def __init__(
        self,
        devices: Iterable[tuple[str, int, str]] = (),
        known: Iterable[tuple[str, int, str]] = (),
    ) -> None:
        there = {*devices}
        ordered = sorted(there.union(known), reverse=True)
        names, several = device_names(ordered), len({host for host, _, _ in ordered}) > 1
        self.gone = {
            uuid: f"{host} {names[uuid]}" if several else names[uuid] for host, _, uuid in ordered
        }
        uuids = {uuid for _, _, uuid in there}
        self.names = {uuid: self.gone.pop(uuid) for uuid in [*self.gone] if uuid in uuids}
        self.positions = {uuid: n + 0.5 for n, uuid in enumerate(self.names)}

    def name(self, end: str | None) -> str:
        """Return the name of a device, or the other end of a copy as it was given."""
        return "" if end is None else self.names.get(end) or self.gone.get(end, end)


class Interval(NamedTuple):
    """The time between two samples of a device."""

    before: Sample
    after: Sample

    @property
    def occupied(self) -> float:
        """The part of the time with a task on the device."""
        passed = self.after.time - self.before.time
        share = (self.after.occupied_s - self.before.occupied_s) / passed if passed else 0.0
        return min(max(share, 0.0), 1.0)


class Intervals:
    """Makes intervals of samples; ``latest`` has that of each device, by UUID.

    Several workers may use one device. Each of them samples it, and their own values are added.
    """

    def __init__(self) -> None:
        self.latest: dict[str, Interval] = {}
        self._samples: dict[str, dict[str, Sample]] = {}

    def of(self, samples: Iterable[tuple[str, Sample]]) -> Iterator[Interval]:
        """Yield the intervals that end with samples, each with its worker."""
        for worker, sample in sorted(samples, key=lambda one: one[1].time):
            workers = self._samples.setdefault(sample.uuid, {})
            workers.pop(worker, None)
            workers[worker] = sample  # the latest at the end
            for other in [w for w, s in workers.items() if sample.time - s.time > _APART_S]:
                del workers[other]
            last, after = self.latest.get(sample.uuid), merged([*workers.values()])
            interval = Interval(after if last is None else last.after, after)
            self.latest[sample.uuid] = interval
            if 0 < after.time - interval.before.time < _APART_S:
                yield interval


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows since the last update, and the intervals of samples.

    With ``again``, the plots begin from nothing. ``offset`` is the seconds from UTC to the
    scheduler's local time.
    """

    lanes: Lanes
    again: bool
    now: float
    offset: float
    left_out: int
    tasks: list[TaskRun]
    copies: list[Copy]
    incidents: list[Incident]
    intervals: list[Interval]
    latest: Mapping[str, Interval]

    def ms(self, seconds: float) -> float:
        """Return a time as Bokeh's axes show it: local time in milliseconds."""
        return 1000 * (seconds + self.offset)


class Feed:
    """Reads the history on the scheduler's event loop, and has plots ``show`` its news."""

    def __init__(self, scheduler: Scheduler, plots: Sequence[Any]) -> None:
        self._scheduler = scheduler
        self._plots = plots
        self._devices: set[tuple[str, int, str]] = set()
        self._lanes = Lanes()
        self._intervals = Intervals()
        self._next = self._next_sample = 0

    def count(self) -> int:
        """Return the number of lanes, as far as it is known before the history is collected."""
        uuids = {uuid for used in self._used().values() for uuid in used}
        return max(len(uuids), len(self._lanes.names))

    def _used(self) -> Mapping[str, frozenset[str]]:
        return getattr(self._scheduler.plugins.get(ROUTING), "devices", {})

    @without_property_validation  # type: ignore[untyped-decorator]
    def update(self) -> None:
        """Give all plots the latest rows."""
        history = DeviceHistory.of(self._scheduler)
        if history is None:  # the plugin was unregistered
            return
        reading, used = history.read(self._next), self._used()
        known = [
            ((one.host, device_id, uuid), uuid in used.get(address, ()))
            for address, one in history.workers.items()
            for uuid, device_id in one.devices.items()
        ]
        devices = {device for device, is_there in known if is_there}
        again = devices != self._devices
        if again:
            self._devices, self._lanes = devices, Lanes(devices, (device for device, _ in known))
            self._intervals = Intervals()
            self._next_sample = 0
            reading = history.read(0)
        samples = history.samples(self._next_sample)
        self._next, self._next_sample = reading.next, samples.next
        rows = _longest([row for _, row in reading.rows], _MOST_AT_FIRST if again else _MOST)
        of: dict[type, list[Any]] = {kind: [] for kind in (TaskRun, Copy, Incident)}
        for row in rows:
            of[row.__class__].append(row)
        now = time()
        batch = Batch(
            lanes=self._lanes,
            again=again,
            now=now,
            offset=localtime(now).tm_gmtoff,
            left_out=len(reading.rows) - len(rows),
            tasks=of[TaskRun],
            copies=of[Copy],
            incidents=of[Incident],
            intervals=[*self._intervals.of(samples.rows)],
            latest=self._intervals.latest,
        )
        for plot in self._plots:
            plot.show(batch)


def _longest(rows: list[Happened], most: int) -> list[Happened]:
    """Return the rows without the shortest tasks and copies, if there are too many."""
    if len(rows) <= most:
        return rows
    kept = heapq.nlargest(most, range(len(rows)), key=lambda n: _weight(rows[n]))
    return [rows[n] for n in sorted(kept)]


def _weight(row: Happened) -> float:
    if isinstance(row, Incident) or (isinstance(row, TaskRun) and row.outcome == "error"):
        return math.inf
    return (row.stop or 0.0) - (row.start or 0.0)
