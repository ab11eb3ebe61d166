"""The parts that the plots share: colours, axes, rows, and the text under the mouse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, CustomJS, DataRange1d, Div, FactorRange, HoverTool
from bokeh.models.widgets import RadioButtonGroup
from bokeh.plotting import figure
from markupsafe import Markup

from dask_devctx.scheduler.dashboard.feed import Batch

# How much of the past the plots can show; at first the least.
WINDOWS_S: Final = {"last 30 s": 30.0, "2 min": 120.0, "10 min": 600.0, "1 h": 3600.0}
WINDOW_S: Final = WINDOWS_S["last 30 s"]
# The most rows of one kind that a browser is given: 1,000 a second for longer than the plots show.
MOST_ROWS: Final = 40_000
# The labels of the time axis, by the distance of its ticks.
_CLOCK: Final = {
    **dict.fromkeys(("milliseconds", "microseconds"), "%H:%M:%S.%3N"),
    **dict.fromkeys(("seconds", "minsec", "minutes", "hourmin", "hours"), "%H:%M:%S"),
}

GREY: Final = "#88888855"
SPILLED: Final = "#e08a1e"
# The words for the transports of copies, and their colours.
TRANSPORTS: Final[Mapping[str, tuple[str, str]]] = {
    "peer": ("within a worker", "#2ca02c"),
    "ipc": ("between workers", "#17a2b8"),
    "host": ("through the host", "#c2449b"),
    "spill": ("spilled, or back", SPILLED),
}
TEMPLATES: Final = Path(__file__).parent / "templates"
STYLE: Final = (TEMPLATES / "parts.css").read_text()


def transport(name: str) -> tuple[str, str]:
    """Return the words for a transport, and its colour."""
    return TRANSPORTS.get(name, (f"by {name}", "#7f7f7f"))


class Axes:
    """The time and the lanes that the plots of one document share.

    The time follows the scheduler's clock until somebody pans or zooms; the tool "Reset", and the
    buttons that choose how much of it is shown, make it follow again.
    """

    def __init__(self) -> None:
        self._times = DataRange1d(range_padding=0, only_visible=False)
        self._lanes = FactorRange(factors=[""], factor_padding=0)
        self._window = ColumnDataSource({"time": [0, 1000 * WINDOW_S], "height": [0.5, 0.5]})
        self.root = RadioButtonGroup(labels=[*WINDOWS_S], active=0, stylesheets=[STYLE])
        follow = CustomJS(args={"times": self._times}, code="times.reset()")
        self.root.js_on_change("active", follow)

    def plot(self, title: str) -> figure:
        """Return an empty plot of lanes over time."""
        plot = figure(
            title=title, x_range=self._times, y_range=self._lanes,
            x_axis_type="datetime", tools="xpan,xwheel_zoom,xbox_zoom,reset,save",
            toolbar_location="above", sizing_mode="stretch_both", outline_line_color=None,
            background_fill_color=None, border_fill_color=None, output_backend="canvas",
        )  # fmt: skip
        plot.toolbar.logo = None
        plot.axis.major_tick_line_color = None
        plot.ygrid.grid_line_color = None
        plot.xaxis.formatter.update(context=None, strip_leading_zeros=False, **_CLOCK)
        mark = plot.scatter(x="time", y="height", source=self._window, alpha=0, size=0)
        self._times.renderers = [mark]  # the time ends at the latest batch
        return plot

    @property
    def view(self) -> tuple[float, float]:
        """The first and the last time that are shown, as the browser told it last."""
        first, last = self._times.start, self._times.end
        return (first, last) if first < last else tuple(self._window.data["time"])

    def show(self, batch: Batch) -> None:
        """Move the time to a batch's."""
        window_s = [*WINDOWS_S.values()][self.root.active]
        times = [batch.ms(batch.now - window_s), batch.ms(batch.now)]
        self._window.data = {"time": times, "height": [0.5, 0.5]}
        if batch.again:
            self._lanes.factors = list(batch.lanes.names.values()) or [""]


class Rows:
    """The rows of a part of a plot, with columns of numbers and of texts. The oldest rows leave."""

    def __init__(
        self, numbers: str = "left right bottom top", texts: str = "kind color about"
    ) -> None:
        self._numbers, self._texts = numbers.split(), texts.split()
        self.source = ColumnDataSource(self._columns(()))

    def add(self, rows: Iterable[Mapping[str, Any]], *, again: bool) -> None:
        """Add rows, or replace all others by them."""
        added = list(rows)[-MOST_ROWS:]
        if again:
            self.source.data = self._columns(added)
        elif added:
            self.source.stream(self._columns(added), MOST_ROWS)

    def inside(self, view: tuple[float, float]) -> Any:
        """Return the numbers of the rows in a range of time."""
        left, right = self.source.data["left"], self.source.data["right"]
        return np.flatnonzero((right >= view[0]) & (left <= view[1]))

    def colours(self, view: tuple[float, float]) -> list[tuple[str, str]]:
        """Return the kinds of the rows in a range of time, with their colours, by name."""
        kinds, colours = self.source.data["kind"], self.source.data["color"]
        return sorted({(kinds[n], colours[n]) for n in self.inside(view)})

    def _columns(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        # Bokeh sends an array of numbers unchanged, and looks at each text.
        numbers = {name: np.array([row[name] for row in rows], float) for name in self._numbers}
        return {**numbers, **{name: [row[name] for row in rows] for name in self._texts}}


def about(head: str, lines: Mapping[str, str]) -> str:
    """Return what the mouse shows of a row, as HTML: a bold head, and lines of names and values."""
    row = Markup("<tr><td style='padding-right: 8px'>{}</td><td>{}</td></tr>")
    rows = Markup("").join(row.format(*line) for line in lines.items())
    return Markup("<b>{}</b><table style='font-size: 12px'>{}</table>").format(head, rows)


def bar(
    batch: Batch,
    times: tuple[float, float],
    sides: tuple[float, float],
    kind: tuple[str, str],
    head: str,
    lines: Mapping[str, str],
) -> dict[str, Any]:
    """Return a row: a rectangle of a kind, which is a name and a colour, with its :func:`about`."""
    left, right = map(batch.ms, times)
    box = {"left": left, "right": right, "bottom": sides[0], "top": sides[1]}
    return {**box, "kind": kind[0], "color": kind[1], "about": about(head, lines)}


class LanesPlot:
    """A plot of lanes over time, and below it a legend of what it shows."""

    def __init__(self, title: str, axes: Axes) -> None:
        self.axes, self.figure = axes, axes.plot(title)
        self._legend = Div(sizing_mode="stretch_width", stylesheets=[STYLE], css_classes=["legend"])
        self.root = column(self.figure, self._legend, sizing_mode="stretch_both")

    def boxes(self, rows: Rows, bottom: str = "bottom", top: str = "top", **look: Any) -> Any:
        """Show a rectangle for each row."""
        return self.figure.quad("left", "right", top, bottom, source=rows.source, **look)

    def hover(self, *renderers: Any) -> None:
        """Show the column ``about`` of the row under the mouse."""
        tip = "<div style='max-width: 480px; overflow-wrap: anywhere'>@about{safe}</div>"
        tool = HoverTool(renderers=[*renderers], tooltips=tip, point_policy="follow_mouse")
        self.figure.add_tools(tool)

    def explain(self, colours: Mapping[str, str]) -> None:
        """Show words with their colours in the legend."""
        entry = Markup("<span><i style='background: {}'></i>{}</span> ")
        entries = (entry.format(colour, words) for words, colour in colours.items())
        self._legend.text = Markup("").join(entries)
