"""The tasks on each device of a worker: counts for its metrics, and rows for its history."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Final
from weakref import WeakKeyDictionary

from distributed import Worker

from dask_devctx import driver
from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.tasks import add_metadata
from dask_devctx.dask_internals.worker import metric
from dask_devctx.errors import DevctxError
from dask_devctx.scheduler.counts import DEVICE, METRIC
from dask_devctx.scheduler.rows import Sample, TaskRun
from dask_devctx.worker.metrics.history import History

# How long NVML's answer about other processes is used: it takes longer than the others.
_PROCESSES_AGE_S: Final = 5.0
# The `waited` of a task that did not run on this worker's threads.
_NO_WAIT: Final = (0.0, 0.0, 0.0, None)
# The longest text of an exception.
_TEXT: Final = 2_000
# The fields of the row of a task's only device, or first one.
_ONE_DEVICE: Final = len(TaskRun.__slots__) - 1
_DEVICE_ID: Final = TaskRun.__slots__.index("device_id")
# The keys of a device's row that a sample has too.
_SAMPLED: Final = tuple(name for name in Sample.__slots__ if name not in ("uuid", "time"))


@dataclass
class _Tally:
    """One device's tasks."""

    device: Device
    under_way: int = 0
    done: int = 0
    failed: int = 0
    busy_s: float = 0.0
    place_s: float = 0.0
    inputs_s: float = 0.0
    memory_s: float = 0.0
    occupied_s: float = 0.0
    # The moment since which it has tasks, if it has any, and the moment at which it was asked for
    # the memory of other processes.
    since: float = 0.0
    asked_at: float = float("-inf")
    others: int | None = None

    def begin(self) -> None:
        """Count a task that is about to run."""
        if not self.under_way:
            self.since = monotonic()
        self.under_way += 1

    def leave(self) -> None:
        """Count a task no longer."""
        self.under_way -= 1
        if not self.under_way:
            self.occupied_s += monotonic() - self.since


# The counts of each worker by device: a plugin that takes another one's place goes on with them.
_tallies: WeakKeyDictionary[Worker, dict[Device, _Tally]] = WeakKeyDictionary()


def _going_on(worker: Worker, devices: Sequence[Device]) -> dict[Device, _Tally]:
    """Return a worker's counts for some devices; those for others are forgotten."""
    before, now = _tallies.get(worker, {}), monotonic()
    found = {}
    for device in devices:
        tally = before.get(device, _Tally(device))
        if tally.under_way:
            tally.occupied_s += now - tally.since
        found[device] = replace(tally, under_way=0)
    _tallies[worker] = found
    return found


class Record:
    """Records which tasks ran on each device of a worker.

    Parameters
    ----------
    worker
        The worker; its counts go on if it had a plugin before.
    devices
        The worker's devices.
    tasks_per_device
        How many tasks run on a device at a time.
    history
        Gets a row for each task that ends.
    remembered
        How many refused tasks are remembered.

    Attributes
    ----------
    refusals
        The latest tasks that got no device: key, prefix and reason.
    without_device
        The number of tasks that ended and ran on no device.
    memory
        Functions that return a device's bytes of some kind: ``"limit"``, ``"held"``, ``"copies"``,
        ``"spilled"`` or ``"staging"``.
    retried
        How often memory ran out, by device.
    waiting
        Returns how many tasks wait for a place on a device.

    Notes
    -----
    Use it only on the worker's event loop. :meth:`placed` also adds the device's UUID to the task's
    metadata, which readers of dask's own task stream see.
    """

    metric = METRIC

    def __init__(
        self,
        worker: Worker,
        devices: Sequence[Device],
        tasks_per_device: int,
        history: History,
        remembered: int,
    ) -> None:
        self.refusals: deque[tuple[Hashable, str, str]] = deque(maxlen=remembered)
        self.without_device = 0
        self.memory: dict[str, Callable[[Device], int | None]] = {}
        self.retried: Mapping[Device, int] = {}
        self.waiting: Callable[[Device], int] = lambda device: 0
        self._worker = worker
        self._history = history
        self._tallies = _going_on(worker, devices)
        self._ids = {device: (device.uuid, device.device_id) for device in devices}
        self._latest: list[dict[str, Any]] = []
        # The further devices of tasks that have several, by key.
        self._more: dict[Hashable, tuple[Device, ...]] = {}
        self._tasks_per_device = tasks_per_device

    def placed(
        self, ts: Any, device: Device, before: Device | None, more: Sequence[Device] = ()
    ) -> None:
        """Count a task that is about to run on a device, and no longer on its device before.

        Parameters
        ----------
        ts
            The worker's state of the task.
        device, before
            Its first device, and the first device that it had before.
        more
            Its further devices.
        """
        if before is not None:
            self._leave(ts.key, before)
        self._tallies[device].begin()
        if more:
            self._more[ts.key] = tuple(more)
            for one in more:
                self._tallies[one].begin()
        add_metadata(ts, DEVICE, device.uuid)

    def refused(self, ts: Any, error: Exception) -> None:
        """Note a task that got no device and fails with this error."""
        notes = () if isinstance(error, DevctxError) else getattr(error, "__notes__", ())
        reason = ". ".join([f"{type(error).__name__}: {error}", *notes])
        self.refusals.append((ts.key, ts.prefix, reason))
        self._history.happened("refused", key=ts.key, text=reason)

    def left(self, device: Device, key: Hashable, ts: Any) -> float | None:
        """Count a task that leaves its devices; return its seconds, or None if it did not end.

        Parameters
        ----------
        device
            Its first device.
        key
            Its key.
        ts
            The worker's state of the task, or None if the worker forgot the task.
        """
        more = self._leave(key, device)
        if ts is None or ts.state not in ("memory", "error"):
            return None  # it was given up, started again or seceded: it has no run yet
        seconds = self.ended(device, ts, more)
        if seconds is not None:
            for one in (device, *more):
                self._tallies[one].busy_s += seconds
        return seconds

    def ended(self, device: Device | None, ts: Any, more: Sequence[Device] = ()) -> float | None:
        """Remember a task that is done or failed; return its seconds, or None if it did not run.

        :meth:`left` calls this. Call it directly for a task that seceded, and, with None, for a
        task without a device.
        """
        start = stop = None
        failed = ts.state == "error"
        for times in ts.startstops:
            if times["action"] == "compute":
                start, stop = times["start"], times["stop"]
                if failed and device is not None:  # the scheduler gets no metadata of it
                    times[DEVICE] = device.uuid
        waited: tuple[float, float, float, int | None] = _NO_WAIT
        uuid = device_id = None
        if device is None:
            self.without_device += 1
        else:
            uuid, device_id = self._ids[device]
            waited = getattr(ts.run_spec, "waited", _NO_WAIT)
            place_s, inputs_s, memory_s, _ = waited
            tally = self._tallies[device]
            tally.place_s += place_s
            tally.inputs_s += inputs_s
            tally.memory_s += memory_s
            if failed:
                tally.failed += 1
            else:
                tally.done += 1
        if failed:
            text = getattr(ts, "exception_text", "")
            self._history.happened("error", uuid, ts.key, text[:_TEXT])
        key, prefix, rows = ts.key, ts.prefix, self._history.tasks
        rows.append((key, prefix, uuid, device_id, start, stop, ts.state, *waited))
        for nth, one in enumerate(more, 1):
            rows.append((key, prefix, *self._ids[one], start, stop, ts.state, *waited, nth))
        return None if start is None or stop is None else stop - start

    def _leave(self, key: Hashable, device: Device) -> Sequence[Device]:
        """Count a task no longer on its devices; return those beside the first."""
        self._tallies[device].leave()
        more = self._more.pop(key, ()) if self._more else ()
        for one in more:
            self._tallies[one].leave()
        return more

    def report(self) -> dict[str, Any]:
        """Return the latest tasks, the devices' counts and the refusals, as plain data."""
        # A task of several devices has a row for each of them, one after the other.
        runs: list[tuple[Any, ...]] = []
        more: dict[int, list[int]] = {}
        for row in self._history.tasks.since(0)[0]:
            if len(row) <= _ONE_DEVICE:
                runs.append(row)
            elif runs and runs[-1][0] == row[0]:  # else the row of its first device was dropped
                more.setdefault(len(runs) - 1, []).append(row[_DEVICE_ID])
        return {
            "runs": runs,
            "more": more,
            "devices": self.rows(),
            "refused": list(self.refusals),
            "without_device": self.without_device,
        }

    def metrics(self, worker: object) -> list[dict[str, Any]]:
        """Return the heartbeat's rows, one for each device; they are samples of the history too."""
        rows, now = self.rows(), self._history.now()
        for row in rows:
            self._history.samples.append((row["uuid"], now, *map(row.__getitem__, _SAMPLED)))
        self._latest = rows
        return rows

    @contextmanager
    def in_heartbeats(self) -> Iterator[None]:
        """While it is open, the worker's heartbeats carry the counts.

        Numbers and text are columns of dask's page of the workers. A worker without devices has
        none of them.
        """
        columns = {
            "devices": lambda worker: ", ".join(map(str, self._tallies)),
            "device tasks": lambda worker: self._sum("running", "queued"),
            "device GiB in use": lambda worker: round(
                (self._sum("memory_total") - self._sum("memory_free")) / 2**30, 2
            ),
        }
        with ExitStack() as steps:
            steps.enter_context(metric(self._worker, self.metric, self.metrics))
            for name, column in columns.items() if self._tallies else ():
                steps.enter_context(metric(self._worker, name, column))
            yield

    def _sum(self, *names: str) -> int:
        return sum(row[name] or 0 for row in self._latest for name in names)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each device, as plain data.

        The keys are the fields of :class:`~dask_devctx.scheduler.rows.DeviceCounts`.
        """
        backend, now = driver.backend(), monotonic()
        rows = []
        for device, tally in self._tallies.items():
            queued = min(self.waiting(device), tally.under_way)
            free, total = discovery.memory_info(backend, device.info) or (None, None)
            utilization, bandwidth = discovery.utilization(backend, device.info) or (None, None)
            if now - tally.asked_at > _PROCESSES_AGE_S:
                tally.asked_at = now
                tally.others = discovery.memory_of_others(backend, device.info)
            under_way_s = now - tally.since if tally.under_way else 0.0
            memory = {name: function(device) for name, function in self.memory.items()}
            rows.append(
                {
                    "device_id": device.device_id,
                    "uuid": device.uuid,
                    "name": device.name,
                    "queued": queued,
                    "running": tally.under_way - queued,
                    "done": tally.done,
                    "failed": tally.failed,
                    "busy_s": tally.busy_s,
                    "memory_free": free,
                    "memory_total": total,
                    "occupied_s": tally.occupied_s + under_way_s,
                    "memory_limit": memory.get("limit"),
                    "memory_held": memory.get("held"),
                    "memory_copies": memory.get("copies"),
                    "memory_spilled": memory.get("spilled"),
                    "memory_others": tally.others,
                    "utilization": utilization,
                    "bandwidth": bandwidth,
                    "place_s": tally.place_s,
                    "inputs_s": tally.inputs_s,
                    "memory_s": tally.memory_s,
                    "out_of_memory": self.retried.get(device, 0),
                    "spills": memory.get("spills", 0),
                    "spilled_nbytes": memory.get("spilled_nbytes", 0),
                    "unspills": memory.get("unspills", 0),
                    "unspilled_nbytes": memory.get("unspilled_nbytes", 0),
                    "spills_for_retries": memory.get("spills_for_retries", 0),
                    "memory_staging": memory.get("staging"),
                }
            )
        return rows
