"""The plots of each device's memory and load over time: a lane is filled up to some levels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
from dask.utils import format_bytes

from dask_devctx.scheduler.dashboard.feed import Batch, Interval
from dask_devctx.scheduler.dashboard.figures import GREY, SPILLED, Axes, LanesPlot, Rows, about

# The parts of a lane, measured from its middle: up from the base, and down from it.
_BASE, _UP, _DOWN = -0.22, 0.64, 0.2


class Level(NamedTuple):
    """A level in each lane: an area that is seen above another level or the base; or a line."""

    name: str
    colour: str
    legend: str
    above: str | None = "base"


# The levels of an interval, as parts of a whole, below zero if they go down, and 0 where unknown;
# and the lines that the mouse shows.
Reading = tuple[Sequence[float], Mapping[str, str]]


class LevelsPlot(LanesPlot):
    """A lane for each device, which its samples fill up and down from a base, to some levels.

    ``read`` makes a reading of an interval.
    """

    def __init__(
        self, title: str, levels: Sequence[Level], read: Callable[[Interval], Reading], axes: Axes
    ) -> None:
        super().__init__(title, axes)
        self._levels, self._read = levels, read
        names = " ".join(level.name for level in levels)
        self._rows = Rows(f"left right low base {names}", "about")
        # A mouse over any part of the lane finds the interval.
        self.hover(self.boxes(self._rows, "low", "whole", fill_alpha=0, line_color=None))
        for level in levels:
            bottom = "base" if level.above else level.name
            edge = None if level.colour == GREY else level.colour  # not seen through twice
            self.boxes(self._rows, bottom, level.name, color=level.colour, line_color=edge)

    def show(self, batch: Batch) -> None:
        """Show the intervals of a batch."""
        known = (one for one in batch.intervals if one.after.uuid in batch.lanes.positions)
        self._rows.add((self._row(one, batch) for one in known), again=batch.again)
        data, inside = self._rows.source.data, self._rows.inside(self.axes.view)
        names = ["base", *(level.name for level in self._levels)]
        reach = {n: np.nan_to_num(abs(data[n] - data["base"])[inside]) for n in names}
        legend = {
            level.legend: level.colour
            for level in self._levels
            if (reach[level.name] > reach[level.above or "base"]).any()
        }
        self.explain(legend)

    def _row(self, one: Interval, batch: Batch) -> dict[str, Any]:
        middle, (parts, lines) = batch.lanes.positions[one.after.uuid], self._read(one)
        base = middle + _BASE
        return {
            "left": batch.ms(one.before.time),
            "right": batch.ms(one.after.time),
            "low": base - _DOWN,
            "base": base,
            "about": about(batch.lanes.name(one.after.uuid), lines),
            **{
                level.name: base + (_UP if part > 0 else _DOWN) * np.clip(part or np.nan, -1, 1)
                for level, part in zip(self._levels, parts, strict=True)
            },
        }


# -- memory

_MEMORY: Final = (
    Level("whole", GREY, "free"),
    Level("to_others", "#b5a48a", "other processes", "to_rest"),
    Level("to_rest", "#8a6fb5", "other use", "to_copies"),
    Level("to_copies", "#8fc1e8", "copies", "to_held"),
    Level("to_held", "#3a7ebf", "held"),
    Level("spilled_to", SPILLED, "spilled (downwards)"),
    Level("limit_at", "#d62728", "limit", None),
)


def _memory(one: Interval) -> Reading:
    after = one.after
    total, limit = after.memory_total or 0, after.device_memory_limit
    free = total if after.memory_free is None else after.memory_free
    held, copies, others, spilled = (
        getattr(after, f"memory_{kind}") or 0 for kind in ("held", "copies", "others", "spilled")
    )
    rest = max(total - free - held - copies - others, 0)
    up = accumulate((held, copies, rest, others))
    ends = [total, *reversed([*up]), -spilled, limit or 0]
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
    return [end / total if total else 0.0 for end in ends], lines


# -- load

_LOAD: Final = (
    Level("whole", GREY, "idle"),
    Level("occupied_to", "#8fa8c4", "has a task", "computing_to"),
    Level("computing_to", "#76b900", "computes (NVML)"),
    Level("bandwidth_to", "#9467bd", "uses its memory (NVML, downwards)"),
)


def _load(one: Interval) -> Reading:
    parts = [1.0, one.occupied, one.after.utilization, one.after.bandwidth]
    lines = {
        level.legend: "unknown" if part is None else f"{part:.0%}"
        for level, part in zip(_LOAD[1:], parts[1:], strict=True)
    }
    *up, bandwidth = (part or 0.0 for part in parts)
    return [*up, -bandwidth], lines


# Plots of axes: with a lane for each device, which its memory fills, or its load.
memory_plot = partial(LevelsPlot, "Memory of each device", _MEMORY, _memory)
utilization_plot = partial(LevelsPlot, "Utilization of each device", _LOAD, _load)
