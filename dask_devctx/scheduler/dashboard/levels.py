"""The plots of each device's memory and load over time: a lane is filled up to some levels."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

from dask.utils import format_bytes

from dask_devctx.scheduler.dashboard.feed import Batch, Interval
from dask_devctx.scheduler.dashboard.figures import (
    SPILLED,
    Colours,
    LaneAxis,
    Rows,
    TimeAxis,
    about,
    hover,
    legend_below,
    over_time,
)

# The part of a lane that is filled, measured from its middle.
_LOW, _HIGH = -0.42, 0.42
# The intervals that are kept: the plots show fewer.
_KEPT: Final = 20_000
# A lane shows half of a device's memory where no device uses more, or a quarter, and so on.
_SMALLEST: Final = 2.0**-10


class Level(NamedTuple):
    """A level in each lane: an area from another level or from below, or a line."""

    name: str
    colour: str
    legend: str
    begins: str | None = "low"
    dash: str | Sequence[int] = "solid"


# The levels of an interval, as parts of the device's memory or of the time and not a number where
# unknown; and the lines that the mouse shows.
Reading = tuple[Sequence[float], Mapping[str, str]]


class LevelsPlot:
    """A lane for each device, which its samples fill from the bottom up to some levels.

    ``read`` makes a reading of an interval, and ``note`` the end of the title from the latest
    intervals and the part of a whole that fills a lane. A lane ``zooms`` in on the lower levels.
    """

    def __init__(
        self, name: str, title: str, times: TimeAxis, devices: LaneAxis, colours: Colours, *,
        levels: Sequence[Level], background: str, read: Callable[[Interval], Reading],
        note: Callable[[Sequence[Interval], float], str], zooms: bool = False,
    ) -> None:  # fmt: skip
        self._title, self._levels, self._read, self._note = title, levels, read, note
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
        times.follow(self.root)

    def show(self, batch: Batch) -> None:
        """Show the intervals of a batch."""
        before = self._part
        if batch.again:
            self._kept.clear()
            self._part = self._least
        self._kept.extend(batch.intervals)
        latest = [*batch.latest.values()]
        known = [level for one in latest for level in self._read(one)[0] if level == level]
        while self._part < min(max(known, default=1.0), 1.0):
            self._part *= 2
        if batch.again or self._part != before:
            self._rows.replace(self._row(one, batch.ms) for one in self._kept)
        else:
            self._rows.add(self._row(one, batch.ms) for one in batch.intervals)
        self._show_legend()
        note = self._note(latest, self._part)
        self.root.title.text = f"{self._title}: {note}" if note else self._title

    def _show_legend(self) -> None:
        """Show the entries of the levels that the plot has."""
        data = self._rows.source.data
        for entry, level in zip(self.root.legend[0].items[1:], self._levels, strict=True):
            low = data.get(level.begins, [-math.inf] * len(data["left"]))
            shown = any(end > start for start, end in zip(low, data[level.name], strict=True))
            if entry.visible is not shown:
                entry.visible = shown

    def _row(self, one: Interval, ms: Callable[[float], float]) -> dict[str, Any]:
        low, (levels, lines) = one.middle + _LOW, self._read(one)
        heights = [low + (_HIGH - _LOW) * min(part / self._part, 1.0) for part in levels]
        return {
            "left": ms(one.before.time),
            "right": ms(one.after.time),
            "low": low,
            "high": one.middle + _HIGH,
            "lane": one.lane,
            "about": about(one.lane, lines),
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
            Level("to_rest", "#8a6fb5", "other use", "to_copies"),
            Level("to_others", "#b5a48a", "other processes", "to_rest"),
            Level("spilled_at", SPILLED, "spilled", None, [5, 3]),
            Level("limit_at", "#d62728", "limit", None),
        ),
        background="free", read=_memory, note=_scale, zooms=True,
    )  # fmt: skip


def _memory(one: Interval) -> Reading:
    after = one.after
    total, limit = after.memory_total or 0, after.device_memory_limit
    free = total if after.memory_free is None else after.memory_free
    held, copies, others, spilled = (
        getattr(after, f"memory_{kind}") or 0 for kind in ("held", "copies", "others", "spilled")
    )
    rest = max(total - free - held - copies - others, 0)
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
    lines = {kind: format_bytes(nbytes) for kind, nbytes in kinds.items()}
    lines["limit for held values and copies"] = "none" if limit is None else format_bytes(limit)
    return [end / total if total else math.nan for end in ends], lines


def _scale(latest: Sequence[Interval], part: float) -> str:
    totals = {one.after.memory_total for one in latest if one.after.memory_total}
    if part == 1 or not totals:
        return "" if totals or not latest else "unknown"
    height = f"{part:.3%} of it" if len(totals) > 1 else format_bytes(int(part * totals.pop()))
    return f"a lane's height is {height}"


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
        background="idle", read=_load, note=_nvml,
    )  # fmt: skip


def _load(one: Interval) -> Reading:
    parts = [one.occupied, one.after.utilization, one.after.bandwidth]
    names = ("has a task", "computes, by NVML", "reads or writes memory, by NVML")
    lines = {
        name: "unknown" if part is None else f"{part:.0%}"
        for name, part in zip(names, parts, strict=True)
    }
    return [math.nan if part is None else part for part in parts], lines


def _nvml(latest: Sequence[Interval], part: float) -> str:
    known = not latest or any(one.after.utilization is not None for one in latest)
    return "a lane's height is 100% of the time" if known else "NVML has no numbers"
