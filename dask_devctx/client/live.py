"""The devices of a cluster as they are now, and what happened between two moments.

All numbers come from the heartbeats that the scheduler has anyway: nothing is collected for them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final, NamedTuple

from distributed import Client

from dask_devctx.errors import DevctxError, nbytes_text
from dask_devctx.scheduler.cluster import device_names
from dask_devctx.scheduler.rows import METRIC, DeviceCounts, Transfer, known, merged, transfers

# The most characters of the names of workers, and of tasks.
_WIDTH: Final = 20


@dataclass(frozen=True, slots=True)
class ReportedDevice(DeviceCounts):
    """A device of a worker, and the worker's address and name."""

    worker: str = ""
    worker_name: str = ""


@dataclass(frozen=True, slots=True)
class LiveDevice(DeviceCounts):
    """One device, with the sums over the workers that use it, and its rates."""

    host: str = ""
    workers: tuple[str, ...] = ()
    tasks_per_s: float = 0.0
    occupied: float | None = None
    copied_nbytes: int = 0
    nbytes_per_s: float = 0.0


def device_rows(workers: Iterable[tuple[str, str, Iterable[Any]]]) -> list[ReportedDevice]:
    """Return the rows of workers' devices, by host and ordinal: of each address, name and rows."""
    found = [
        ReportedDevice(**known(DeviceCounts, row), worker=address, worker_name=name)
        for address, name, rows in workers
        for row in rows
    ]
    return sorted(found, key=lambda row: (host_of(row.worker), row.device_id))


def by_device(rows: Iterable[ReportedDevice], moved: Iterable[Transfer]) -> dict[str, LiveDevice]:
    """Return the devices by UUID, in the order of the rows that workers have of them."""
    copied = Counter[str]()
    for transfer in moved:
        copied[transfer.destination] += transfer.nbytes
    groups: dict[str, list[ReportedDevice]] = {}
    for row in rows:
        groups.setdefault(row.uuid, []).append(row)
    return {
        uuid: LiveDevice(
            **{name: getattr(counts, name) for name in DeviceCounts.__slots__},
            host=host_of(members[0].worker),
            workers=tuple(row.worker_name for row in members),
            copied_nbytes=copied[uuid],
        )
        for uuid, members in groups.items()
        for counts in [merged(members[::-1])]
    }


# -- columns


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.0%}"


def _memory(device: LiveDevice) -> str | None:
    whole, free = device.memory_total, device.memory_free
    return f"{nbytes_text(whole - (free or 0))} of {nbytes_text(whole)}" if whole else None


COLUMNS: Final[Mapping[str, Callable[[LiveDevice], object]]] = {
    "worker": lambda device: ", ".join(w.rpartition("://")[2] for w in device.workers)[-_WIDTH:],
    "use": lambda device: _percent(device.utilization),
    "busy": lambda device: _percent(device.occupied),
    "tasks/s": lambda device: round(device.tasks_per_s),
    "runs": attrgetter("running"),
    "waits": attrgetter("queued"),
    "done": attrgetter("done"),
    "failed": attrgetter("failed"),
    "memory used": _memory,
    "copied in": lambda device: nbytes_text(device.copied_nbytes),
    "copied in/s": lambda device: nbytes_text(round(device.nbytes_per_s)),
    "kept": lambda device: nbytes_text((device.memory_held or 0) + (device.memory_copies or 0)),
    "spilled": lambda device: nbytes_text(device.memory_spilled or 0),
    "now": lambda device: ", ".join(device.tasks_now)[:_WIDTH] or None,
}


def cells(devices: Sequence[LiveDevice], columns: Sequence[str]) -> list[list[object]]:
    """Return a row of cells for each device: its short name, and these columns."""
    names = device_names((one.host, one.device_id, one.uuid) for one in devices)
    return [[names[one.uuid], *(COLUMNS[name](one) for name in columns)] for one in devices]


# -- plain text


def aligned(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table of aligned columns; columns of numbers are aligned to the right."""
    cells = [[("-" if cell is None else str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = [
        all(isinstance(cell, (int, float)) or cell in ("", None) for cell in column)
        for column in zip(*rows, strict=True)
    ] or [False] * len(head)
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [list(head), *cells]
    ]
    return "\n".join(lines)


def host_of(address: str) -> str:
    """Return the host of a worker, as its address has it."""
    return address.rpartition(":")[0]


# -- moments


def refuse_unusable(client: object, example: str) -> None:
    """Refuse an object that is no client, and a client that is closed."""
    name = example.partition("(")[0]
    if not isinstance(client, Client):
        raise TypeError(f"{name} takes a client of the cluster, as in {example}; got {client!r}")
    if client.status in ("closing", "closed"):
        raise ValueError(f"{name}: the client is closed. Make another: client = Client(address)")


async def on_scheduler(client: Client, function: Any, **arguments: Any) -> Any:
    """Return what a function of this package returns on the scheduler, which may lack it."""
    try:
        return await client.run_on_scheduler(function, **arguments)
    except ModuleNotFoundError as error:
        raise DevctxError(
            f"the scheduler at {client.scheduler.address} lacks this package: {error}. Install "
            "dask-devctx where the scheduler runs; it needs no GPU there"
        ) from error


class Moment(NamedTuple):
    """The workers and the devices of a cluster at one moment, and the bytes by transport."""

    at: float
    workers: Mapping[str, str]
    devices: Mapping[str, LiveDevice]
    moved: Mapping[str, int]


def moment(client: Client) -> Any:
    """Return the present state of the cluster; an asynchronous client gives an awaitable."""
    return client.sync(_moment, client)


async def _moment(client: Client) -> Moment:
    # `client.scheduler_info()` may lack the workers: dask refreshes what it returns without them.
    workers: Any = (await client.scheduler.identity(n_workers=-1))["workers"]
    names = {w: str(one["name"]) for w, one in workers.items()}
    rows = device_rows((w, names[w], one["metrics"].get(METRIC, ())) for w, one in workers.items())
    moved = [row for one in workers.values() for row in transfers(one["metrics"])]
    nbytes = Counter[str]()
    for transfer in moved:
        nbytes[transfer.transport] += transfer.nbytes
    return Moment(time.monotonic(), names, by_device(rows, moved), nbytes)


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
