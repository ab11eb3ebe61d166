"""The colours of the plots, on a light page and on a dark one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from bokeh.document import Document
from bokeh.themes import Theme


@dataclass(frozen=True)
class Colours:
    """The colours of one theme; the plots' own colours are readable on both."""

    name: str
    page: str
    text: str
    faint: str
    grid: str
    lane: str
    failed: str


LIGHT: Final = Colours("light", "#fafafa", "#222222", "#666666", "#dddddd", "#eeeeee", "#000000")
DARK: Final = Colours("dark", "#1c1f22", "#e6e6e6", "#a0a4a8", "#3a3f44", "#26292d", "#ffffff")

# Memory by its kinds, from the bottom of a lane to the top.
HELD: Final = "#3a7ebf"
COPIES: Final = "#8fc1e8"
REST: Final = "#93a3b1"
OTHERS: Final = "#b0a08f"
SPILLED: Final = "#e08a1e"
LIMIT: Final = "#d62728"
# Use of a device.
OCCUPIED: Final = "#8fa8c4"
COMPUTE: Final = "#76b900"
BANDWIDTH: Final = "#9467bd"
# Copies, by their way, and the words for it.
WAYS: Final[Mapping[str, str]] = {
    "peer": "#2ca02c",
    "ipc": "#17a2b8",
    "host": "#c2449b",
    "spill": SPILLED,
}
WAY_NAMES: Final[Mapping[str, str]] = {
    "peer": "within a worker",
    "ipc": "between workers",
    "host": "through the host",
    "spill": "spilled, or back",
}
COPY: Final = "#7f7f7f"
FAILED: Final = "#e31a1c"


def chosen(document: Document) -> Colours:
    """Return the theme that a page was asked for: ``?theme=dark``, or light."""
    context = document.session_context
    arguments = {} if context is None else context.request.arguments
    (wanted,) = arguments.get("theme", [b"light"])[:1]
    return DARK if wanted == b"dark" else LIGHT


def bokeh_theme(colours: Colours) -> Theme:
    """Return the theme for all of a document's plots."""
    text = {"text_color": colours.text}
    axis: dict[str, Any] = {
        "axis_label_text_color": colours.text,
        "axis_label_text_font_style": "normal",
        "major_label_text_color": colours.text,
        "axis_line_color": colours.grid,
        "major_tick_line_color": colours.grid,
        "minor_tick_line_color": None,
    }
    return Theme(
        json={
            "attrs": {
                "Plot": {
                    "background_fill_color": None,
                    "border_fill_color": None,
                    "outline_line_color": None,
                    "min_border_left": 10,
                    "min_border_right": 10,
                },
                "Axis": axis,
                "CategoricalAxis": {
                    "group_text_color": colours.text,
                    "subgroup_text_color": colours.text,
                    "separator_line_color": colours.grid,
                },
                "Grid": {"grid_line_color": colours.grid},
                "Title": text,
                "Legend": {
                    "label_text_color": colours.text,
                    "background_fill_alpha": 0,
                    "border_line_color": None,
                },
                "Toolbar": {"logo": None},
            }
        }
    )
