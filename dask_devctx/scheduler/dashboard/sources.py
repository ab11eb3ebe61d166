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
# A number that is not known: Bokeh writes "NaN" to people.
UNKNOWN: Final = -1.0
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


class Texts:
    """Numbers for texts that many rows share.

    Parameters
    ----------
    columns
        The names of the texts of a row.

    Attributes
    ----------
    source
        The texts, in the order of their numbers.
    """

    def __init__(self, columns: str) -> None:
        self._columns = columns.split()
        self.source = ColumnDataSource({name: [] for name in self._columns})
        self._numbers: dict[tuple[str, ...], int] = {}
        self._new: list[tuple[str, ...]] = []

    def number(self, *texts: str) -> int:
        """Return the number of some texts, which :meth:`send` sends if they are new."""
        number = self._numbers.get(texts)
        if number is None:
            number = self._numbers[texts] = len(self._numbers)
            self._new.append(texts)
        return number

    def send(self) -> None:
        """Send the new texts."""
        if self._new:
            columns = zip(*self._new, strict=True)
            self.source.stream(dict(zip(self._columns, map(list, columns), strict=True)))
            self._new.clear()


def rgba(color: str) -> int:
    """Return a colour, ``"#rrggbb"``, as a number.

    Examples
    --------
    >>> hex(rgba("#ff8000"))
    '0xff8000ff'
    """
    return int(color[1:7], 16) << 8 | 0xFF
