"""The tasks that ran on each device of a worker: counts for its metrics, and the latest tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dask_devctx import driver
from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.tasks import add_metadata

# The key of the device in a task's metadata and in a task's row.
METADATA: Final = "device"


@dataclass(frozen=True)
class TaskRun:
    """One task that ran, or that failed.

    Parameters
    ----------
    key
        Its key.
    prefix
        The common name of tasks of its kind.
    uuid
        The device's UUID.
    device_id
        The device's ordinal in the worker's process.
    start, stop
        The time of its start and end, in seconds since the epoch by the scheduler's clock; None if
        it failed before it could run.
    outcome
        ``"memory"`` or ``"error"``.
    """

    key: Hashable
    prefix: str
    uuid: str
    device_id: int
    start: float | None
    stop: float | None
    outcome: str


@dataclass(frozen=True)
class RefusedTask:
    """One task that failed before it had a device, for example because no worker has the device.

    Parameters
    ----------
    key
        Its key.
    prefix
        The common name of tasks of its kind.
    reason
        The error as text.
    """

    key: Hashable
    prefix: str
    reason: str


@dataclass
class _Tally:
    """One device's tasks."""

    device: Device
    under_way: int = 0
    done: int = 0
    failed: int = 0
    busy_s: float = 0.0


class Record:
    """Records which tasks ran on each device of a worker.

    Parameters
    ----------
    devices
        The worker's devices.
    tasks_per_device
        How many tasks run on a device at a time.
    history
        How many tasks are remembered.

    Attributes
    ----------
    runs
        The latest tasks, in order of their ends.
    refusals
        The latest tasks that got no device.

    Notes
    -----
    Use it only on the worker's event loop. :meth:`placed` also adds the device's UUID to the task's
    metadata, which readers of dask's own task stream see.
    """

    metric = "devctx"

    def __init__(self, devices: Sequence[Device], tasks_per_device: int, history: int) -> None:
        self.runs: deque[TaskRun] = deque(maxlen=history)
        self.refusals: deque[RefusedTask] = deque(maxlen=history)
        self._tallies = {device: _Tally(device) for device in devices}
        self._tasks_per_device = tasks_per_device

    def placed(self, ts: Any, device: Device, before: Device | None) -> None:
        """Count a task that is about to run on a device, and no longer on its device before."""
        if before is not None:
            self._tallies[before].under_way -= 1
        self._tallies[device].under_way += 1
        add_metadata(ts, METADATA, device.uuid)

    def refused(self, ts: Any, error: Exception) -> None:
        """Note a task that got no device and fails with this error."""
        self.refusals.append(RefusedTask(ts.key, ts.prefix, f"{type(error).__name__}: {error}"))

    def left(self, device: Device, ts: Any) -> TaskRun | None:
        """Count a task that leaves its device; return its run, or None if it did not end.

        Parameters
        ----------
        device
            The device that it leaves.
        ts
            The worker's state of the task, or None if the worker forgot the task.
        """
        tally = self._tallies[device]
        tally.under_way -= 1
        if ts is None or ts.state not in ("memory", "error"):
            return None  # it was given up, started again or seceded: it has no run yet
        run = self.ended(device, ts)
        if run.start is not None and run.stop is not None:
            tally.busy_s += run.stop - run.start
        return run

    def ended(self, device: Device, ts: Any) -> TaskRun:
        """Remember a task that is done or failed; call it directly for a task that seceded."""
        tally = self._tallies[device]
        start = stop = None
        for times in ts.startstops:
            if times["action"] == "compute":
                start, stop = times["start"], times["stop"]
        if ts.state == "error":
            tally.failed += 1
        else:
            tally.done += 1
        run = TaskRun(ts.key, ts.prefix, device.uuid, device.device_id, start, stop, ts.state)
        self.runs.append(run)
        return run

    def report(self) -> dict[str, list[dict[str, Any]]]:
        """Return the latest tasks, the devices' counts and the refusals, as plain data."""
        return {
            "runs": [vars(run) for run in self.runs],
            "devices": self.metrics(None),
            "refused": [vars(task) for task in self.refusals],
        }

    def metrics(self, worker: object) -> list[dict[str, Any]]:
        """Return the heartbeat's rows, one for each device, as plain data.

        ``queued`` and ``running`` count tasks now, ``done`` and ``failed`` since the start.
        ``busy_s`` is the sum of the seconds of tasks that ended. Tasks that seceded do not count,
        because most of them only wait for others. ``memory_free`` and ``memory_total`` are bytes of
        the whole device, or None if NVML does not know them.
        """
        rows = []
        for device, tally in self._tallies.items():
            running = min(tally.under_way, self._tasks_per_device)
            free, total = discovery.memory_info(driver.backend(), device.info) or (None, None)
            rows.append(
                {
                    "device_id": device.device_id,
                    "uuid": device.uuid,
                    "name": device.name,
                    "queued": tally.under_way - running,
                    "running": running,
                    "done": tally.done,
                    "failed": tally.failed,
                    "busy_s": tally.busy_s,
                    "memory_free": free,
                    "memory_total": total,
                }
            )
        return rows
