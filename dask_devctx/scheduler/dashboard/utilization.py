"""The plot of each device's load over time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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
from dask_devctx.scheduler.dashboard.memory import HIGH, LOW
from dask_devctx.scheduler.dashboard.sources import Rows
from dask_devctx.scheduler.dashboard.theme import BANDWIDTH, COMPUTE, Colours
from dask_devctx.scheduler.rows import Sample


class UtilizationPlot:
    """A lane for each device, which its load fills from the bottom to the top.

    Attributes
    ----------
    root
        The figure.
    """

    def __init__(self, times: TimeAxis, devices: LaneAxis, colours: Colours) -> None:
        self._intervals = Intervals()
        self._rows = Rows(
            "left right low high occupied_to computing_to bandwidth_from bandwidth_at occupied "
            "computing bandwidth",
            "lane",
        )
        self.root = over_time(
            "device_utilization", "Utilization of each device, by NVML", times, devices, colours
        )
        # Without this layer, a hover finds only the times in which a device had load.
        whole = self.root.quad(
            left="left", right="right", bottom="low", top="high", source=self._rows.source,
            fill_color=colours.lane, line_color=None,
        )  # fmt: skip
        for top, colour, name in (
            ("occupied_to", colours.grid, "has a task"),
            ("computing_to", COMPUTE, "computes"),
        ):
            self.root.quad(
                left="left", right="right", bottom="low", top=top, source=self._rows.source,
                fill_color=colour, line_color=None, legend_label=name,
            )  # fmt: skip
        for x1, y0 in (("right", "bandwidth_at"), ("left", "bandwidth_from")):
            self.root.segment(
                x0="left", x1=x1, y0=y0, y1="bandwidth_at", source=self._rows.source,
                line_color=BANDWIDTH, line_width=2, legend_label="memory bandwidth",
            )  # fmt: skip
        legend_below(self.root)
        self.root.add_tools(
            hover(
                [whole],
                {
                    "has a task": "@occupied{0 %}",
                    "computed": "@computing{0 %}",
                    "memory bandwidth": "@bandwidth{0 %}",
                },
                "@lane",
            )
        )
        self._texts = LaneTexts(self.root, colours)
        times.follow(self.root)

    def show(self, batch: Batch) -> None:
        """Show the samples of a batch."""
        if batch.again:
            self._rows.replace(())
        self._rows.add(_row(one, batch.ms) for one in self._intervals.of(batch, batch.devices))
        latest = self._intervals.latest.values()
        self._texts.show({one.middle: _texts(one.after) for one in latest})


def _row(one: Interval, ms: Callable[[float], float]) -> dict[str, Any]:
    """Return the columns of an interval with the load at its end."""
    before, after = one.before, one.after
    passed = after.time - before.time
    occupied = min(max(after.occupied_s - before.occupied_s, 0.0) / passed, 1.0)
    computing = math.nan if after.utilization is None else after.utilization
    bandwidth = math.nan if after.bandwidth is None else after.bandwidth
    earlier = bandwidth if before.bandwidth is None else before.bandwidth
    low, height = one.middle + LOW, HIGH - LOW
    return {
        "left": ms(before.time),
        "right": ms(after.time),
        "low": low,
        "high": one.middle + HIGH,
        "occupied_to": low + height * occupied,
        "computing_to": low + height * computing,
        "bandwidth_from": low + height * earlier,
        "bandwidth_at": low + height * bandwidth,
        "lane": one.lane,
        "occupied": occupied,
        "computing": computing,
        "bandwidth": bandwidth,
    }


def _texts(sample: Sample) -> list[str]:
    """Return the latest numbers of a device in a few words, the most important one first."""
    if sample.utilization is None:
        return ["NVML does not know"]
    texts = [f"{sample.utilization:.0%}"]
    return texts if sample.bandwidth is None else [*texts, f"bandwidth {sample.bandwidth:.0%}"]
