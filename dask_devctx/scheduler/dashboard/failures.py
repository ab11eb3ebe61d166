"""The table of failures and of tasks that ran again."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict
from datetime import datetime
from html import escape
from typing import Final

from bokeh.models import Div, InlineStyleSheet

from dask_devctx.scheduler.dashboard.batches import Batch
from dask_devctx.scheduler.dashboard.lanes import Lanes
from dask_devctx.scheduler.dashboard.theme import Colours
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
td:nth-child(4) {{ min-width: 9em; }}
td:nth-child(-n+2) {{ white-space: nowrap; overflow-wrap: normal; }}
td:nth-child(3) {{ min-width: 8em; }}
"""


class FailuresTable:
    """The latest failures, the last one at the top, and how many of each kind there were.

    Attributes
    ----------
    root
        The table.
    """

    def __init__(self, colours: Colours) -> None:
        self._latest: deque[tuple[str, Incident]] = deque(maxlen=_MOST)
        self._counts: Counter[str] = Counter()
        self.root = Div(
            name="device_failures",
            text=_html(self._latest, self._counts, Lanes()),
            sizing_mode="stretch_both",
            stylesheets=[InlineStyleSheet(css=_STYLE.format(**asdict(colours)))],
        )

    def show(self, batch: Batch) -> None:
        """Show the failures of a batch."""
        if batch.again:
            self._latest.clear()
            self._counts.clear()
        if batch.again or batch.incidents:
            self._latest.extend(sorted(batch.incidents, key=lambda pair: pair[1].time))
            self._counts.update(row.what for _, row in batch.incidents)
            self.root.text = _html(self._latest, self._counts, batch.lanes)


def _html(latest: deque[tuple[str, Incident]], counts: Counter[str], lanes: Lanes) -> str:
    sums = [f"{n} × {_NAMES.get(what, what)}" for what, n in counts.most_common()]
    title = f"<h3>Failures and retries: {escape(', '.join(sums) or 'none')}</h3>"
    if not latest:
        return title
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(host, row, lanes)) + "</tr>"
        for host, row in reversed(latest)
    )
    head = "".join(f"<th>{name}</th>" for name in ("time", "device", "problem", "task", "reason"))
    return f"{title}<table><tr>{head}</tr>{rows}</table>"


def _cells(host: str, row: Incident, lanes: Lanes) -> tuple[str, ...]:
    when = datetime.fromtimestamp(row.time).strftime("%H:%M:%S") if row.time else ""
    device = "" if row.uuid is None else lanes.label(host, row.uuid)
    key = "" if row.key is None else str(row.key)
    return when, device, _NAMES.get(row.what, row.what), key[:200], row.text[:500]
