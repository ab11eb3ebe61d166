"""The tables: each device as it is now, the transfers between devices, and the failures."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from typing import Final

from bokeh.models import Div, InlineStyleSheet
from dask.utils import format_bytes
from distributed import Scheduler

from dask_devctx.errors import counted
from dask_devctx.scheduler.dashboard.feed import Batch, Interval
from dask_devctx.scheduler.dashboard.figures import STALE_S, transport
from dask_devctx.scheduler.rows import Incident, Transfer, added, transfers

_STYLE: Final = """
:host { overflow: auto; font: 13px Helvetica, Arial, sans-serif; }
h3 { font-size: 13px; margin: 4px 10px; }
.bk-clearfix { display: block; }
table { border-collapse: collapse; width: 100%; }
th { color: #888888; font-weight: normal; text-align: left; position: sticky; top: 0;
     background: var(--page, white); white-space: nowrap; }
th, td { padding: 3px 10px; border-bottom: 1px solid #88888855; vertical-align: top; }
td { min-width: 4em; max-width: 32em; overflow-wrap: anywhere; white-space: pre-line; }
td:first-child { white-space: nowrap; }
"""


class Table:
    """A table of texts below a title."""

    def __init__(self, name: str) -> None:
        style = InlineStyleSheet(css=_STYLE)
        self.root = Div(name=name, sizing_mode="stretch_both", stylesheets=[style])

    def write(self, title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Replace the content; without rows, there is the title alone."""
        cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
        text = f"<h3>{escape(title)}</h3>"
        if cells:
            names = "".join(f"<th>{escape(name)}</th>" for name in head)
            text += f"<table><tr>{names}</tr><tr>{'</tr><tr>'.join(cells)}</tr></table>"
        if text != self.root.text:
            self.root.text = text


# -- each device at a glance

_HEAD: Final = (
    *("device", "computes", "has a task", "memory used", "held by dask", "spilled", "power"),
    *("temperature", "runs now", "queued"),
)


class Glance(Table):
    """A row for each device: its load, memory, power and temperature, its tasks and its queue."""

    def show(self, batch: Batch) -> None:
        """Show the latest samples."""
        uuids = [uuid for uuid in reversed(batch.lanes.names) if uuid in batch.latest]
        rows = (_device(batch.lanes.name(uuid), batch.latest[uuid], batch.now) for uuid in uuids)
        title = counted(len(uuids), "device") if uuids else "No device has answered yet"
        samples = [batch.latest[uuid].after for uuid in uuids]
        if samples and all(s.utilization is None and s.power_w is None for s in samples):
            title += f"; NVML has no numbers for {'it' if len(uuids) == 1 else 'them'}"
        self.write(title, _HEAD, rows)


def _device(name: str, one: Interval, now: float) -> Sequence[str]:
    after = one.after
    tasks = f"{after.running} × {', '.join(after.tasks_now)}" if after.running else "idle"
    if now - after.time > STALE_S:
        tasks = f"no news for {now - after.time:.0f} s"
    used = "-"
    if after.memory_total and after.memory_free is not None:
        used = format_bytes(after.memory_total - after.memory_free)
        used += f" of {format_bytes(after.memory_total)}"
    limit = after.device_memory_limit
    held = format_bytes((after.memory_held or 0) + (after.memory_copies or 0))
    return (
        name,
        "-" if after.utilization is None else f"{after.utilization:.0%}",
        f"{one.occupied:.0%}",
        used,
        held if limit is None else f"{held} of {format_bytes(limit)}",
        format_bytes(after.memory_spilled or 0),
        "-" if after.power_w is None else f"{after.power_w:.0f} W",
        "-" if after.temperature is None else f"{after.temperature:.0f} °C",
        tasks,
        str(after.queued),
    )


# -- transfers


class TransferMatrix(Table):
    """The bytes and the rate from each source, in a row, to each target, in a column."""

    def __init__(self, name: str, scheduler: Scheduler) -> None:
        super().__init__(name)
        self._scheduler = scheduler

    def show(self, batch: Batch) -> None:
        """Show the transfers that the workers' heartbeats tell of."""
        workers = self._scheduler.workers
        names = {address: f"host memory of {ws.name}" for address, ws in workers.items()}
        names |= batch.lanes.names
        totals: dict[tuple[str, str, str], Transfer] = {}
        for row in (row for ws in workers.values() for row in transfers(ws.metrics)):
            source, target, way = row.ends
            ends = names.get(source, source), names.get(target, target), way
            totals[ends] = added(row, totals[ends]) if ends in totals else row
        cells: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for (source, target, way), total in sorted(totals.items()):
            rate = "" if total.rate is None else f", {total.rate / 1e9:.3g} GB/s"
            cells[source, target].append(f"{format_bytes(total.nbytes)} {transport(way)[0]}{rate}")
        order = {name: -n for n, name in enumerate(batch.lanes.names.values())}
        sources, targets = (
            sorted({pair[side] for pair in cells}, key=lambda end: (order.get(end, 1), end))
            for side in (0, 1)
        )
        nbytes = format_bytes(sum(total.nbytes for total in totals.values()))
        copies = sum(total.copies for total in totals.values())
        self.write(
            f"Transfers: {nbytes} in {copies} values" if totals else "Transfers: none so far",
            ("from", *(f"to {target}" for target in targets)),
            ([one, *("\n".join(cells.get((one, to), ())) for to in targets)] for one in sources),
        )


# -- failures


class FailuresTable(Table):
    """The latest failures, the last one at the top, and how many of each kind there were."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._latest: deque[Incident] = deque(maxlen=200)
        self._counts: Counter[str] = Counter()

    def show(self, batch: Batch) -> None:
        """Show the failures of a batch."""
        if batch.again:
            self._latest.clear()
            self._counts.clear()
        self._latest.extend(sorted(batch.incidents, key=lambda row: row.time))
        self._counts.update(row.what for row in batch.incidents)
        sums = [f"{n} × {what}" for what, n in self._counts.most_common()]
        rows = (
            (
                datetime.fromtimestamp(row.time).strftime("%H:%M:%S"),
                batch.lanes.name(row.uuid),
                row.what,
                "" if row.key is None else str(row.key)[:200],
                row.text[:500],
            )
            for row in reversed(self._latest)
        )
        head = ("time", "device", "problem", "task", "reason")
        self.write(f"Failures and retries: {', '.join(sums) or 'none'}", head, rows)
