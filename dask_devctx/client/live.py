"""The devices of a cluster as they are now, and what happened between two moments.

All numbers come from the heartbeats that the scheduler has anyway, and from its counts of workers
that left: nothing is collected for them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final, NamedTuple

from distributed import Client, Scheduler

from dask_devctx.client.tables import device_names, host_of, shortened
from dask_devctx.errors.base import nbytes_text
from dask_devctx.scheduler.counts import METRIC, transfers
from dask_devctx.scheduler.rows import OF_A_DEVICE, OF_A_WORKER, DeviceCounts, known, memory_field

# The counts of a device that are added over its workers.
SUMS: Final = ("running", "queued", "done", "failed", "busy_s", "occupied_s")
_WORKER: Final = 16

Ends = tuple[str, str, str]  # source, destination, transport


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
    occupied_s: float = 0.0
    tasks_per_s: float = 0.0
    occupied: float | None = None
    utilization: float | None = None
    memory: dict[str, int] = field(default_factory=dict)
    copied_nbytes: int = 0
    nbytes_per_s: float = 0.0

    def add(self, other: LiveDevice | DeviceCounts) -> None:
        """Add the tasks of another device, or of a worker."""
        for one in SUMS:
            setattr(self, one, getattr(self, one) + getattr(other, one))

    @property
    def used(self) -> int:
        """The bytes in use on the whole device."""
        return self.memory.get("total", 0) - self.memory.get("free", 0)


def by_device(rows: Iterable[tuple[str, str | None, DeviceCounts]]) -> dict[str, LiveDevice]:
    """Return the devices by UUID, from each worker's address and name; None if it left."""
    found: dict[str, LiveDevice] = {}
    order = sorted(rows, key=lambda row: (row[1] is None, host_of(row[0]), row[2].device_id))
    for worker, name, counts in order:
        live = found.get(counts.uuid)
        is_first = live is None
        if live is None:
            live = LiveDevice(counts.uuid, counts.device_id, counts.name, host_of(worker))
            live.utilization = counts.utilization
            found[counts.uuid] = live
        if name is not None:
            live.workers.append(name)
        live.add(counts)
        for kind in (*OF_A_DEVICE, *OF_A_WORKER):
            nbytes = getattr(counts, memory_field(kind))
            if nbytes is not None and (is_first or kind in OF_A_WORKER):
                live.memory[kind] = live.memory.get(kind, 0) + nbytes
    return found


def total(devices: Collection[LiveDevice], workers: str) -> LiveDevice:
    """Return the sum of devices, as a device."""
    found = LiveDevice("", -1, None, workers=[workers])
    uses = [one.utilization for one in devices if one.utilization is not None]
    found.utilization = sum(uses) / len(uses) if uses else None
    memory = Counter[str]()
    for one in devices:
        found.add(one)
        found.copied_nbytes += one.copied_nbytes
        memory.update(one.memory if one.memory.keys() >= {"free", "total"} else {})
    found.memory = dict(memory)
    return found


# -- columns


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.0%}"


def _memory(device: LiveDevice) -> str | None:
    whole = device.memory.get("total")
    return f"{nbytes_text(device.used)} of {nbytes_text(whole)}" if whole else None


def _kept(device: LiveDevice) -> str:
    """Return the bytes of values that dask keeps there, and their limit."""
    limit = device.memory.get("limit")
    kept = device.memory.get("held", 0) + device.memory.get("copies", 0)
    return nbytes_text(kept) + ("" if limit is None else f" of {nbytes_text(limit)}")


COLUMNS: Final[Mapping[str, Callable[[LiveDevice], object]]] = {
    "worker": lambda device: shortened(", ".join(device.workers) or "(left)", _WORKER),
    "use": lambda device: _percent(device.utilization),
    "busy": lambda device: _percent(device.occupied),
    "tasks/s": lambda device: round(device.tasks_per_s),
    "runs": attrgetter("running"),
    "waits": attrgetter("queued"),
    "done": attrgetter("done"),
    "failed": attrgetter("failed"),
    "busy s": lambda device: round(device.busy_s, 1),
    "memory used": _memory,
    "copied in": lambda device: nbytes_text(device.copied_nbytes),
    "copied in/s": lambda device: nbytes_text(round(device.nbytes_per_s)),
    "kept of limit": _kept,
    "on the host": lambda device: nbytes_text(device.memory.get("spilled", 0)),
}


def rows(devices: Sequence[LiveDevice], columns: Sequence[str]) -> list[list[object]]:
    """Return a row of cells for each device: its short name, and these columns."""
    names = device_names((one.host, one.device_id, one.uuid) for one in devices)
    return [[names[one.uuid], *(COLUMNS[name](one) for name in columns)] for one in devices]


# -- moments


def refuse_unusable(client: object, example: str) -> None:
    """Refuse an object that is no client, and a client that is closed."""
    name = example.partition("(")[0]
    if not isinstance(client, Client):
        raise TypeError(f"{name} takes a client of the cluster, as in {example}; got {client!r}")
    if client.status in ("closing", "closed"):
        raise ValueError(f"{name}: the client is closed. Make another: client = Client(address)")


class Moment(NamedTuple):
    """The devices and the transfers of a cluster at one moment."""

    at: float
    workers: Mapping[str, str]
    devices: Mapping[str, LiveDevice]
    transfers: Mapping[Ends, int]


def moment(client: Client) -> Any:
    """Return the present state of the cluster; an asynchronous client gives an awaitable."""
    return client.sync(_moment, client)


async def _moment(client: Client) -> Moment:
    # One question, so that a worker that leaves meanwhile is counted once.
    answer: Any = await client.run_on_scheduler(_now_and_before)
    identity, before = answer
    names = {address: str(worker["name"]) for address, worker in identity["workers"].items()}
    counts, moved = [], Counter[Ends]()
    for address, worker in identity["workers"].items():
        for row in worker["metrics"].get(METRIC, ()):
            one = DeviceCounts(**known(DeviceCounts, row))
            counts.append((address, names[address], one))
        for transfer in transfers(worker["metrics"]):
            moved[transfer.ends] += transfer.nbytes
    devices = by_device(counts)
    for uuid in before.keys() & devices.keys():
        done, failed = before[uuid]
        devices[uuid].done += done
        devices[uuid].failed += failed
    for (_, destination, _), nbytes in moved.items():
        if destination in devices:
            devices[destination].copied_nbytes += nbytes
    return Moment(time.monotonic(), names, devices, moved)


def _now_and_before(dask_scheduler: Scheduler) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Return the scheduler's identity, and how many tasks ended on workers that left."""
    routing = dask_scheduler.plugins.get("devctx-routing")
    past = {} if routing is None else routing.counts.past
    ended = {uuid: (device.counts.done, device.counts.failed) for uuid, device in past.items()}
    return dask_scheduler.identity(n_workers=-1), ended


_now_and_before.__module__ = "__main__"  # sent by value, to a scheduler without this package too


def between(before: Moment, now: Moment) -> list[LiveDevice]:
    """Return the devices at a moment, with their rates since an earlier moment."""
    elapsed_s, found = now.at - before.at, []
    for uuid, device in now.devices.items():
        earlier = before.devices.get(uuid)
        if elapsed_s > 0 and earlier is not None:
            ended = device.done + device.failed - earlier.done - earlier.failed
            share = (device.occupied_s - earlier.occupied_s) / elapsed_s
            copied = device.copied_nbytes - earlier.copied_nbytes
            device = replace(
                device,
                tasks_per_s=max(ended, 0) / elapsed_s,
                occupied=min(max(share, 0.0), 1.0),
                nbytes_per_s=max(copied, 0) / elapsed_s,
            )
        found.append(device)
    return found


def rates(before: Moment, now: Moment) -> dict[Ends, float]:
    """Return the bytes for each second that moved, by source, destination and transport."""
    elapsed_s = now.at - before.at
    if elapsed_s <= 0:
        return {}
    return {
        ends: max(nbytes - before.transfers.get(ends, 0), 0) / elapsed_s
        for ends, nbytes in now.transfers.items()
    }
