"""The counts of tasks on each device that outlive the workers that ran them.

A worker's heartbeats carry its counts, and the scheduler keeps them when the worker leaves. A
worker that is killed may have run tasks since its last heartbeat: so the scheduler also counts each
outcome that reaches it, and keeps the larger number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from distributed import Scheduler

from dask_devctx.scheduler.rows import DeviceCounts, Transfer, added, known

# The metrics with a row for each pair of devices, in a worker and between workers.
TRAFFIC: Final = ("devctx-traffic", "devctx-ipc")
# The metric with a row for each device in a worker's heartbeat, and the name of the device in a
# task's metadata and in the times of a task that failed.
METRIC: Final = "devctx"
DEVICE: Final = "device"

# The devices, and the pairs of devices, whose counts are kept.
_LIMIT: Final = 4096
_NOTHING: Final = (0, 0, 0.0)


class PastDevice(NamedTuple):
    """The last of the workers that left and had a device, and the sums of their counts."""

    worker: str
    counts: DeviceCounts


class Counts:
    """Counts outcomes of tasks on devices, and keeps the counts of workers that left."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.past: dict[str, PastDevice] = {}  # of workers that left, by UUID
        # The sums of workers that left, by source, destination and transport.
        self.transfers: dict[tuple[str, str, str], Transfer] = {}
        self._scheduler = scheduler
        # The tasks that ended well and that failed, and their seconds, by worker and UUID.
        self._seen: dict[str, dict[str, list[float]]] = {}
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
        failed = finish == "erred"
        about = compute if failed else content.get("metadata") or {}
        uuid = about.get(DEVICE)
        if uuid.__class__ is str:
            seen = self._seen.setdefault(worker, {}).setdefault(uuid, list(_NOTHING))
            seen[failed] += 1
            seen[2] += compute["stop"] - compute["start"]

    def joined(self, address: str) -> None:
        """Note that a worker joined."""
        self._states[address] = self._scheduler.workers[address]

    def announced(self, address: str, used: Collection[str]) -> None:
        """Keep the counts of the devices that a worker gave up; it has others now."""
        seen = self._seen.get(address, {})
        for uuid in seen.keys() - used:
            self._keep(address, DeviceCounts(uuid=uuid), seen.pop(uuid))

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
        for row in transfers(metrics):
            before = self.transfers.get(row.ends)
            self.transfers[row.ends] = row if before is None else added(before, row)
        _shorten(self.transfers)
        rows = (DeviceCounts(**known(DeviceCounts, row)) for row in metrics.get(METRIC, ()))
        told = {row.uuid: row for row in rows}
        for uuid in {**told, **seen}:  # it may leave before a heartbeat
            counts = told.get(uuid) or DeviceCounts(uuid=uuid)
            self._keep(address, counts, seen.get(uuid, _NOTHING))

    def _keep(self, worker: str, told: DeviceCounts, seen: Sequence[float]) -> None:
        """Add the counts of a device: those of a heartbeat, or the larger ones that were seen."""
        row = DeviceCounts(told.device_id, told.uuid, told.name)
        row = replace(
            added(row, told),
            done=max(told.done, int(seen[0])),
            failed=max(told.failed, int(seen[1])),
            busy_s=max(told.busy_s, seen[2]),
        )
        before = self.past.pop(row.uuid, None)
        if before is not None:
            row = added(row, before.counts)
            if row.name is None:
                row = replace(row, device_id=before.counts.device_id, name=before.counts.name)
        self.past[row.uuid] = PastDevice(worker, row)
        _shorten(self.past)


def _shorten(kept: dict[Any, Any]) -> None:
    while len(kept) > _LIMIT:
        del kept[next(iter(kept))]


def transfers(metrics: Mapping[str, Any]) -> Iterator[Transfer]:
    """Yield the transfers that a worker's heartbeat tells of."""
    for name in TRAFFIC:
        for row in metrics.get(name, ()):
            yield Transfer(**known(Transfer, row))
