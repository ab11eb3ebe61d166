"""The plots of each device's memory and load over time: a lane is filled up to some levels."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final, NamedTuple

from dask.utils import format_bytes

from dask_devctx.scheduler.dashboard.feed import Batch
from dask_devctx.scheduler.dashboard.figures import (
    SPILLED,
    Colours,
    LaneAxis,
    LaneTexts,
    Rows,
    TimeAxis,
    about,
    hover,
    legend_below,
    over_time,
)
from dask_devctx.scheduler.dashboard.lanes import Lanes
from dask_devctx.scheduler.rows import OF_A_WORKER, ON_A_DEVICE, Sample

# Two samples of a device further apart than this show nothing of the time between them.
_APART_S: Final = 5.0
# The values of a sample that belong to the worker, and not to the device.
_OWN: Final = ("running", "queued", *(f"memory_{kind}" for kind in OF_A_WORKER))
# The part of a lane that is filled, measured from its middle.
_LOW, _HIGH = -0.42, 0.42
# The intervals that are kept: the plots show fewer.
_KEPT: Final = 20_000
# A lane shows half of a device's memory where no device uses more, or a quarter, and so on.
_SMALLEST: Final = 2.0**-10


class Interval(NamedTuple):
    """The time between two samples of a device, the middle of its lane and the lane's name."""

    middle: float
    lane: str
    before: Sample
    after: Sample


class Intervals:
    """Makes intervals of the samples of batches; ``latest`` has each device's, by host and UUID.

    Several workers may use one device. Each of them samples it, and their own values are added.
    """

    def __init__(self) -> None:
        self.latest: dict[tuple[str, str | None], Interval] = {}
        self._samples: dict[tuple[str, str], dict[str, Sample]] = {}

    def of(self, batch: Batch, lanes: Lanes) -> Iterator[Interval]:
        """Yield the intervals that end with the samples of a batch, placed in some lanes."""
        if batch.again:
            self.latest.clear()
            self._samples.clear()
        for host, worker, sample in batch.samples:
            place = host, sample.uuid
            middle = lanes.position(*place)
            if middle is None:
                continue
            workers = self._samples.setdefault(place, {})
            workers[worker] = sample
            for other in [w for w, s in workers.items() if sample.time - s.time > _APART_S]:
                del workers[other]
            last = self.latest.get(place)
            before = sample if last is None else last.after
            after = sample if len(workers) == 1 else _added(sample, list(workers.values()))
            interval = Interval(middle, lanes.label(*place), before, after)
            self.latest[place] = interval
            if 0 < after.time - before.time < _APART_S:
                yield interval


def _added(latest: Sample, samples: Sequence[Sample]) -> Sample:
    """Return the sample of a device that several workers use."""
    sums: dict[str, Any] = {name: sum(getattr(s, name) or 0 for s in samples) for name in _OWN}
    taken = sum(sums[f"memory_{kind}"] for kind in ON_A_DEVICE)
    others = max((latest.memory_total or 0) - (latest.memory_free or 0) - taken, 0)
    return replace(latest, **sums, memory_others=others)


class Level(NamedTuple):
    """A level in each lane: an area from another level or from below, or a line."""

    name: str
    colour: str
    legend: str
    begins: str | None = "low"
    dash: str | Sequence[int] = "solid"


class Reading(NamedTuple):
    """An interval as a plot shows it.

    ``levels`` are parts of the device's memory or of the time, not a number where unknown. The
    mouse shows ``lines``, and ``words`` are beside the lane.
    """

    levels: Sequence[float]
    lines: Mapping[str, str]
    words: str


class LevelsPlot:
    """A lane for each device, which its samples fill from the bottom up to some levels.

    ``read`` makes a reading of two samples, and ``note`` the end of the title from the latest
    samples and the part of a whole that fills a lane. A lane ``zooms`` in on the lower levels.
    """

    def __init__(
        self, name: str, title: str, times: TimeAxis, devices: LaneAxis, colours: Colours, *,
        levels: Sequence[Level], background: str, beside: int,
        read: Callable[[Sample, Sample], Reading],
        note: Callable[[Sequence[Sample], float], str], zooms: bool = False,
    ) -> None:  # fmt: skip
        self._title, self._levels, self._read, self._note = title, levels, read, note
        self._intervals = Intervals()
        self._kept: deque[Interval] = deque(maxlen=_KEPT)
        self._least = self._part = _SMALLEST if zooms else 1.0
        names = " ".join(level.name for level in levels)
        self._rows = Rows(f"left right low high {names}", "lane about")
        self.root = over_time(name, title, times, devices)
        box: dict[str, Any] = {"left": "left", "right": "right", "source": self._rows.source}
        # A mouse over any part of the lane finds the interval.
        whole = self.root.quad(
            bottom="low", top="high", fill_color=colours.lane, line_color=None,
            legend_label=background, **box,
        )  # fmt: skip
        for level in levels:
            if level.begins is not None:
                self.root.quad(
                    bottom=level.begins, top=level.name, fill_color=level.colour, line_color=None,
                    legend_label=level.legend, **box,
                )  # fmt: skip
            else:
                self.root.segment(
                    x0="left", x1="right", y0=level.name, y1=level.name, source=box["source"],
                    line_color=level.colour, line_width=2, line_dash=level.dash,
                    legend_label=level.legend,
                )  # fmt: skip
        legend_below(self.root, hides=True)
        self.root.add_tools(hover(whole))
        self._texts = LaneTexts(self.root, beside)
        times.follow(self.root)

    def show(self, batch: Batch) -> None:
        """Show the samples of a batch."""
        before = self._part
        if batch.again:
            self._kept.clear()
            self._part = self._least
        fresh = list(self._intervals.of(batch, batch.devices))
        self._kept.extend(fresh)
        latest = {
            place: (one.after, self._read(one.before, one.after))
            for place, one in self._intervals.latest.items()
        }
        known = [level for _, one in latest.values() for level in one.levels if level == level]
        while self._part < min(max(known, default=1.0), 1.0):
            self._part *= 2
        if batch.again or self._part != before:
            self._rows.replace(self._row(one, batch.ms) for one in self._kept)
        else:
            self._rows.add(self._row(one, batch.ms) for one in fresh)
        self._texts.show(batch, {place: one.words for place, (_, one) in latest.items()})
        note = self._note([sample for sample, _ in latest.values()], self._part)
        self.root.title.text = f"{self._title}: {note}" if note else self._title

    def _row(self, one: Interval, ms: Callable[[float], float]) -> dict[str, Any]:
        low, reading = one.middle + _LOW, self._read(one.before, one.after)
        heights = [low + (_HIGH - _LOW) * min(part / self._part, 1.0) for part in reading.levels]
        return {
            "left": ms(one.before.time),
            "right": ms(one.after.time),
            "low": low,
            "high": one.middle + _HIGH,
            "lane": one.lane,
            "about": about(one.lane, reading.lines),
            **{level.name: end for level, end in zip(self._levels, heights, strict=True)},
        }


# -- memory


def memory_plot(times: TimeAxis, devices: LaneAxis, colours: Colours) -> LevelsPlot:
    """Return a plot with a lane for each device, which its memory fills."""
    return LevelsPlot(
        "device_memory", "Memory of each device", times, devices, colours,
        levels=(
            Level("to_held", "#3a7ebf", "held"),
            Level("to_copies", "#8fc1e8", "copies", "to_held"),
            Level("to_rest", "#93a3b1", "other use", "to_copies"),
            Level("to_others", "#b0a08f", "other processes", "to_rest"),
            Level("spilled_at", SPILLED, "spilled", None, [5, 3]),
            Level("limit_at", "#d62728", "limit", None),
        ),
        background="free", beside=150, read=_memory, note=_scale, zooms=True,
    )  # fmt: skip


def _memory(before: Sample, after: Sample) -> Reading:
    total, limit = after.memory_total or 0, after.device_memory_limit
    free = total if after.memory_free is None else after.memory_free
    held, copies, others = (
        after.memory_held or 0,
        after.memory_copies or 0,
        after.memory_others or 0,
    )
    rest = max(total - free - held - copies - others, 0)
    spilled = after.memory_spilled or 0
    ends = [*accumulate((held, copies, rest, others)), spilled or math.nan]
    ends.append(math.nan if limit is None else limit)
    kinds = {
        "held by dask": held,
        "copies of other devices' values": copies,
        "other use by tasks and libraries": rest,
        "of it, staging for other workers": after.memory_staging or 0,
        "other processes": others,
        "free": free,
        "in all": total,
        "spilled to the host": spilled,
    }
    lines = {kind: _size(nbytes) for kind, nbytes in kinds.items()}
    lines["limit for held values and copies"] = "none" if limit is None else _size(limit)
    words = f"{_size(total - free)} used{f', {_size(spilled)} spilled' if spilled else ''}"
    known = bool(total) and after.memory_free is not None
    return Reading(
        [end / total if total else math.nan for end in ends],
        lines,
        words if known else "memory unknown",
    )


def _scale(samples: Sequence[Sample], part: float) -> str:
    totals = {sample.memory_total for sample in samples if sample.memory_total}
    if part == 1 or not totals:
        return ""
    height = f"{part:.3%} of it" if len(totals) > 1 else format_bytes(int(part * totals.pop()))
    return f"a lane's height is {height}"


def _size(nbytes: int) -> str:
    text: str = format_bytes(nbytes)
    return text.replace(".00 ", " ")


# -- load


def utilization_plot(times: TimeAxis, devices: LaneAxis, colours: Colours) -> LevelsPlot:
    """Return a plot with a lane for each device, which its load fills."""
    return LevelsPlot(
        "device_utilization", "Utilization of each device", times, devices, colours,
        levels=(
            Level("occupied_to", "#8fa8c4", "has a task"),
            Level("computing_to", "#76b900", "computes (NVML)"),
            Level("bandwidth_at", "#9467bd", "reads or writes memory (NVML)", None),
        ),
        background="idle", beside=100, read=_load, note=_nvml,
    )  # fmt: skip


def _load(before: Sample, after: Sample) -> Reading:
    passed = after.time - before.time
    occupied = (after.occupied_s - before.occupied_s) / passed if passed else 0.0
    parts = [min(max(occupied, 0.0), 1.0), after.utilization, after.bandwidth]
    texts = ["unknown" if part is None else f"{part:.0%}" for part in parts]
    names = ("has a task", "computes, by NVML", "reads or writes memory, by NVML")
    memory = "" if after.bandwidth is None else f", memory {texts[2]}"
    return Reading(
        [math.nan if part is None else part for part in parts],
        dict(zip(names, texts, strict=True)),
        "" if after.utilization is None else f"{texts[1]}{memory}",
    )


def _nvml(samples: Sequence[Sample], part: float) -> str:
    known = not samples or any(sample.utilization is not None for sample in samples)
    return "a lane's height is 100% of the time" if known else "NVML has no numbers"
