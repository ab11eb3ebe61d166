"""The parts that the plots over time share: axes, lanes, and the text of their hovers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    CustomJSHover,
    DataRange1d,
    FactorRange,
    HoverTool,
    LabelSet,
    PanTool,
    ResetTool,
    SaveTool,
    WheelZoomTool,
)
from bokeh.plotting import figure

from dask_devctx.scheduler.dashboard.batches import Batch
from dask_devctx.scheduler.dashboard.lanes import HOST_PADDING
from dask_devctx.scheduler.dashboard.sources import Texts
from dask_devctx.scheduler.dashboard.theme import Colours

# How many texts a lane has, by the number of lanes: more would hide the plot.
_MOST_TEXTS: Final = {4: 4, 8: 2, 24: 1}
# How much of the past the plots show at first.
WINDOW_S: Final = 30.0
# The labels of the time axis, by the distance of its ticks.
_CLOCK: Final = {
    **dict.fromkeys(("milliseconds", "microseconds"), "%H:%M:%S.%3N"),
    **dict.fromkeys(("seconds", "minsec", "minutes", "hourmin", "hours"), "%H:%M:%S"),
}

# Writes the value of a column: by its format a time, bytes, a rate, or the text with this number.
_WRITE = """
    function time(s) {
        if (!(s > 0)) return "0"
        if (s < 1e-3) return (s * 1e6).toFixed(0) + " µs"
        if (s < 1) return (s * 1e3).toPrecision(3) + " ms"
        if (s < 120) return s.toPrecision(3) + " s"
        return Math.floor(s / 60) + " min " + Math.round(s % 60) + " s"
    }
    function bytes(n) {
        if (n < 0) return "unknown"
        if (n < 1024) return n + " B"
        for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
            n /= 1024
            if (n < 1024 || unit == "TiB") return n.toPrecision(n < 1000 ? 3 : 4) + " " + unit
        }
    }
    if (format == "s") return time(value)
    if (format == "B") return bytes(value)
    if (format == "B/s") return value > 0 ? (value / 1e9).toPrecision(3) + " GB/s" : "not measured"
    if (format == "%") return value < 0 ? "unknown" : (100 * value).toFixed(0) + "%"
    if (format == "span") {
        const {left, right} = source.data
        return time((right[special_vars.index] - left[special_vars.index]) / 1000)
    }
    return texts.data[format][value] ?? ""
"""
_FORMATS: Final = frozenset({"s", "B", "B/s", "%", "span"})


class TimeAxis:
    """The time that several plots of one document show.

    Attributes
    ----------
    range
        Follows the scheduler's clock until somebody pans or zooms; the tool "Reset" makes it follow
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
        """Move the end to a batch's time."""
        times = [batch.ms(batch.now - WINDOW_S), batch.ms(batch.now)]
        self._window.data = {"time": times, "height": [0.5, 0.5]}


class LaneAxis:
    """The lanes that several plots of one document show.

    Parameters
    ----------
    devices
        Whether there are lanes of devices only.
    """

    def __init__(self, *, devices: bool) -> None:
        self._only_devices = devices
        self.range = FactorRange(
            factors=[""], group_padding=HOST_PADDING, factor_padding=0, range_padding=0.1,
            range_padding_units="absolute",
        )  # fmt: skip

    def show(self, batch: Batch) -> None:
        """Name the lanes of a batch."""
        if batch.again:
            lanes = batch.devices if self._only_devices else batch.lanes
            self.range.factors = list(lanes.factors) or [""]


def over_time(name: str, title: str, times: TimeAxis, lanes: LaneAxis, **options: Any) -> figure:
    """Return an empty plot of lanes over time."""
    plot = figure(
        name=name,
        title=title,
        x_range=times.range,
        y_range=lanes.range,
        x_axis_type="datetime",
        tools=[],
        toolbar_location="above",
        sizing_mode="stretch_both",
        output_backend="canvas",
        **options,
    )
    plot.add_tools(
        PanTool(dimensions="width"),
        WheelZoomTool(dimensions="width"),
        BoxZoomTool(dimensions="width"),
        ResetTool(),
        SaveTool(),
    )
    plot.ygrid.grid_line_color = None
    plot.yaxis.major_tick_line_color = None
    plot.xaxis.formatter.update(context=None, strip_leading_zeros=False, **_CLOCK)
    plot.xaxis.update(
        axis_label="time of day", axis_label_text_font_size="11px", axis_label_standoff=0
    )
    return plot


class LaneTexts:
    """A few words at the left of each lane."""

    def __init__(self, plot: figure, colours: Colours) -> None:
        self._source = ColumnDataSource({"y": [], "text": []})
        self._labels = LabelSet(
            x=4,
            x_units="screen",
            y="y",
            text="text",
            source=self._source,
            text_baseline="top",
            text_color=colours.text,
            text_font_size="11px",
            background_fill_color=colours.page,
            background_fill_alpha=0.75,
        )
        plot.add_layout(self._labels)

    def show(self, texts: Mapping[float, Sequence[str]]) -> None:
        """Write texts at the height of each lane: fewer where there are many lanes."""
        most = next((n for lanes, n in _MOST_TEXTS.items() if len(texts) <= lanes), 0)
        shown = [", ".join(several[:most]) for several in texts.values()]
        data = {"y": list(texts), "text": shown} if most else {"y": [], "text": []}
        if data != self._source.data:
            self._source.data = data


def legend_below(plot: figure, *, hides: bool = False) -> None:
    """Put a plot's legend below it, in a row.

    Parameters
    ----------
    plot
        The plot.
    hides
        Whether a click on an entry hides its part of the plot.
    """
    legend = plot.legend[0]
    plot.add_layout(legend, "below")
    legend.update(
        orientation="horizontal", padding=0, margin=2, spacing=12, label_text_font_size="11px",
        glyph_height=12, glyph_width=14, click_policy="hide" if hides else "none",
    )  # fmt: skip


def colour_sample(plot: figure, colour: str, name: str) -> Any:
    """Add an entry to a plot's legend that belongs to no part of the plot; return its renderer."""
    categories = isinstance(plot.x_range, FactorRange)
    nowhere = [-9] if categories else [math.nan]
    return plot.rect(x=nowhere, y=[-9], width=1, height=1, color=colour, legend_label=name)


def hover(
    renderers: Sequence[Any], lines: Mapping[str, str], head: str, texts: Texts | None = None
) -> HoverTool:
    """Return a hover with a bold head and lines of labels and values.

    A value ``@column{s}`` is a time in seconds, ``@column{B}`` a number of bytes, ``@column{B/s}``
    a rate, ``@column{%}`` a share, and ``@left{span}`` the time from ``left`` to ``right``. With
    ``texts``, ``@column{name}`` is the text ``name`` with the column's number. The value
    ``UNKNOWN`` of a column is shown as a word.
    """
    args = {"source": renderers[0].data_source, "texts": None if texts is None else texts.source}
    written = CustomJSHover(code=_WRITE, args=args)
    known = _FORMATS if texts is None else _FORMATS | texts.source.data.keys()
    everything = " ".join([head, *lines.values()])
    columns = {spec for spec, form in re.findall(r"(@\w+){([^}]+)}", everything) if form in known}
    rows = "".join(
        f"<tr><td style='padding-right: 8px'>{label}</td><td>{value}</td></tr>"
        for label, value in lines.items()
    )
    return HoverTool(
        renderers=list(renderers),
        tooltips=f"<div style='max-width: 480px; overflow-wrap: anywhere'><b>{head}</b>"
        f"<table style='font-size: 12px'>{rows}</table></div>",
        formatters=dict.fromkeys(columns, written),
        point_policy="follow_mouse",
    )
