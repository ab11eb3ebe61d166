"""The parts that the plots share: colours, axes, lanes, rows, and the text under the mouse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final, NamedTuple

import numpy as np
from bokeh.models import ColumnDataSource, DataRange1d, FactorRange, HoverTool
from bokeh.plotting import figure

from dask_devctx.scheduler.dashboard.feed import HOST_PADDING, Batch

# Without a sample for this long, a device's worker is gone or very busy.
STALE_S: Final = 3.0
# How much of the past the plots show at first.
WINDOW_S: Final = 30.0
# The most rows of one kind that a browser is given: 1,000 a second for longer than the plots show.
MOST_ROWS: Final = 40_000
# The labels of the time axis, by the distance of its ticks.
_CLOCK: Final = {
    **dict.fromkeys(("milliseconds", "microseconds"), "%H:%M:%S.%3N"),
    **dict.fromkeys(("seconds", "minsec", "minutes", "hourmin", "hours"), "%H:%M:%S"),
}


class Colours(NamedTuple):
    """The colours of a light or a dark page, and Bokeh's theme for it."""

    name: str
    theme: str | None
    page: str
    text: str
    faint: str
    grid: str
    lane: str


LIGHT: Final = Colours("light", None, "#ffffff", "#222222", "#666666", "#dddddd", "#eeeeee")
DARK: Final = Colours("dark", "dark_minimal", "#15191c", "#e0e0e0", "#a0a4a8", "#3a3f44", "#2c3238")

FAILED: Final = "#e31a1c"
SPILLED: Final = "#e08a1e"
# Copies, by their transport, and the words for it.
COPIES: Final[Mapping[str, str]] = {
    "peer": "#2ca02c",
    "ipc": "#17a2b8",
    "host": "#c2449b",
    "spill": SPILLED,
}
TRANSPORTS: Final[Mapping[str, str]] = {
    "peer": "within a worker",
    "ipc": "between workers",
    "host": "through the host",
    "spill": "spilled, or back",
}
OTHER: Final = "#7f7f7f"
# The columns of a rectangle's sides.
BOX: Final = {name: name for name in ("left", "right", "bottom", "top")}


class TimeAxis:
    """The time that several plots of one document show.

    It follows the scheduler's clock until somebody pans or zooms; the tool "Reset" makes it follow
    again.
    """

    def __init__(self) -> None:
        self.range = DataRange1d(
            follow="end", follow_interval=1000 * WINDOW_S, range_padding=0, only_visible=False
        )
        self._window = ColumnDataSource({"time": [0, 1000 * WINDOW_S], "height": [0.5, 0.5]})

    def follow(self, plot: figure) -> None:
        """Let the axis end at the time of the latest batch."""
        mark = plot.scatter(x="time", y="height", source=self._window, alpha=0, size=0)
        self.range.renderers = [mark]

    def show(self, batch: Batch) -> None:
        times = [batch.ms(batch.now - WINDOW_S), batch.ms(batch.now)]
        self._window.data = {"time": times, "height": [0.5, 0.5]}


class LaneAxis:
    """The lanes that several plots of one document show: of all work, or of devices only."""

    def __init__(self, *, devices: bool) -> None:
        self._only_devices = devices
        self.range = FactorRange(
            factors=[""], group_padding=HOST_PADDING, factor_padding=0, range_padding=0.1,
            range_padding_units="absolute",
        )  # fmt: skip

    def show(self, batch: Batch) -> None:
        if batch.again:
            lanes = batch.devices if self._only_devices else batch.lanes
            self.range.factors = list(lanes.factors) or [""]


def over_time(name: str, title: str, times: TimeAxis, lanes: LaneAxis) -> figure:
    """Return an empty plot of lanes over time."""
    plot = figure(
        name=name, title=title, x_range=times.range, y_range=lanes.range, x_axis_type="datetime",
        tools="xpan,xwheel_zoom,xbox_zoom,reset,save", toolbar_location="above",
        sizing_mode="stretch_both", min_border_left=10, min_border_right=10,
        outline_line_color=None, output_backend="canvas",
    )  # fmt: skip
    plot.toolbar.logo = None
    plot.axis.major_tick_line_color = None
    plot.ygrid.grid_line_color = None
    plot.xaxis.formatter.update(context=None, strip_leading_zeros=False, **_CLOCK)
    plot.xaxis.update(
        axis_label="time of day", axis_label_text_font_size="11px", axis_label_standoff=0,
        axis_label_text_font_style="normal",
    )  # fmt: skip
    return plot


class Rows:
    """The rows of a part of a plot, with columns of numbers and of texts. The oldest rows leave."""

    def __init__(self, numbers: str, texts: str = "") -> None:
        self._numbers, self._texts = numbers.split(), texts.split()
        self.source = ColumnDataSource(self._columns(()))

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        if added := list(rows)[-MOST_ROWS:]:
            self.source.stream(self._columns(added), MOST_ROWS)

    def replace(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        shown = list(rows)
        if shown or len(self.source.data[self._numbers[0]]):
            self.source.data = self._columns(shown)

    def _columns(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        # Bokeh sends an array of numbers unchanged, and looks at each text.
        numbers = {name: np.array([row[name] for row in rows], float) for name in self._numbers}
        return {**numbers, **{name: [row[name] for row in rows] for name in self._texts}}


def about(head: str, lines: Mapping[str, str]) -> str:
    """Return what the mouse shows of a row, as HTML: a bold head, and lines of names and values."""
    rows = "".join(
        f"<tr><td style='padding-right: 8px'>{name}</td><td>{escape(value)}</td></tr>"
        for name, value in lines.items()
    )
    return f"<b>{escape(head)}</b><table style='font-size: 12px'>{rows}</table>"


def hover(*renderers: Any) -> HoverTool:
    """Return a hover that shows the column ``about`` of rows."""
    return HoverTool(
        renderers=list(renderers),
        tooltips="<div style='max-width: 480px; overflow-wrap: anywhere'>@about{safe}</div>",
        point_policy="follow_mouse",
    )


def legend_below(plot: figure, *, hides: bool = False) -> None:
    """Put a plot's legend below it, in a row; a click may hide an entry's part of the plot."""
    legend = plot.legend[0]
    plot.add_layout(legend, "below")
    legend.update(
        orientation="horizontal", padding=0, margin=2, spacing=12, label_text_font_size="11px",
        glyph_height=12, glyph_width=14, click_policy="hide" if hides else "none",
        border_line_color=None, background_fill_alpha=0,
    )  # fmt: skip
