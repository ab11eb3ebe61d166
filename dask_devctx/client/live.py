"""The devices of a cluster as they are now, and what happened between two moments.

All numbers come from the heartbeats that the scheduler has anyway, and from its counts of workers
that left: nothing is collected for them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from distributed import Client

from dask_devctx.client.scheduler_part import now_and_before
from dask_devctx.client.tables import host_of
from dask_devctx.scheduler.counts import METRIC
from dask_devctx.scheduler.counts import transfers as moved
from dask_devctx.scheduler.rows import (
    OF_A_DEVICE,
    OF_A_WORKER,
    DeviceCounts,
    known,
    memory_field,
)


@dataclass(frozen=True)
class Moment:
    """The devices and the transfers of a cluster at one moment."""

    at: float
    workers: Mapping[str, str]
    devices: Mapping[tuple[str, str], DeviceCounts]
    transfers: Mapping[tuple[str, str, str], int]
    before: Mapping[str, tuple[int, int]] | None = None


# The counts of a device that are added over its workers.
SUMS: Final = ("running", "queued", "done", "failed", "busy_s")


@dataclass
class LiveDevice:
    """One device, with the sums over the workers that use it, and its rates."""

    uuid: str
    device_id: int
    name: str | None
    host: str = ""
    workers: list[str] = field(default_factory=list)
    running: int = 0
    queued: int = 0
    done: int = 0
    failed: int = 0
    busy_s: float = 0.0
    tasks_per_s: float = 0.0
    occupied: float | None = None
    utilization: float | None = None
    memory: dict[str, int] = field(default_factory=dict)
    nbytes_per_s: float = 0.0


def moment(client: Client, last: Moment | None = None) -> Any:
    """Return the present state of the cluster; an asynchronous client gives an awaitable."""
    return client.sync(_moment, client, last)


async def _moment(client: Client, last: Moment | None) -> Moment:
    asks = last is None or last.before is not None
    answer = await now_and_before(client) if asks else None
    found: Any
    found, ended = answer or (await client.scheduler.identity(n_workers=-1), None)
    workers = {address: str(worker["name"]) for address, worker in found["workers"].items()}
    devices, transfers = {}, Counter[tuple[str, str, str]]()
    for address, worker in found["workers"].items():
        metrics = worker["metrics"]
        for row in metrics.get(METRIC, ()):
            devices[address, row["uuid"]] = DeviceCounts(**known(DeviceCounts, row))
        for ends, numbers in moved(metrics):
            transfers[ends] += int(numbers[0])
    return Moment(time.monotonic(), workers, devices, transfers, ended)


def by_device(rows: Iterable[tuple[str, str | None, DeviceCounts]]) -> dict[str, LiveDevice]:
    """Return the devices by UUID, from each worker's address and name; None if it left."""
    found: dict[str, LiveDevice] = {}
    order = sorted(rows, key=lambda row: (row[1] is None, host_of(row[0]), row[2].device_id))
    for worker, name, counts in order:
        new = LiveDevice(counts.uuid, counts.device_id, counts.name, host_of(worker))
        live = found.setdefault(counts.uuid, new)
        if live is new:
            live.utilization = counts.utilization
        if name is not None:
            live.workers.append(name)
        for one in SUMS:
            setattr(live, one, getattr(live, one) + getattr(counts, one))
        for kind in (*OF_A_DEVICE, *OF_A_WORKER):
            if (nbytes := getattr(counts, memory_field(kind))) is not None:
                before = live.memory.get(kind)
                own = kind in OF_A_WORKER
                live.memory[kind] = nbytes if before is None else before + own * nbytes
    return found


def between(before: Moment, now: Moment) -> list[LiveDevice]:
    """Return the devices at a moment, with their rates since an earlier moment."""
    elapsed_s = now.at - before.at
    found = by_device((w, now.workers[w], counts) for (w, _), counts in now.devices.items())
    for uuid, (done, failed) in (now.before or {}).items():
        if live := found.get(uuid):
            live.done, live.failed = live.done + done, live.failed + failed
    for place, counts in now.devices.items():
        earlier, live = before.devices.get(place), found[counts.uuid]
        if elapsed_s > 0 and earlier is not None:
            ended = counts.done + counts.failed - earlier.done - earlier.failed
            live.tasks_per_s += max(ended, 0) / elapsed_s
            share = (counts.occupied_s - earlier.occupied_s) / elapsed_s
            live.occupied = min(max(live.occupied or 0.0, share), 1.0)
    for ends, rate in rates(before, now).items():
        if ends[1] in found:
            found[ends[1]].nbytes_per_s += rate
    return list(found.values())


def rates(before: Moment, now: Moment) -> dict[tuple[str, str, str], float]:
    """Return the bytes for each second that moved, by source, destination and transport."""
    elapsed_s = now.at - before.at
    if elapsed_s <= 0:
        return {}
    return {
        ends: max(nbytes - before.transfers.get(ends, 0), 0) / elapsed_s
        for ends, nbytes in now.transfers.items()
    }
