"""The plots of each device's memory and load over time: a lane is filled up to some levels."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, NamedTuple

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
    """A level in each lane: an area from the level ``begins`` or from below, or a line."""

    name: str
    colour: str
    legend: str
    begins: str | None = "low"
    dash: str | Sequence[int] = "solid"


class LevelsPlot:
    """A lane for each device, which its samples fill from the bottom up to some levels."""

    name: ClassVar[str]
    title: ClassVar[str]
    levels: ClassVar[Sequence[Level]]
    # The legend of the rest of a lane, and the pixels for the text beside it.
    background: ClassVar[str]
    beside: ClassVar[int]

    def __init__(self, times: TimeAxis, devices: LaneAxis, colours: Colours) -> None:
        self._intervals = Intervals()
        self._kept: deque[Interval] = deque(maxlen=_KEPT)
        names = " ".join(level.name for level in self.levels)
        self._rows = Rows(f"left right low high {names}", "lane about")
        self.root = over_time(self.name, self.title, times, devices)
        source = self._rows.source
        box: dict[str, Any] = {"left": "left", "right": "right", "source": source}
        # A mouse over any part of the lane finds the interval.
        whole = self.root.quad(
            bottom="low", top="high", fill_color=colours.lane, line_color=None,
            legend_label=self.background, **box,
        )  # fmt: skip
        for level in self.levels:
            if level.begins is not None:
                self.root.quad(
                    bottom=level.begins, top=level.name, fill_color=level.colour, line_color=None,
                    legend_label=level.legend, **box,
                )  # fmt: skip
            else:
                self.root.segment(
                    x0="left", x1="right", y0=level.name, y1=level.name, source=source,
                    line_color=level.colour, line_width=2, line_dash=level.dash,
                    legend_label=level.legend,
                )  # fmt: skip
        legend_below(self.root, hides=True)
        self.root.add_tools(hover(whole))
        self._texts = LaneTexts(self.root, self.beside)
        times.follow(self.root)

    def show(self, batch: Batch) -> None:
        """Show the samples of a batch."""
        if batch.again:
            self._kept.clear()
        fresh = list(self._intervals.of(batch, batch.devices))
        self._kept.extend(fresh)
        latest = {place: one.after for place, one in self._intervals.latest.items()}
        if self.rescaled(list(latest.values()), begins=batch.again) or batch.again:
            self._rows.replace(self._row(one, batch.ms) for one in self._kept)
        else:
            self._rows.add(self._row(one, batch.ms) for one in fresh)
        self._texts.show(batch, {place: self.text(sample) for place, sample in latest.items()})

    def _row(self, one: Interval, ms: Callable[[float], float]) -> dict[str, Any]:
        low = one.middle + _LOW
        heights = self.heights(one.before, one.after)
        return {
            "left": ms(one.before.time),
            "right": ms(one.after.time),
            "low": low,
            "high": one.middle + _HIGH,
            "lane": one.lane,
            "about": about(one.lane, self.lines(one.before, one.after)),
            **{name: low + (_HIGH - _LOW) * min(height, 1.0) for name, height in heights.items()},
        }

    def rescaled(self, samples: Sequence[Sample], *, begins: bool) -> bool:
        """Title the plot for the latest samples of all devices; return whether it is rescaled."""
        return False

    def heights(self, before: Sample, after: Sample) -> dict[str, float]:
        """Return each level as a part of a lane's height; not a number where it has none."""
        raise NotImplementedError

    def lines(self, before: Sample, after: Sample) -> dict[str, str]:
        """Return the names and values that the mouse shows."""
        raise NotImplementedError

    def text(self, sample: Sample) -> str:
        """Return the latest numbers of a device in a few words."""
        raise NotImplementedError


class MemoryPlot(LevelsPlot):
    """A lane for each device, which its memory fills from the bottom to the top."""

    name = "device_memory"
    title = "Memory of each device"
    levels = (
        Level("to_held", "#3a7ebf", "held"),
        Level("to_copies", "#8fc1e8", "copies", "to_held"),
        Level("to_rest", "#93a3b1", "other use", "to_copies"),
        Level("to_others", "#b0a08f", "other processes", "to_rest"),
        Level("spilled_at", SPILLED, "spilled", None, [5, 3]),
        Level("limit_at", "#d62728", "limit", None),
    )
    background = "free"
    beside = 150

    # The part of a device's memory that fills a lane.
    _part = 1.0

    def rescaled(self, samples: Sequence[Sample], *, begins: bool) -> bool:
        """Choose the scale for the latest samples: what it once had to show still fits."""
        known = [sample for sample in samples if sample.memory_total]
        before = self._part
        if begins:
            self._part = _SMALLEST
        while self._part < max(map(_most, known), default=1.0):
            self._part *= 2
        totals = {sample.memory_total for sample in known}
        height = f"{self._part:.3%} of it"
        if len(totals) == 1:
            height = format_bytes(int(self._part * (totals.pop() or 0)))
        scale = "" if self._part == 1 else f": a lane's height is {height}"
        self.root.title.text = self.title + scale
        return self._part != before

    def heights(self, before: Sample, after: Sample) -> dict[str, float]:
        """Return where each kind of memory ends in a lane."""
        total = after.memory_total
        if not total:
            return dict.fromkeys((level.name for level in self.levels), math.nan)
        of, full = _kinds(after), self._part * total
        ends: dict[str, float] = {"to_held": of["held"], "to_copies": of["held"] + of["copies"]}
        ends["to_rest"] = ends["to_copies"] + of["rest"]
        ends["to_others"] = ends["to_rest"] + of["others"]
        ends["spilled_at"] = of["spilled"] or math.nan
        ends["limit_at"] = (
            math.nan if after.device_memory_limit is None else after.device_memory_limit
        )
        return {name: nbytes / full for name, nbytes in ends.items()}

    def lines(self, before: Sample, after: Sample) -> dict[str, str]:
        """Return the bytes of each kind."""
        of, limit = _kinds(after), after.device_memory_limit
        kinds = {
            "held by dask": of["held"],
            "copies of other devices' values": of["copies"],
            "other use by tasks and libraries": of["rest"],
            "of it, staging for other workers": after.memory_staging or 0,
            "other processes": of["others"],
            "free": of["free"],
            "in all": of["total"],
            "spilled to the host": of["spilled"],
        }
        limits = {"limit for held values and copies": "none" if limit is None else _size(limit)}
        return {kind: _size(nbytes) for kind, nbytes in kinds.items()} | limits

    def text(self, sample: Sample) -> str:
        """Return the memory in use, and what dask spilled."""
        if sample.memory_total is None or sample.memory_free is None:
            return "memory unknown"
        used = f"{_size(sample.memory_total - sample.memory_free)} used"
        spilled = sample.memory_spilled
        return f"{used}, {_size(spilled)} spilled" if spilled else used


def _size(nbytes: int) -> str:
    text: str = format_bytes(nbytes)
    return text.replace(".00 ", " ")


def _kinds(sample: Sample) -> dict[str, int]:
    """Return the bytes of each kind."""
    total = sample.memory_total or 0
    free = total if sample.memory_free is None else sample.memory_free
    held, copies = sample.memory_held or 0, sample.memory_copies or 0
    others = sample.memory_others or 0
    return {
        "held": held,
        "copies": copies,
        "rest": max(total - free - held - copies - others, 0),
        "others": others,
        "free": free,
        "total": total,
        "spilled": sample.memory_spilled or 0,
    }


def _most(sample: Sample) -> float:
    """Return the highest level of a device, as a part of its memory."""
    of = _kinds(sample)
    most = max(of["total"] - of["free"], sample.device_memory_limit or 0, of["spilled"])
    return min(most / of["total"], 1.0)


class UtilizationPlot(LevelsPlot):
    """A lane for each device, which its load fills from the bottom to the top."""

    name = "device_utilization"
    title = "Utilization of each device"
    levels = (
        Level("occupied_to", "#8fa8c4", "has a task"),
        Level("computing_to", "#76b900", "computes (NVML)"),
        Level("bandwidth_at", "#9467bd", "reads or writes memory (NVML)", None),
    )
    background = "idle"
    beside = 100

    def rescaled(self, samples: Sequence[Sample], *, begins: bool) -> bool:
        """Say once, for all devices, that NVML has no numbers."""
        known = not samples or any(sample.utilization is not None for sample in samples)
        scale = "a lane's height is 100% of the time" if known else "NVML has no numbers"
        self.root.title.text = f"{self.title}: {scale}"
        return False

    def heights(self, before: Sample, after: Sample) -> dict[str, float]:
        """Return the load as parts of the time."""
        return {
            "occupied_to": _occupied(before, after),
            "computing_to": math.nan if after.utilization is None else after.utilization,
            "bandwidth_at": math.nan if after.bandwidth is None else after.bandwidth,
        }

    def lines(self, before: Sample, after: Sample) -> dict[str, str]:
        """Return the load as parts of the time."""
        return {
            "has a task": _percent(_occupied(before, after)),
            "computes, by NVML": _percent(after.utilization),
            "reads or writes memory, by NVML": _percent(after.bandwidth),
        }

    def text(self, sample: Sample) -> str:
        """Return the load that NVML tells."""
        if sample.utilization is None:
            return ""
        memory = "" if sample.bandwidth is None else f", memory {sample.bandwidth:.0%}"
        return f"{sample.utilization:.0%}{memory}"


def _percent(part: float | None) -> str:
    return "unknown" if part is None else f"{part:.0%}"


def _occupied(before: Sample, after: Sample) -> float:
    passed = after.time - before.time
    return min(max(after.occupied_s - before.occupied_s, 0.0) / passed, 1.0) if passed else 0.0
