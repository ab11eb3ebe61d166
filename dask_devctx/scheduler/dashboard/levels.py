"""The plots in which each device has a lane that is filled from the bottom up to some levels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

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
from dask_devctx.scheduler.dashboard.theme import Colours
from dask_devctx.scheduler.rows import Sample

# The part of a lane that is filled, measured from its middle.
_LOW, _HIGH = -0.42, 0.42
# The intervals that are kept: the plots show fewer.
_KEPT: Final = 20_000


class Level(NamedTuple):
    """A level in each lane.

    Parameters
    ----------
    name
        The name of its column.
    colour
        Its colour.
    legend
        Its name in the legend.
    begins
        The level at which its filled area begins, or None for a line.
    dash
        The dashes of a line.
    """

    name: str
    colour: str
    legend: str
    begins: str | None = None
    dash: str | Sequence[int] = "solid"


class LevelsPlot(ABC):
    """A lane for each device, which its samples fill from the bottom up to some levels.

    Attributes
    ----------
    root
        The figure.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    levels: ClassVar[Sequence[Level]]
    # The legend of the rest of a lane, and the labels and columns that the mouse shows.
    background: ClassVar[str]
    hovers: ClassVar[Mapping[str, str]]
    columns: ClassVar[str]

    def __init__(self, times: TimeAxis, devices: LaneAxis, colours: Colours) -> None:
        self._intervals = Intervals()
        self._kept: deque[Interval] = deque(maxlen=_KEPT)
        names = " ".join(level.name for level in self.levels)
        self._rows = Rows(f"left right low high {names} {self.columns}", "lane")
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
        self.root.add_tools(hover([whole], self.hovers, "@lane"))
        self._texts = LaneTexts(self.root, colours)
        times.follow(self.root)

    def show(self, batch: Batch) -> None:
        """Show the samples of a batch."""
        if batch.again:
            self._kept.clear()
        fresh = list(self._intervals.of(batch, batch.devices))
        self._kept.extend(fresh)
        latest = self._intervals.latest.values()
        if self.rescaled([one.after for one in latest], begins=batch.again) or batch.again:
            self._rows.replace(self._row(one, batch.ms) for one in self._kept)
        else:
            self._rows.add(self._row(one, batch.ms) for one in fresh)
        self._texts.show({one.middle + _HIGH: self.texts(one.after) for one in latest})

    def _row(self, one: Interval, ms: Callable[[float], float]) -> dict[str, Any]:
        low = one.middle + _LOW
        heights = self.heights(one.before, one.after)
        return {
            "left": ms(one.before.time),
            "right": ms(one.after.time),
            "low": low,
            "high": one.middle + _HIGH,
            "lane": one.lane,
            **{name: low + (_HIGH - _LOW) * min(height, 1.0) for name, height in heights.items()},
            **self.numbers(one.before, one.after),
        }

    def rescaled(self, samples: Sequence[Sample], *, begins: bool) -> bool:
        """Choose the scale for the latest samples of all devices; return whether it changed."""
        return False

    @abstractmethod
    def heights(self, before: Sample, after: Sample) -> dict[str, float]:
        """Return each level as a part of a lane's height; not a number where it has none."""

    @abstractmethod
    def numbers(self, before: Sample, after: Sample) -> dict[str, float]:
        """Return the values of the columns that the mouse shows."""

    @abstractmethod
    def texts(self, sample: Sample) -> list[str]:
        """Return the latest numbers of a device in a few words, the most important ones first."""
