"""The matrix of the transfers between devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bokeh.models import FactorRange, LabelSet
from bokeh.plotting import figure
from dask.utils import format_bytes
from distributed import Scheduler

from dask_devctx.scheduler.counts import TRAFFIC
from dask_devctx.scheduler.dashboard.batches import Batch
from dask_devctx.scheduler.dashboard.figures import colour_sample, hover, legend_below
from dask_devctx.scheduler.dashboard.lanes import Lanes
from dask_devctx.scheduler.dashboard.sources import UNKNOWN, Rows, rgba
from dask_devctx.scheduler.dashboard.theme import COPY, WAY_NAMES, WAYS, Colours
from dask_devctx.scheduler.history import DeviceHistory

_WAYS: Final = ("peer", "ipc", "host")
# A larger matrix has cells with less text, or without text.
_TWO_LINES: Final = 4
_ONE_LINE: Final = 10


@dataclass
class Total:
    """The values that went from one device to another in one way, since their workers began."""

    nbytes: float = 0
    copies: float = 0
    saved: float = 0
    measured_nbytes: float = 0
    measured_s: float = 0.0

    def add(
        self, nbytes: float, copies: float, saved: float, measured_nbytes: float, measured_s: float
    ) -> None:
        """Add other counts to these."""
        self.nbytes += nbytes
        self.copies += copies
        self.saved += saved
        self.measured_nbytes += measured_nbytes
        self.measured_s += measured_s

    @property
    def rate(self) -> float:
        """The bytes in a second of those that were timed, or ``UNKNOWN``."""
        return self.measured_nbytes / self.measured_s if self.measured_s > 0 else UNKNOWN


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
        self._rows = Rows(
            "x y width color alpha nbytes copies saved rate", "source target way text"
        )
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
            x="x", y="y", width="width", height=0.94, source=self._rows.source, fill_color="color",
            fill_alpha="alpha", line_color="color",
        )  # fmt: skip
        for way in _WAYS:
            colour_sample(self.root, WAYS[way], WAY_NAMES[way])
        legend_below(self.root)
        self._labels = LabelSet(
            x="x", y="y", text="text", source=self._rows.source, text_align="center",
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
                    "rate": "@rate{B/s}",
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
        self.root.xaxis.major_label_orientation = (
            "horizontal" if len(ends) <= _ONE_LINE else "vertical"
        )
        self._rows.replace(_cells(totals, ends))
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

    def add(source: str, target: str, way: str, *counts: float) -> None:
        totals[names.get(source, source), names.get(target, target), way].add(*counts)

    for plugin in scheduler.plugins.values():
        past: Mapping[Any, Any] = getattr(getattr(plugin, "counts", None), "transfers", {})
        for ends, (nbytes, copies, saved, _, *measured) in past.items():  # of workers that left
            add(*ends, nbytes, copies, saved, *measured)
    for ws in scheduler.workers.values():
        for row in _rows(ws.metrics):
            ends = row["source"], row["destination"], row.get("way", "peer")
            add(*ends, *map(row.__getitem__, _COUNTS), *(row.get(name, 0) for name in _MEASURED))
    return dict(totals)


def _rows(metrics: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a heartbeat that can be read; workers may have another version."""
    for name in TRAFFIC:
        rows = metrics.get(name)
        for row in rows if isinstance(rows, list | tuple) else ():
            if isinstance(row, Mapping) and row.keys() >= _NEEDED:
                yield row


_COUNTS: Final = ("nbytes", "copies", "saved")
_MEASURED: Final = ("measured_nbytes", "measured_s")
_NEEDED: Final = {"source", "destination", *_COUNTS}


def _cells(totals: Mapping[tuple[str, str, str], Total], ends: list[str]) -> list[dict[str, Any]]:
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
            text = format_bytes(total.nbytes) if len(ends) <= _ONE_LINE else ""
            if len(ends) <= _TWO_LINES and total.rate > 0:
                text += f"\n{total.rate / 1e9:.3g} GB/s"
            rows.append(
                {
                    "source": source,
                    "target": target,
                    "x": at[target] - 0.47 + (n + 0.5) * width,
                    "y": len(ends) - at[source],
                    "width": width,
                    "color": rgba(WAYS.get(way, COPY)),
                    "alpha": 0.2 + 0.8 * total.nbytes / (most or 1),
                    "way": WAY_NAMES.get(way, way),
                    "nbytes": total.nbytes,
                    "copies": total.copies,
                    "saved": total.saved,
                    "rate": total.rate,
                    "text": text,
                }
            )
    return rows
