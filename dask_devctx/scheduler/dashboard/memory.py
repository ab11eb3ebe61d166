"""The plot of each device's memory over time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from dask.utils import format_bytes

from dask_devctx.scheduler.dashboard.batches import Batch
from dask_devctx.scheduler.dashboard.figures import (
    LaneAxis,
    LaneTexts,
    TimeAxis,
    hover,
    legend_below,
    over_time,
)
from dask_devctx.scheduler.dashboard.intervals import Interval, Intervals
from dask_devctx.scheduler.dashboard.sources import Rows
from dask_devctx.scheduler.dashboard.theme import (
    COPIES,
    HELD,
    LIMIT,
    OTHERS,
    REST,
    SPILLED,
    Colours,
)
from dask_devctx.scheduler.rows import Sample

# The part of a lane that is filled, measured from its middle.
LOW, HIGH = -0.42, 0.42

# The layers from the bottom to the top: where they begin and end, their colour and their name.
_LAYERS: Final = (
    ("low", "to_held", HELD, "held"),
    ("to_held", "to_copies", COPIES, "copies"),
    ("to_copies", "to_rest", REST, "rest"),
    ("to_rest", "to_others", OTHERS, "others"),
)


class MemoryPlot:
    """A lane for each device, which its memory fills from the bottom to the top.

    Attributes
    ----------
    root
        The figure.
    """

    def __init__(self, times: TimeAxis, devices: LaneAxis, colours: Colours) -> None:
        self._intervals = Intervals()
        self._rows = Rows(
            "left right low to_held to_copies to_rest to_others high limit_at spilled_at held "
            "copies rest others free total limit spilled",
            "lane",
        )
        self.root = over_time("device_memory", "Memory of each device", times, devices, colours)
        free = self.root.quad(
            left="left", right="right", bottom="low", top="high", source=self._rows.source,
            fill_color=colours.lane, line_color=None, legend_label="free",
        )  # fmt: skip
        for bottom, top, colour, name in _LAYERS:
            self.root.quad(
                left="left", right="right", bottom=bottom, top=top, source=self._rows.source,
                fill_color=colour, line_color=None, legend_label=name,
            )  # fmt: skip
        for at, colour, dash, name in (
            ("spilled_at", SPILLED, [5, 3], "spilled"),
            ("limit_at", LIMIT, "solid", "limit"),
        ):
            self.root.segment(
                x0="left", x1="right", y0=at, y1=at, source=self._rows.source, line_color=colour,
                line_width=2, line_dash=dash, legend_label=name,
            )  # fmt: skip
        legend_below(self.root)
        names = ("held", "copies", "rest", "others", "free", "total", "limit", "spilled")
        self.root.add_tools(hover([free], {name: f"@{name}{{B}}" for name in names}, "@lane"))
        self._texts = LaneTexts(self.root, colours)
        times.follow(self.root)

    def show(self, batch: Batch) -> None:
        """Show the samples of a batch."""
        if batch.again:
            self._rows.replace(())
        rows = [
            _row(one, batch.ms)
            for one in self._intervals.of(batch, batch.devices)
            if one.after.memory_total
        ]
        self._rows.add(rows)
        latest = self._intervals.latest.values()
        self._texts.show({one.middle: _texts(one.after) for one in latest})


def _row(one: Interval, ms: Callable[[float], float]) -> dict[str, Any]:
    """Return the columns of an interval with the memory at its end."""
    sample, low = one.after, one.middle + LOW
    total = sample.memory_total or 0
    free = total if sample.memory_free is None else sample.memory_free
    held, copies = sample.memory_held or 0, sample.memory_copies or 0
    others = sample.memory_others or 0
    rest = max(total - free - held - copies - others, 0)
    limit, spilled = sample.memory_limit, sample.memory_spilled or 0
    return {
        "left": ms(one.before.time),
        "right": ms(sample.time),
        "low": low,
        "to_held": _height(low, held, total),
        "to_copies": _height(low, held + copies, total),
        "to_rest": _height(low, held + copies + rest, total),
        "to_others": _height(low, held + copies + rest + others, total),
        "high": one.middle + HIGH,
        "limit_at": _height(low, limit, total),
        "spilled_at": _height(low, spilled or None, total),
        "lane": one.lane,
        "held": held,
        "copies": copies,
        "rest": rest,
        "others": others,
        "free": free,
        "total": total,
        "limit": math.nan if limit is None else limit,
        "spilled": spilled,
    }


def _height(low: float, nbytes: int | None, total: int) -> float:
    """Return where bytes end in a lane; nowhere if there are none."""
    return math.nan if nbytes is None else low + (HIGH - LOW) * min(nbytes / total, 1.0)


def _texts(sample: Sample) -> list[str]:
    """Return the latest numbers of a device in a few words, the most important ones first."""
    if not sample.memory_total:
        return ["memory unknown"]
    total, free = sample.memory_total, sample.memory_free
    parts = [("held", sample.memory_held), ("copies", sample.memory_copies)]
    parts += [("spilled", sample.memory_spilled)]
    used = "" if free is None else f"{format_bytes(total - free)} of "
    return [used + format_bytes(total), *(f"{name} {format_bytes(n)}" for name, n in parts if n)]
