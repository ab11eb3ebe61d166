"""The table of failures and of tasks that ran again."""

from __future__ import annotations

from collections import Counter, deque
from datetime import datetime
from typing import Final

from dask_devctx.scheduler.dashboard.feed import Batch
from dask_devctx.scheduler.dashboard.figures import Colours, Table
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
td:nth-child(3), td:nth-child(4) { min-width: 8em; }
td:nth-child(-n+2) { white-space: nowrap; overflow-wrap: normal; }
"""


class FailuresTable(Table):
    """The latest failures, the last one at the top, and how many of each kind there were."""

    def __init__(self, colours: Colours) -> None:
        super().__init__("device_failures", colours, _STYLE)
        self._latest: deque[tuple[str, Incident]] = deque(maxlen=_MOST)
        self._counts: Counter[str] = Counter()

    def show(self, batch: Batch) -> None:
        """Show the failures of a batch."""
        if batch.again:
            self._latest.clear()
            self._counts.clear()
        self._latest.extend(sorted(batch.incidents, key=lambda pair: pair[1].time))
        self._counts.update(row.what for _, row in batch.incidents)
        sums = [f"{n} × {_NAMES.get(what, what)}" for what, n in self._counts.most_common()]
        self.write(
            f"Failures and retries: {', '.join(sums) or 'none'}",
            ("time", "device", "problem", "task", "reason"),
            (_cells(host, row, batch.lanes) for host, row in reversed(self._latest)),
        )


def _cells(host: str, row: Incident, lanes: Lanes) -> tuple[str, ...]:
    when = datetime.fromtimestamp(row.time).strftime("%H:%M:%S") if row.time else ""
    device = "" if row.uuid is None else lanes.label(host, row.uuid)
    key = "" if row.key is None else str(row.key)
    return when, device, _NAMES.get(row.what, row.what), key[:200], row.text[:500]
