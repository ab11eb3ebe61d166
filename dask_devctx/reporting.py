"""What ran where on a whole cluster, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from distributed import Client, Worker

from dask_devctx.plugin import DevicePlugin
from dask_devctx.record import TaskRun
from dask_devctx.tables import aligned, nbytes_text


@dataclass(frozen=True)
class ReportedTask(TaskRun):
    """One task that ran: :class:`~dask_devctx.record.TaskRun`, and where.

    Parameters
    ----------
    worker
        The worker's address.
    """

    worker: str


@dataclass(frozen=True)
class ReportedDevice:
    """One device of one worker, as its metrics say; see :class:`~dask_devctx.record.Record`."""

    worker: str
    device_id: int
    uuid: str
    name: str | None
    queued: int
    running: int
    done: int
    failed: int
    busy_s: float
    memory_free: int | None
    memory_total: int | None


class Report(list[ReportedTask]):
    """The tasks that ran on a cluster's devices, the earliest first; its text is a table.

    ``pandas.DataFrame(report)`` makes a data frame of it, ``pandas.DataFrame(report.devices)`` one
    of the devices.

    Attributes
    ----------
    devices
        A row for each device of each worker.
    """

    def __init__(
        self, tasks: Sequence[ReportedTask] = (), devices: Sequence[ReportedDevice] = ()
    ) -> None:
        super().__init__(tasks)
        self.devices = list(devices)

    def __str__(self) -> str:
        """Return a line for each device, and one for each kind of task on it."""
        rows: list[Sequence[object]] = []
        for device in self.devices:
            memory = f"{nbytes_text(device.memory_free)} of {nbytes_text(device.memory_total)} free"
            state = (device.queued, device.running, device.done, device.failed)
            where = (device.worker, f"cuda:{device.device_id}", device.uuid)
            rows.append((*where, "all", *state, round(device.busy_s, 3), memory))
            runs = [run for run in self if (run.worker, run.uuid) == (device.worker, device.uuid)]
            for prefix in sorted({run.prefix for run in runs}):
                same = [run for run in runs if run.prefix == prefix]
                failed = sum(run.outcome == "error" for run in same)
                busy_s = sum(run.stop - run.start for run in same if run.start and run.stop)
                counts = ("", "", len(same) - failed, failed)
                rows.append(("", "", "", prefix, *counts, round(busy_s, 3), ""))
        head = ("worker", "device", "uuid", "tasks", "queued", "running", "done", "failed")
        return aligned((*head, "busy s", "memory"), rows)


def report(client: Client) -> Any:
    """Return what ran where.

    Parameters
    ----------
    client
        A client of the cluster; an asynchronous one gives an awaitable.

    Returns
    -------
    Report
        The tasks, and under ``devices`` the devices. A worker remembers its latest tasks,
        ``devctx.history`` of them; one that has left is not in it.

    Examples
    --------
    >>> import dask
    >>> from dask_devctx import LocalDeviceCluster
    >>> with LocalDeviceCluster(processes=False, dashboard_address=":0") as cluster:
    ...     with Client(cluster) as client:
    ...         with dask.annotate(device=2):
    ...             _ = client.submit(sum, [1, 2], key="sum-1").result()
    ...         [(task.key, task.device_id) for task in report(client)]
    [('sum-1', 2)]
    """
    return client.sync(_report, client)


async def _report(client: Client) -> Report:
    tasks: list[ReportedTask] = []
    devices: list[ReportedDevice] = []
    for worker, answer in sorted((await client.run(_of_worker)).items()):
        tasks += [ReportedTask(worker=worker, **run) for run in answer["runs"]]
        devices += [ReportedDevice(worker=worker, **row) for row in answer["devices"]]
    tasks.sort(key=lambda task: task.start or 0.0)
    return Report(tasks, devices)


async def _of_worker(dask_worker: Worker) -> dict[str, list[dict[str, Any]]]:
    # A coroutine, so that it runs on the worker's event loop, as the record asks.
    plugin = dask_worker.plugins.get(DevicePlugin.name)
    record = getattr(plugin, "record", None)
    if record is None:
        return {"runs": [], "devices": []}
    names = [field.name for field in fields(TaskRun)]
    runs = [{name: getattr(run, name) for name in names} for run in record.runs]
    return {"runs": runs, "devices": record.metrics(dask_worker)}
