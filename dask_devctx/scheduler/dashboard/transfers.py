"""The matrix of the transfers between devices."""

from __future__ import annotations

from collections import defaultdict

from dask.utils import format_bytes
from distributed import Scheduler

from dask_devctx.scheduler.counts import transfers as moved
from dask_devctx.scheduler.dashboard.feed import Batch
from dask_devctx.scheduler.dashboard.figures import TRANSPORTS, Colours, Table
from dask_devctx.scheduler.dashboard.lanes import Lanes
from dask_devctx.scheduler.history import DeviceHistory
from dask_devctx.scheduler.rows import Transfer, added

# The sums of transfers by source, destination and transport, as lanes name the ends.
Totals = dict[tuple[str, str, str], Transfer]


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
