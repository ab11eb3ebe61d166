"""The plots of each device's memory and load over time: a lane is filled up to some levels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

from dask.utils import format_bytes

from dask_devctx.scheduler.dashboard.feed import Batch, Interval
from dask_devctx.scheduler.dashboard.figures import SPILLED, Axes, Rows, about, hover, legend_below

# The part of a lane that is filled, measured from its middle.
_LOW, _HIGH = -0.42, 0.42


class Level(NamedTuple):
    """A level in each lane: an area from another level or from below, or a line."""

    name: str
    colour: str
    legend: str
    begins: str | None = "low"


# The levels of an interval, as parts of a whole and not a number where unknown; and the lines that
# the mouse shows.
Reading = tuple[Sequence[float], Mapping[str, str]]


class LevelsPlot:
    """A lane for each device, which its samples fill from the bottom up to some levels.

    ``read`` makes a reading of an interval.
    """

    def __init__(
        self, name: str, title: str, axes: Axes, background: str, levels: Sequence[Level],
        read: Callable[[Interval], Reading],
    ) -> None:  # fmt: skip
        self._levels, self._read = levels, read
        names = " ".join(level.name for level in levels)
        self._rows = Rows(f"left right low high {names}", "about")
        self.root = axes.plot(name, title)
        box: dict[str, Any] = {"left": "left", "right": "right", "source": self._rows.source}
        # A mouse over any part of the lane finds the interval.
        whole = self.root.quad(
            bottom="low", top="high", fill_color="#888888", fill_alpha=0.2, line_color=None,
            legend_label=background, **box,
        )  # fmt: skip
        for level in levels:
            look = {"color": level.colour, "legend_label": level.legend, **box}
            if level.begins is not None:
                self.root.quad(bottom=level.begins, top=level.name, **look)
            else:
                x0, x1 = look.pop("left"), look.pop("right")
                self.root.segment(x0=x0, x1=x1, y0=level.name, y1=level.name, **look, line_width=2)
        legend_below(self.root, click="hide")
        self.root.add_tools(hover(whole))

    def show(self, batch: Batch) -> None:
        """Show the intervals of a batch."""
        known = (one for one in batch.intervals if one.after.uuid in batch.lanes.positions)
        self._rows.add((self._row(one, batch) for one in known), again=batch.again)

    def _row(self, one: Interval, batch: Batch) -> dict[str, Any]:
        middle, (parts, lines) = batch.lanes.positions[one.after.uuid], self._read(one)
        low = middle + _LOW
        return {
            "left": batch.ms(one.before.time),
            "right": batch.ms(one.after.time),
            "low": low,
            "high": middle + _HIGH,
            "about": about(batch.lanes.name(one.after.uuid), lines),
            **{
                level.name: low + (_HIGH - _LOW) * min(part, 1.0)
                for level, part in zip(self._levels, parts, strict=True)
            },
        }


# -- memory

_MEMORY: Final = (
    Level("to_held", "#3a7ebf", "held"),
    Level("to_copies", "#8fc1e8", "copies", "to_held"),
    Level("to_rest", "#8a6fb5", "other use", "to_copies"),
    Level("to_others", "#b5a48a", "other processes", "to_rest"),
    Level("spilled_at", SPILLED, "spilled", None),
    Level("limit_at", "#d62728", "limit", None),
)


def memory_plot(axes: Axes) -> LevelsPlot:
    """Return a plot with a lane for each device, which its memory fills."""
    return LevelsPlot("device_memory", "Memory of each device", axes, "free", _MEMORY, _memory)


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


# -- load

_LOAD: Final = (
    Level("occupied_to", "#8fa8c4", "has a task"),
    Level("computing_to", "#76b900", "computes, by NVML"),
    Level("bandwidth_at", "#9467bd", "reads or writes memory, by NVML", None),
)


def utilization_plot(axes: Axes) -> LevelsPlot:
    """Return a plot with a lane for each device, which its load fills."""
    title = "Utilization of each device"
    return LevelsPlot("device_utilization", title, axes, "idle", _LOAD, _load)


def _load(one: Interval) -> Reading:
    parts = [one.occupied, one.after.utilization, one.after.bandwidth]
    lines = {
        level.legend: "unknown" if part is None else f"{part:.0%}"
        for level, part in zip(_LOAD, parts, strict=True)
    }
    return [math.nan if part is None else part for part in parts], lines
