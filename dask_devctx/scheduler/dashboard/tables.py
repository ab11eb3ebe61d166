"""The tables: each device as it is now, the transfers between devices, and the failures."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from bokeh.models import Div
from distributed import Scheduler
from markupsafe import Markup

from dask_devctx.errors import counted, nbytes_text
from dask_devctx.scheduler.dashboard.feed import STALE_S, Batch, Interval
from dask_devctx.scheduler.dashboard.figures import STYLE, transport
from dask_devctx.scheduler.rows import Incident, Transfer, added, transfers

_METER: Final = Markup("<meter value='{}'></meter>{}")
_MARK: Final = Markup("<i style='background: {}'></i>{}")  # a text with a colour
_LONG: Final = Markup("<div>{}</div>")  # a text that may have several lines


class Table:
    """A table of texts, or of HTML, below a title."""

    sizing = "stretch_both"

    def __init__(self) -> None:
        self.root = Div(sizing_mode=self.sizing, stylesheets=[STYLE])

    def write(self, title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Replace the content; without rows, there is the title alone."""
        text = Markup("<h3>{}</h3>").format(title)
        cells = [Markup("").join(map(Markup("<td>{}</td>").format, row)) for row in rows]
        if cells:
            names = Markup("").join(map(Markup("<th>{}</th>").format, head))
            lines = Markup("").join(map(Markup("<tr>{}</tr>").format, (names, *cells)))
            text += Markup("<table>{}</table>").format(lines)
        self.root.text = text


# -- each device at a glance

_HEAD: Final = (
    *("device", "computes", "has a task", "memory used", "held by dask", "spilled", "power"),
    *("temperature", "queued", "runs now"),
)


class Glance(Table):
    """A row for each device: its load, memory, power and temperature, its tasks and its queue."""

    sizing = "stretch_width"

    def show(self, batch: Batch) -> None:
        """Show the latest samples."""
        uuids = [uuid for uuid in reversed(batch.lanes.names) if uuid in batch.latest]
        rows = (_device(batch.lanes.name(uuid), batch.latest[uuid], batch.now) for uuid in uuids)
        title = counted(len(uuids), "device") if uuids else "No device has answered yet"
        samples = [batch.latest[uuid].after for uuid in uuids]
        if samples and all(s.utilization is None and s.power_w is None for s in samples):
            title += f"; NVML has no numbers for {'it' if len(uuids) == 1 else 'them'}"
        if gone := batch.lanes.gone.values():
            title += f"; {', '.join(reversed(gone))} left with the worker"
        self.write(title, _HEAD, rows)


def _device(name: str, one: Interval, now: float) -> Sequence[str]:
    after = one.after
    tasks = f"{after.running} × {', '.join(after.tasks_now)}" if after.tasks_now else "idle"
    if now - after.time > STALE_S:
        tasks = f"no news for {now - after.time:.0f} s"
    total, limit = after.memory_total, after.device_memory_limit
    used = None if total is None or after.memory_free is None else total - after.memory_free
    held = (after.memory_held or 0) + (after.memory_copies or 0)
    return (
        name,
        _share(after.utilization),
        _share(one.occupied),
        _of(used, total),
        _of(held, limit),
        nbytes_text(after.memory_spilled or 0),
        "-" if after.power_w is None else f"{after.power_w:.0f} W",
        "-" if after.temperature is None else f"{after.temperature:.0f} °C",
        str(after.queued),
        _LONG.format(tasks),
    )


def _share(part: float | None) -> str:
    return "-" if part is None else _METER.format(part, f"{part:.0%}")


def _of(nbytes: int | None, whole: int | None) -> str:
    if nbytes is None or not whole:
        return "-" if nbytes is None else nbytes_text(nbytes)
    unit = " " + nbytes_text(whole).partition(" ")[2]
    text = f"{nbytes_text(nbytes).removesuffix(unit)} of {nbytes_text(whole)}"
    return _METER.format(nbytes / whole, text)


# -- transfers


class TransferMatrix(Table):
    """The bytes and the rate from each source, in a row, to each target, in a column."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def show(self, batch: Batch) -> None:
        """Show the transfers that the workers' heartbeats tell of."""
        workers = self._scheduler.workers
        names = {address: f"host memory of {ws.name}" for address, ws in workers.items()}
        names |= batch.lanes.gone | batch.lanes.names
        totals: dict[tuple[str, str, str], Transfer] = {}
        for row in (row for ws in workers.values() for row in transfers(ws.metrics)):
            source, target, way = row.ends
            ends = names.get(source, source), names.get(target, target), way
            totals[ends] = added(row, totals[ends]) if ends in totals else row
        cells: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        ways = {}
        for (source, target, way), total in sorted(totals.items()):
            words, colour = transport(way)
            ways[words] = _MARK.format(colour, words)
            cells[source, target].append(_MARK.format(colour, nbytes_text(total.nbytes)))
            if total.rate is not None:
                cells[source, target].append(f"{total.rate / 1e9:.3g} GB/s")
        order = {name: -n for n, name in enumerate(batch.lanes.names.values())}
        sources, targets = (
            sorted({pair[side] for pair in cells}, key=lambda end: (order.get(end, 1), end))
            for side in (0, 1)
        )
        nbytes = nbytes_text(sum(total.nbytes for total in totals.values()))
        copies = sum(total.copies for total in totals.values())
        title = f"{nbytes} in {counted(copies, 'value')}" if totals else "none since the start"
        newline = Markup("<br>")
        self.write(
            Markup(" &ensp; ").join([f"Transfers: {title}", *ways.values()]),
            ("from", *(f"to {target}" for target in targets)),
            ([one, *(newline.join(cells[one, to]) for to in targets)] for one in sources),
        )


# -- failures


class FailuresTable(Table):
    """The latest failures, the last one at the top, and how many of each kind there were."""

    def __init__(self) -> None:
        super().__init__()
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
                _LONG.format("" if row.key is None else row.key),
                _LONG.format(row.text),
            )
            for row in reversed(self._latest)
        )
        head = ("time", "device", "problem", "task", "reason")
        self.write(f"Failures and retries: {', '.join(sums) or 'none'}", head, rows)
