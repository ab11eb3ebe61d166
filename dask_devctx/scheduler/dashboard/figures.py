"""The parts that the plots over time share: axes, lanes, and the text of their hovers."""

from __future__ import annotations

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
from dask_devctx.scheduler.dashboard.sources import Names
from dask_devctx.scheduler.dashboard.theme import Colours

# How many texts a lane has, by the number of lanes: more would hide the plot.
_MOST_TEXTS: Final = {4: 4, 8: 2, 24: 1}
# How much of the past the plots show at first.
WINDOW_S: Final = 30.0

_SECONDS = """
    const s = Number(value)
    if (!(s > 0)) return "0"
    if (s < 1e-3) return (s * 1e6).toFixed(0) + " µs"
    if (s < 1) return (s * 1e3).toPrecision(3) + " ms"
    if (s < 120) return s.toPrecision(3) + " s"
    return Math.floor(s / 60) + " min " + Math.round(s % 60) + " s"
"""
_BYTES = """
    let n = Number(value)
    if (!Number.isFinite(n)) return "unknown"
    if (n < 1024) return n + " B"
    for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
        n /= 1024
        if (n < 1024 || unit == "TiB") return n.toPrecision(n < 1000 ? 3 : 4) + " " + unit
    }
"""


_RATE = """
    const rate = Number(value) / 1e9
    return Number.isFinite(rate) && rate > 0 ? rate.toPrecision(3) + " GB/s" : "not measured"
"""
_NAME = """
    return names.data.name[value] ?? ""
"""


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


def over_time(
    name: str, title: str, times: TimeAxis, lanes: LaneAxis, colours: Colours, **options: Any
) -> figure:
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
    plot.xaxis.formatter.context = None
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
            text_baseline="middle",
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


def legend_below(plot: figure) -> None:
    """Put a plot's legend below it, in a row."""
    legend = plot.legend[0]
    plot.add_layout(legend, "below")
    legend.update(
        orientation="horizontal", padding=0, margin=2, spacing=12, label_text_font_size="11px",
        glyph_height=12, glyph_width=14, click_policy="hide",
    )  # fmt: skip


def hover(
    renderers: Sequence[Any], lines: Mapping[str, str], head: str, names: Names | None = None
) -> HoverTool:
    """Return a hover with a bold head and lines of labels and values.

    A value ``@column{s}`` is a time in seconds, ``@column{B}`` a number of bytes, ``@column{B/s}``
    a rate, and ``@column{name}`` the number of a name.
    """
    kinds = {"{s}": _SECONDS, "{B}": _BYTES, "{B/s}": _RATE, "{name}": _NAME}
    made = {
        kind: CustomJSHover(code=code, args={} if names is None else {"names": names.source})
        for kind, code in kinds.items()
    }
    formatters: dict[str, CustomJSHover] = {}

    def formatted(text: str) -> str:
        for column, kind in re.findall(r"(@\w+)({[^}]+})", text):
            if kind in made:
                formatters[column] = made[kind]
                text = text.replace(column + kind, f"{column}{{custom}}")
        return text

    rows = "".join(
        f"<tr><td style='padding-right: 8px'>{label}</td><td>{formatted(value)}</td></tr>"
        for label, value in lines.items()
    )
    return HoverTool(
        renderers=list(renderers),
        tooltips=f"<div style='max-width: 480px; overflow-wrap: anywhere'><b>{formatted(head)}</b>"
        f"<table style='font-size: 12px'>{rows}</table></div>",
        formatters=formatters,
        point_policy="follow_mouse",
    )
