"""The parts that the plots share: colours, axes, rows, and the text under the mouse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

import numpy as np
from bokeh.models import ColumnDataSource, DataRange1d, FactorRange, HoverTool
from bokeh.plotting import figure

from dask_devctx.scheduler.dashboard.feed import Batch

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

FAILED: Final = "#e31a1c"
SPILLED: Final = "#e08a1e"
# The words for the transports of copies, and their colours.
TRANSPORTS: Final[Mapping[str, tuple[str, str]]] = {
    "peer": ("within a worker", "#2ca02c"),
    "ipc": ("between workers", "#17a2b8"),
    "host": ("through the host", "#c2449b"),
    "spill": ("spilled, or back", SPILLED),
}
# The columns of a rectangle's sides.
BOX: Final = {name: name for name in ("left", "right", "bottom", "top")}


def transport(name: str) -> tuple[str, str]:
    """Return the words for a transport, and its colour."""
    return TRANSPORTS.get(name, (f"by {name}", "#7f7f7f"))


class Axes:
    """The time and the lanes that the plots of one document share.

    The time follows the scheduler's clock until somebody pans or zooms; the tool "Reset" makes it
    follow again.
    """

    def __init__(self) -> None:
        self._times = DataRange1d(
            follow="end", follow_interval=1000 * WINDOW_S, range_padding=0, only_visible=False
        )
        self._lanes = FactorRange(factors=[""], factor_padding=0)
        self._window = ColumnDataSource({"time": [0, 1000 * WINDOW_S], "height": [0.5, 0.5]})

    def plot(self, name: str, title: str) -> figure:
        """Return an empty plot of lanes over time."""
        plot = figure(
            name=name, title=title, x_range=self._times, y_range=self._lanes,
            x_axis_type="datetime", tools="xpan,xwheel_zoom,xbox_zoom,reset,save",
            toolbar_location="above", sizing_mode="stretch_both", outline_line_color=None,
            output_backend="canvas",
        )  # fmt: skip
        plot.toolbar.logo = None
        plot.axis.major_tick_line_color = None
        plot.ygrid.grid_line_color = None
        plot.xaxis.formatter.update(context=None, strip_leading_zeros=False, **_CLOCK)
        plot.xaxis.axis_label = "time of day"
        mark = plot.scatter(x="time", y="height", source=self._window, alpha=0, size=0)
        self._times.renderers = [mark]  # the time ends at the latest batch
        return plot

    def show(self, batch: Batch) -> None:
        times = [batch.ms(batch.now - WINDOW_S), batch.ms(batch.now)]
        self._window.data = {"time": times, "height": [0.5, 0.5]}
        if batch.again:
            self._lanes.factors = list(batch.lanes.names.values()) or [""]


class Rows:
    """The rows of a part of a plot, with columns of numbers and of texts. The oldest rows leave."""

    def __init__(self, numbers: str, texts: str = "") -> None:
        self._numbers, self._texts = numbers.split(), texts.split()
        self.source = ColumnDataSource(self._columns(()))

    def add(self, rows: Iterable[Mapping[str, Any]], *, again: bool) -> None:
        """Add rows, or replace all others by them."""
        added = list(rows)[-MOST_ROWS:]
        if again:
            self.source.data = self._columns(added)
        elif added:
            self.source.stream(self._columns(added), MOST_ROWS)

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


def legend_below(plot: figure, *, click: str = "none") -> None:
    """Put a plot's legend below it, in a row; a click may hide an entry's part of the plot."""
    legend = plot.legend[0]
    plot.add_layout(legend, "below")
    legend.update(
        orientation="horizontal", padding=0, margin=2, spacing=12, label_text_font_size="11px",
        glyph_height=12, glyph_width=14, click_policy=click, border_line_color=None,
    )  # fmt: skip
