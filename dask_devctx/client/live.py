"""The devices of a cluster as they are now, and what happened between two moments.

All numbers come from the heartbeats that the scheduler has anyway, and from its counts of workers
that left: nothing is collected for them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import Client

from dask_devctx.client.scheduler_part import now_and_before
from dask_devctx.client.tables import host_of
from dask_devctx.scheduler.counts import METRIC, TRAFFIC
from dask_devctx.scheduler.rows import (
    OF_A_DEVICE,
    OF_A_WORKER,
    DeviceCounts,
    Transfer,
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
        for name in TRAFFIC:
            for row in metrics.get(name, ()):
                moved = Transfer(**{"transport": "peer", **known(Transfer, row)})
                transfers[moved.source, moved.destination, moved.transport] += moved.nbytes
    return Moment(time.monotonic(), workers, devices, transfers, ended)


def between(before: Moment, now: Moment) -> list[LiveDevice]:
    """Return the devices at a moment, with their rates since an earlier moment."""
    elapsed_s = now.at - before.at
    found: dict[str, LiveDevice] = {}
    order = sorted(now.devices.items(), key=lambda item: (host_of(item[0][0]), item[1].device_id))
    for (worker, uuid), counts in order:
        live = found.get(uuid)
        if live is None:
            live = found[uuid] = LiveDevice(uuid, counts.device_id, counts.name, host_of(worker))
            live.done, live.failed = (now.before or {}).get(uuid, (0, 0))
        live.workers.append(now.workers[worker])
        for name in ("running", "queued", "done", "failed"):
            setattr(live, name, getattr(live, name) + getattr(counts, name))
        live.utilization = counts.utilization
        for kind in (*OF_A_DEVICE, *OF_A_WORKER):
            if (nbytes := getattr(counts, memory_field(kind))) is not None:
                before_this = live.memory.get(kind, 0) if kind in OF_A_WORKER else 0
                live.memory[kind] = before_this + nbytes
        earlier = before.devices.get((worker, uuid))
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
