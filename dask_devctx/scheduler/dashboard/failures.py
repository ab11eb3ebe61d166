"""The table of failures and of tasks that ran again."""

from __future__ import annotations

from collections import Counter, deque
from datetime import datetime
from html import escape
from typing import Final

from bokeh.models import Div, InlineStyleSheet

from dask_devctx.scheduler.dashboard.feed import Batch
from dask_devctx.scheduler.dashboard.figures import Colours
from dask_devctx.scheduler.dashboard.lanes import Lanes
from dask_devctx.scheduler.rows import Incident

_MOST: Final = 200
_NAMES: Final = {
    "error": "failed",
    "out-of-memory": "out of memory, runs again",
    "device-failed": "device failed",
    "refused": "got no device",
    "lost": "history lost",
}
_STYLE: Final = """
:host {{ overflow: auto; color: {text}; font: 13px Helvetica, Arial, sans-serif; }}
h3 {{ font-size: 13px; margin: 4px 10px; }}
.bk-clearfix {{ display: block; }}
table {{ border-collapse: collapse; width: 100%; }}
th {{ color: {faint}; font-weight: normal; text-align: left; position: sticky; top: 0;
      background: {page}; }}
th, td {{ padding: 3px 10px; border-bottom: 1px solid {grid}; vertical-align: top;
          overflow-wrap: anywhere; }}
td:nth-child(3), td:nth-child(4) {{ min-width: 8em; }}
th, td:nth-child(-n+2) {{ white-space: nowrap; overflow-wrap: normal; }}
"""


class FailuresTable:
    """The latest failures, the last one at the top, and how many of each kind there were."""

    def __init__(self, colours: Colours) -> None:
        self._latest: deque[tuple[str, Incident]] = deque(maxlen=_MOST)
        self._counts: Counter[str] = Counter()
        self.root = Div(
            name="device_failures",
            sizing_mode="stretch_both",
            stylesheets=[InlineStyleSheet(css=_STYLE.format(**colours._asdict()))],
        )

    def show(self, batch: Batch) -> None:
        """Show the failures of a batch."""
        if batch.again:
            self._latest.clear()
            self._counts.clear()
        if batch.again or batch.incidents or not self.root.text:
            self._latest.extend(sorted(batch.incidents, key=lambda pair: pair[1].time))
            self._counts.update(row.what for _, row in batch.incidents)
            self.root.text = self._html(batch.lanes)

    def _html(self, lanes: Lanes) -> str:
        sums = [f"{n} × {_NAMES.get(what, what)}" for what, n in self._counts.most_common()]
        title = f"<h3>Failures and retries: {escape(', '.join(sums) or 'none')}</h3>"
        if not self._latest:
            return title
        cells = [_cells(host, row, lanes) for host, row in reversed(self._latest)]
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells)
        names = ("time", "device", "problem", "task", "reason")
        head = "".join(f"<th>{name}</th>" for name in names)
        return f"{title}<table><tr>{head}</tr><tr>{'</tr><tr>'.join(rows)}</tr></table>"


def _cells(host: str, row: Incident, lanes: Lanes) -> tuple[str, ...]:
    when = datetime.fromtimestamp(row.time).strftime("%H:%M:%S") if row.time else ""
    device = "" if row.uuid is None else lanes.label(host, row.uuid)
    key = "" if row.key is None else str(row.key)
    return when, device, _NAMES.get(row.what, row.what), key[:200], row.text[:500]
