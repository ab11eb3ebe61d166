"""The counts of tasks on each device that outlive the workers that ran them.

A worker's heartbeats carry its counts, and the scheduler keeps them when the worker leaves. A
worker that is killed may have run tasks since its last heartbeat: so the scheduler also counts each
outcome that reaches it, and keeps the larger number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from distributed import Scheduler

# The metrics with a row for each pair of devices, in a worker and between workers.
TRAFFIC: Final = ("devctx-traffic", "devctx-ipc")
# The metric with a row for each device in a worker's heartbeat, and the name of the device in a
# task's metadata and in the times of a task that failed.
METRIC: Final = "devctx"
DEVICE: Final = "device"

# The devices, and the pairs of devices, whose counts are kept.
_LIMIT: Final = 4096


@dataclass
class PastCounts:
    """The counts of a device on workers that left; :class:`~.rows.DeviceCounts` has the fields."""

    done: int = 0
    failed: int = 0
    busy_s: float = 0.0
    occupied_s: float = 0.0
    slot_s: float = 0.0
    inputs_s: float = 0.0
    memory_s: float = 0.0
    out_of_memory: int = 0


_NUMBER: Final = int | float
_TRANSFERRED: Final = ("nbytes", "copies", "saved", "seconds", "measured_nbytes", "measured_s")
# The fields of rows, and their types; workers may have another version.
_DEVICE: Final[dict[str, Any]] = {
    "uuid": str,
    "device_id": int,
    "name": str | None,
    **{one.name: _NUMBER | None for one in fields(PastCounts)},
}
_TRANSFER: Final[dict[str, Any]] = {
    "source": str,
    "destination": str,
    "transport": str | None,  # within a worker it is missing
    **dict.fromkeys(_TRANSFERRED[:4], _NUMBER),
}


@dataclass
class PastDevice:
    """A device of workers that left: the last of them, its ordinal there, its name and counts."""

    worker: str
    device_id: int
    name: str | None
    counts: PastCounts


class Counts:
    """Counts outcomes of tasks on devices, and keeps the counts of workers that left.

    Attributes
    ----------
    past
        The devices of workers that left, by UUID.
    used
        The UUIDs of the devices that each worker used last, also if it left.
    transfers
        The bytes, copies, saved copies, seconds, measured bytes and their seconds of these workers'
        transfers, by source, destination and way.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.past: dict[str, PastDevice] = {}
        self.used: dict[str, tuple[str, ...]] = {}
        self.transfers: dict[tuple[str, str, str], list[float]] = {}
        self._scheduler = scheduler
        self._seen: dict[str, dict[str, PastCounts]] = {}
        # dask has dropped the state of a worker by the time that it says that the worker left.
        self._states = dict(scheduler.workers)

    def ended(self, finish: str, content: Mapping[str, Any]) -> None:
        """Count the outcome of a task that a worker ran, by the content of its transition."""
        worker, compute = content.get("worker"), None
        for times in content["startstops"] or ():
            if times["action"] == "compute":
                compute = times
        if worker is None or compute is None:
            return
        about = compute if finish == "erred" else content.get("metadata") or {}
        uuid = about.get(DEVICE)
        if not isinstance(uuid, str):
            return
        seen = self._seen.setdefault(worker, {})
        counts = seen.get(uuid)
        if counts is None:
            counts = seen[uuid] = PastCounts()
        if finish == "erred":
            counts.failed += 1
        else:
            counts.done += 1
        counts.busy_s += compute["stop"] - compute["start"]

    def joined(self, address: str) -> None:
        """Note that a worker joined."""
        self._states[address] = self._scheduler.workers[address]

    def announced(self, address: str, used: Collection[str]) -> None:
        """Keep the counts of the devices that a worker gave up; it has others now."""
        self.used.pop(address, None)
        self.used[address] = tuple(used)
        if len(self.used) > _LIMIT:
            del self.used[next(iter(self.used))]
        seen = self._seen.get(address, {})
        for uuid in seen.keys() - used:
            self._add(uuid, PastDevice(address, -1, None, seen.pop(uuid)))

    def forget(self, address: str) -> None:
        """Forget a worker's tasks, because it uses no devices from now on."""
        self._seen.pop(address, None)

    def forget_all(self) -> None:
        """Forget the workers that left: no worker has the plugin now."""
        self.past.clear()
        self.transfers.clear()

    def left(self, address: str) -> None:
        """Keep the counts of a worker that left."""
        seen = self._seen.pop(address, {})
        state = self._states.pop(address, None)
        metrics = {} if state is None else state.metrics
        self._keep_transfers(metrics)
        for row in _rows(metrics, METRIC, _DEVICE):
            counted = asdict(seen.pop(row["uuid"], PastCounts()))
            most = {name: max(row.get(name) or 0, count) for name, count in counted.items()}
            device = PastDevice(address, row["device_id"], row.get("name"), PastCounts(**most))
            self._add(row["uuid"], device)
        for uuid, counts in seen.items():  # it left before a heartbeat told of this device
            self._add(uuid, PastDevice(address, -1, None, counts))

    def _keep_transfers(self, metrics: Mapping[str, Any]) -> None:
        for key, numbers in transfers(metrics):
            if key not in self.transfers and len(self.transfers) == _LIMIT:
                return
            before = self.transfers.get(key, [0] * len(numbers))
            self.transfers[key] = [a + b for a, b in zip(before, numbers, strict=True)]

    def _add(self, uuid: str, device: PastDevice) -> None:
        before = self.past.pop(uuid, None)
        if before is not None:
            sums = {n: c + getattr(before.counts, n) for n, c in asdict(device.counts).items()}
            device.counts = PastCounts(**sums)
            if device.name is None:
                device.device_id, device.name = before.device_id, before.name
        self.past[uuid] = device
        while len(self.past) > _LIMIT:
            del self.past[next(iter(self.past))]


def transfers(metrics: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str], list[float]]]:
    """Yield the ends and transport of each row of a heartbeat, and the numbers of ``Counts``."""
    for name in TRAFFIC:
        for row in _rows(metrics, name, _TRANSFER):
            numbers = [row.get(one, 0) for one in _TRANSFERRED]
            ends = row["source"], row["destination"], row.get("transport") or "peer"
            yield ends, [one if isinstance(one, _NUMBER) else 0 for one in numbers]


def _rows(
    metrics: Mapping[str, Any], name: str, expected: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a metric that can be read; workers may have another version."""
    rows = metrics.get(name)
    for row in rows if isinstance(rows, list | tuple) else ():
        if isinstance(row, Mapping) and all(
            isinstance(row.get(field), kind) for field, kind in expected.items()
        ):
            yield row
