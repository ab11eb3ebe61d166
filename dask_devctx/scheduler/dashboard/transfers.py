"""The matrix of the transfers between devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

from bokeh.models import FactorRange, LabelSet
from dask.utils import format_bytes
from distributed import Scheduler

from dask_devctx.scheduler.counts import transfers as moved
from dask_devctx.scheduler.dashboard.feed import Batch
from dask_devctx.scheduler.dashboard.figures import (
    COPIES,
    OTHER,
    TRANSPORTS,
    Colours,
    Rows,
    about,
    hover,
    legend_below,
    plot_named,
)
from dask_devctx.scheduler.dashboard.lanes import Lanes
from dask_devctx.scheduler.history import DeviceHistory
from dask_devctx.scheduler.rows import Transfer, added

_NONE: Final = "Transfers: none so far"
# A larger matrix has cells with less text, or without text.
_TWO_LINES: Final = 4
_ONE_LINE: Final = 10

# The sums of transfers by source, destination and transport, as lanes name the ends.
Totals = dict[tuple[str, str, str], Transfer]


class TransferMatrix:
    """A cell for each pair of devices, with a part for each transport between them."""

    def __init__(self, scheduler: Scheduler, colours: Colours) -> None:
        self._scheduler = scheduler
        self._shown: Totals | None = None
        self._rows = Rows("x y width alpha nbytes", "color text source destination transport about")
        ranges = {"range_padding": 0, "factor_padding": 0}
        self.root = plot_named(
            "device_transfers", _NONE, tools="save", x_axis_location="above",
            x_range=FactorRange(factors=[""], **ranges), x_axis_label="to",
            y_range=FactorRange(factors=[""], **ranges), y_axis_label="from",
        )  # fmt: skip
        self.root.grid.grid_line_color = None
        cells = self.root.rect(
            x="x", y="y", width="width", height=0.94, source=self._rows.source, fill_color="color",
            fill_alpha="alpha", line_color="color", legend_field="transport",
        )  # fmt: skip
        legend_below(self.root)
        self._labels = LabelSet(
            x="x", y="y", text="text", source=self._rows.source, text_align="center",
            text_baseline="middle", text_font_size="11px", text_color=colours.text,
        )  # fmt: skip
        self.root.add_layout(self._labels)
        self.root.add_tools(hover(cells))

    def show(self, batch: Batch) -> None:
        """Show the transfers that the workers' heartbeats tell of."""
        totals = transfers(self._scheduler, batch.lanes)
        if totals == self._shown and not batch.again:
            return
        self._shown = totals
        labels = reversed(batch.lanes.labels.items())
        devices = [label for place, label in labels if place[1] is not None]
        ends = [*devices, *sorted({end for pair in totals for end in pair[:2]} - set(devices))]
        self.root.x_range.factors = ends or [""]
        self.root.y_range.factors = ends[::-1] or [""]
        few = len(ends) <= _ONE_LINE
        self.root.xaxis.major_label_orientation = "horizontal" if few else "vertical"
        self._rows.replace(_cells(totals, ends))
        nbytes = sum(total.nbytes for total in totals.values())
        copies = sum(total.copies for total in totals.values())
        self.root.title.text = (
            f"Transfers: {format_bytes(nbytes)} in {copies} values" if totals else _NONE
        )


def transfers(scheduler: Scheduler, lanes: Lanes) -> Totals:
    """Return the sums of all workers by source, target and transport, as lanes name the ends."""
    history = DeviceHistory.of(scheduler)
    totals: Totals = {}
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

    rows = [row for ws in scheduler.workers.values() for row in moved(ws.metrics)]
    for plugin in scheduler.plugins.values():  # those of workers that left
        rows += getattr(getattr(plugin, "counts", None), "transfers", {}).values()
    for row in rows:
        source, target, transport = row.ends
        ends = names.get(source, source), names.get(target, target), transport
        totals[ends] = added(row, totals[ends]) if ends in totals else row
    return totals


def _cells(totals: Totals, ends: list[str]) -> Iterator[dict[str, Any]]:
    transports: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for source, target, transport in sorted(totals):
        transports[source, target].append(transport)
    most = max((total.nbytes for total in totals.values()), default=0)
    at = {end: n + 0.5 for n, end in enumerate(ends)}
    for (source, target), several in transports.items():
        width = 0.94 / len(several)
        for n, transport in enumerate(several):
            total = totals[source, target, transport]
            size = format_bytes(total.nbytes)
            rate = "" if total.rate is None else f"{total.rate / 1e9:.3g} GB/s"
            lines = {
                "transport": TRANSPORTS.get(transport, transport),
                "bytes": size,
                "values": str(total.copies),
                "used again": str(total.saved),
                "rate": rate or "not measured",
            }
            two = f"{size}\n{rate}" if rate and len(ends) <= _TWO_LINES else size
            yield {
                "x": at[target] - 0.47 + (n + 0.5) * width,
                "y": len(ends) - at[source],
                "width": width,
                "color": COPIES.get(transport, OTHER),
                "alpha": 0.2 + 0.8 * total.nbytes / (most or 1),
                "text": two if len(ends) <= _ONE_LINE else "",
                "source": source,
                "destination": target,
                "transport": TRANSPORTS.get(transport, transport),
                "nbytes": total.nbytes,
                "about": about(f"{source} → {target}", lines),
            }
