"""The matrix of the transfers between devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bokeh.models import ColumnDataSource, FactorRange, LabelSet
from bokeh.plotting import figure
from dask.utils import format_bytes
from distributed import Scheduler

from dask_devctx.scheduler.dashboard.batches import Batch
from dask_devctx.scheduler.dashboard.figures import empty, hover
from dask_devctx.scheduler.dashboard.lanes import Lanes
from dask_devctx.scheduler.dashboard.theme import COPY, WAYS, Colours
from dask_devctx.scheduler.history import DeviceHistory

# The metrics of workers with a row for each pair of devices and way: within the worker, and with
# other workers.
WITHIN: Final = "devctx-traffic"
BETWEEN: Final = "devctx-ipc"
# The text of a cell is left out in a larger matrix.
_MOST_TEXTS: Final = 8

_COLUMNS: Final = "source target x y width color alpha way nbytes copies saved rate text"


@dataclass
class Total:
    """The values that went from one device to another in one way, since their workers began."""

    nbytes: int = 0
    copies: int = 0
    saved: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> str:
        """The bytes in a second, as text; empty if nothing moved."""
        return (
            f"{self.nbytes / self.seconds / 1e9:.3g} GB/s" if self.nbytes and self.seconds else ""
        )


class TransferMatrix:
    """A cell for each pair of devices, with a part for each way between them.

    Attributes
    ----------
    root
        The figure.
    """

    def __init__(self, scheduler: Scheduler, colours: Colours) -> None:
        self._scheduler = scheduler
        self._shown: Mapping[tuple[str, str, str], Total] | None = None
        self._source = ColumnDataSource(empty(_COLUMNS))
        ranges = {"range_padding": 0, "factor_padding": 0}
        self.root = figure(
            name="device_transfers",
            title="Transfers: none so far",
            x_range=FactorRange(factors=[""], **ranges),
            y_range=FactorRange(factors=[""], **ranges),
            x_axis_location="above",
            x_axis_label="to",
            y_axis_label="from",
            tools="save",
            toolbar_location="above",
            sizing_mode="stretch_both",
        )
        self.root.xgrid.grid_line_color = None
        self.root.ygrid.grid_line_color = None
        self.root.axis.major_tick_line_color = None
        cells = self.root.rect(
            x="x", y="y", width="width", height=0.94, source=self._source, fill_color="color",
            fill_alpha="alpha", line_color="color",
        )  # fmt: skip
        self._labels = LabelSet(
            x="x", y="y", text="text", source=self._source, text_align="center",
            text_baseline="middle", text_font_size="11px", text_color=colours.text,
        )  # fmt: skip
        self.root.add_layout(self._labels)
        self.root.add_tools(
            hover(
                [cells],
                {
                    "way": "@way",
                    "bytes": "@nbytes{B}",
                    "values": "@copies",
                    "used again": "@saved",
                    "rate": "@rate",
                },
                "@source → @target",
            )
        )
        self._pairs: list[str] = []

    def show(self, batch: Batch) -> None:
        """Show the transfers that the workers' heartbeats tell of."""
        totals = transfers(self._scheduler, batch.lanes)
        if totals == self._shown and not batch.again:
            return
        self._shown = totals
        labels = reversed(batch.lanes.labels.items())
        devices = [label for place, label in labels if place[1] is not None]
        others = {end for pair in totals for end in pair[:2]} - set(devices)
        ends = [*devices, *sorted(others)]
        self.root.x_range.factors = ends or [""]
        self.root.y_range.factors = ends[::-1] or [""]
        self._source.data = _cells(totals, ends)
        nbytes = sum(total.nbytes for total in totals.values())
        copies = sum(int(total.copies) for total in totals.values())
        self.root.title.text = (
            f"Transfers: {format_bytes(nbytes)} in {copies} values"
            if totals
            else "Transfers: none so far"
        )


def transfers(scheduler: Scheduler, lanes: Lanes) -> dict[tuple[str, str, str], Total]:
    """Return the transfers of all workers by source, target and way, as lanes name the ends."""
    history = DeviceHistory.of(scheduler)
    totals: defaultdict[tuple[str, str, str], Total] = defaultdict(Total)
    if history is None:
        return totals
    names = {uuid: lanes.label(host, uuid) for host, uuid in lanes.positions if uuid is not None}
    of_worker = defaultdict(list)
    for worker, uuid in history.devices:
        of_worker[worker].append(uuid)
    for address, known in history.workers.items():
        uuids = of_worker[address]
        if len(uuids) == 1 and uuids[0] in names:
            names[address] = names[uuids[0]]
        else:
            names[address] = f"host memory of {known.name}"
    for ws in scheduler.workers.values():
        for row in _rows(ws.metrics):
            ends = (names.get(row[end], row[end]) for end in ("source", "destination"))
            total = totals[(*ends, row.get("way", "peer"))]
            total.nbytes += row["nbytes"]
            total.copies += row["copies"]
            total.saved += row["saved"]
            total.seconds += row["seconds"]
    return dict(totals)


def _rows(metrics: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a heartbeat that can be read; workers may have another version."""
    for name in (WITHIN, BETWEEN):
        rows = metrics.get(name)
        for row in rows if isinstance(rows, list | tuple) else ():
            if isinstance(row, Mapping) and row.keys() >= _NEEDED:
                yield row


_NEEDED: Final = {"source", "destination", "nbytes", "copies", "saved", "seconds"}


def _cells(totals: Mapping[tuple[str, str, str], Total], ends: list[str]) -> dict[str, Any]:
    ways: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for source, target, way in sorted(totals):
        ways[source, target].append(way)
    most = max((total.nbytes for total in totals.values()), default=0)
    at = {end: n + 0.5 for n, end in enumerate(ends)}
    rows = []
    for (source, target), several in ways.items():
        width = 0.94 / len(several)
        for n, way in enumerate(several):
            total = totals[source, target, way]
            text = f"{way} {format_bytes(total.nbytes)}\n{total.rate}"
            rows.append(
                {
                    "source": source,
                    "target": target,
                    "x": at[target] - 0.47 + (n + 0.5) * width,
                    "y": len(ends) - at[source],
                    "width": width,
                    "color": WAYS.get(way, COPY),
                    "alpha": 0.2 + 0.8 * total.nbytes / (most or 1),
                    "way": way,
                    "nbytes": total.nbytes,
                    "copies": total.copies,
                    "saved": total.saved,
                    "rate": total.rate,
                    "text": text if len(ends) <= _MOST_TEXTS else "",
                }
            )
    return {name: [row[name] for row in rows] for name in _COLUMNS.split()}
