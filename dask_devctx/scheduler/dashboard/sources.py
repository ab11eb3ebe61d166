"""The data of the plots, in a form that Bokeh sends to browsers at little cost.

Bokeh sends an array of numbers as it is, and looks at each text. So the plots have few columns of
text: a name that many rows share is sent once, and the rows have its number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from bokeh.models import ColumnDataSource

# The most rows of one kind that a browser is given: 1,000 a second for longer than the plots show.
MOST_ROWS: Final = 40_000
# The types of columns that are not float.
_TYPES: Final = {"color": np.uint32}


class Rows:
    """Rows for a plot: the first column names are of numbers, ``text`` has the others.

    Attributes
    ----------
    source
        Their Bokeh source.
    """

    def __init__(self, numbers: str, text: str = "") -> None:
        self._numbers, self._text = numbers.split(), text.split()
        self.source = ColumnDataSource(self._columns(()))

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows; the oldest ones leave."""
        added = list(rows)[-MOST_ROWS:]
        if added:
            self.source.stream(self._columns(added), MOST_ROWS)

    def replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace all rows by others."""
        shown = list(rows)
        if shown or len(self.source.data[self._numbers[0]]):
            self.source.data = self._columns(shown)

    def _columns(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        columns: dict[str, Any] = {
            name: np.array([row[name] for row in rows], dtype=_TYPES.get(name, float))
            for name in self._numbers
        }
        return columns | {name: [row[name] for row in rows] for name in self._text}


class Names:
    """Numbers for names that many rows share.

    Attributes
    ----------
    source
        The names, in the order of their numbers.
    """

    def __init__(self) -> None:
        self.source = ColumnDataSource({"name": []})
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the number of a name, which is sent if it is a new one."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers)
            self.source.stream({"name": [name]})
        return number


def rgba(color: str) -> int:
    """Return a colour, ``"#rrggbb"``, as a number.

    Examples
    --------
    >>> hex(rgba("#ff8000"))
    '0xff8000ff'
    """
    return int(color[1:7], 16) << 8 | 0xFF
