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
from dask_devctx.scheduler.dashboard.feed import Batch, Interval, Lanes
from dask_devctx.scheduler.dashboard.figures import STALE_S, TRANSPORTS, Colours
from dask_devctx.scheduler.history import DeviceHistory
from dask_devctx.scheduler.rows import Incident, Transfer, added
from dask_devctx.scheduler.rows import transfers as moved

_TABLE: Final = """
:host {{ overflow: auto; color: {text}; font: 13px Helvetica, Arial, sans-serif; }}
h3 {{ font-size: 13px; margin: 4px 10px; }}
.bk-clearfix {{ display: block; }}
table {{ border-collapse: collapse; width: 100%; }}
th {{ color: {faint}; font-weight: normal; text-align: left; position: sticky; top: 0;
      background: {page}; }}
th, td {{ padding: 3px 10px; border-bottom: 1px solid {grid}; vertical-align: top;
          overflow-wrap: anywhere; }}
th {{ white-space: nowrap; }}
"""


class Table:
    """A table of texts below a title; ``style`` adds to its CSS."""

    def __init__(self, name: str, colours: Colours, style: str = "") -> None:
        css = _TABLE.format(**colours._asdict()) + style
        self.root = Div(
            name=name, sizing_mode="stretch_both", stylesheets=[InlineStyleSheet(css=css)]
        )

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
_GLANCE_STYLE: Final = "td:not(:nth-child(9)) { white-space: nowrap; }"


class Glance(Table):
    """A row for each device: its load, memory, power and temperature, its tasks and its queue."""

    def __init__(self, colours: Colours) -> None:
        super().__init__("device_glance", colours, _GLANCE_STYLE)

    def show(self, batch: Batch) -> None:
        """Show the latest samples."""
        places = reversed(batch.devices.positions)
        latest = [one for place in places if (one := batch.latest.get(place)) is not None]
        running, queued = (
            sum(getattr(one.after, name) for one in latest) for name in ("running", "queued")
        )
        state = (
            f"{counted(running, 'task')} running, {queued} queued" if running or queued else "idle"
        )
        title = (
            f"{counted(len(latest), 'device')}: {state}" if latest else "No device has answered yet"
        )
        self.write(title, _HEAD, (_device(one, batch.now) for one in latest))


def _device(one: Interval, now: float) -> Sequence[str]:
    after = one.after
    tasks = f"{after.running} × {', '.join(after.tasks_now)}" if after.running else "idle"
    if now - after.time > STALE_S:
        tasks = f"no news for {now - after.time:.0f} s"
    used = "-"
    if after.memory_total and after.memory_free is not None:
        used = format_bytes(after.memory_total - after.memory_free)
        used += f" of {format_bytes(after.memory_total)}"
    limit = "" if after.device_memory_limit is None else " of "
    limit += format_bytes(after.device_memory_limit) if limit else ""
    return (
        one.lane,
        _percent(after.utilization),
        _percent(one.occupied),
        used,
        format_bytes((after.memory_held or 0) + (after.memory_copies or 0)) + limit,
        format_bytes(after.memory_spilled or 0),
        "-" if after.power_w is None else f"{after.power_w:.0f} W",
        "-" if after.temperature is None else f"{after.temperature:.0f} °C",
        tasks,
        str(after.queued),
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


# -- transfers


class TransferMatrix(Table):
    """A cell for each pair of devices, with a line for each transport between them."""

    def __init__(self, scheduler: Scheduler, colours: Colours) -> None:
        super().__init__("device_transfers", colours, "td { white-space: pre-line; }")
        self._scheduler = scheduler

    def show(self, batch: Batch) -> None:
        """Show the transfers that the workers' heartbeats tell of."""
        totals = transfers(self._scheduler, batch.lanes)
        cells: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for (source, target, transport), total in sorted(totals.items()):
            rate = "" if total.rate is None else f", {total.rate / 1e9:.3g} GB/s"
            way = TRANSPORTS.get(transport, transport)
            cells[source, target].append(f"{format_bytes(total.nbytes)} {way}{rate}")
        order = [*reversed(batch.lanes.labels.values())]
        sources, targets = (
            sorted(found, key=lambda end: (order.index(end) if end in order else len(order), end))
            for found in ({pair[0] for pair in cells}, {pair[1] for pair in cells})
        )
        nbytes = format_bytes(sum(total.nbytes for total in totals.values()))
        copies = sum(total.copies for total in totals.values())
        self.write(
            f"Transfers: {nbytes} in {copies} values" if totals else "Transfers: none so far",
            ("from", *(f"to {target}" for target in targets)),
            ([one, *("\n".join(cells.get((one, to), ())) for to in targets)] for one in sources),
        )


def transfers(scheduler: Scheduler, lanes: Lanes) -> dict[tuple[str, str, str], Transfer]:
    """Return the sums of all workers by source, target and transport, as lanes name the ends."""
    history = DeviceHistory.of(scheduler)
    totals: dict[tuple[str, str, str], Transfer] = {}
    if history is None:
        return {}
    names = {uuid: lanes.label(host, uuid) for host, uuid in lanes.positions if uuid is not None}
    of_worker = defaultdict(list)
    for worker, uuid in history.devices:
        of_worker[worker].append(uuid)
    for address, known in history.workers.items():
        uuids = of_worker[address]
        alone = len(uuids) == 1 and uuids[0] in names
        names[address] = names[uuids[0]] if alone else f"host memory of {known.name}"

    for row in (row for ws in scheduler.workers.values() for row in moved(ws.metrics)):
        source, target, transport = row.ends
        ends = names.get(source, source), names.get(target, target), transport
        totals[ends] = added(row, totals[ends]) if ends in totals else row
    return totals


# -- failures

_MOST: Final = 200
_NAMES: Final = {
    "error": "failed",
    "out-of-memory": "out of memory, runs again",
    "device-failed": "device failed",
    "refused": "got no device",
    "lost": "history lost",
}
_FAILURES_STYLE: Final = """
td:nth-child(3), td:nth-child(4) { min-width: 8em; }
td:nth-child(-n+2) { white-space: nowrap; overflow-wrap: normal; }
"""


class FailuresTable(Table):
    """The latest failures, the last one at the top, and how many of each kind there were."""

    def __init__(self, colours: Colours) -> None:
        super().__init__("device_failures", colours, _FAILURES_STYLE)
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
            (_failure(host, row, batch.lanes) for host, row in reversed(self._latest)),
        )


def _failure(host: str, row: Incident, lanes: Lanes) -> tuple[str, ...]:
    when = datetime.fromtimestamp(row.time).strftime("%H:%M:%S") if row.time else ""
    device = "" if row.uuid is None else lanes.label(host, row.uuid)
    key = "" if row.key is None else str(row.key)
    return when, device, _NAMES.get(row.what, row.what), key[:200], row.text[:500]
