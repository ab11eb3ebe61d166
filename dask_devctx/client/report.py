"""A table of the tasks that ran on the devices of a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distributed import Client, Worker

from dask_devctx.client.tables import aligned, nbytes_text
from dask_devctx.plugin import DevicePlugin
from dask_devctx.scheduler.rows import DeviceCounts, RefusedTask, TaskRun, Transfer


@dataclass(frozen=True, slots=True)
class ReportedTask(TaskRun):
    """A task that ran, or that failed, and its worker's address."""

    worker: str = ""


@dataclass(frozen=True, slots=True)
class ReportedRefusal(RefusedTask):
    """A task that failed before it had a device, and its worker's address."""

    worker: str = ""


@dataclass(frozen=True, slots=True)
class ReportedDevice(DeviceCounts):
    """A device of a worker, and the worker's address."""

    worker: str = ""


@dataclass(frozen=True, slots=True)
class ReportedTransfer(Transfer):
    """Values that went from one device to another, and the address of the worker that counted."""

    worker: str = ""


class Report(list[ReportedTask]):
    """The tasks that ran on a cluster's devices, the earliest first; its text is a table.

    ``pandas.DataFrame(report)`` makes a data frame of it, ``pandas.DataFrame(report.devices)`` one
    of the devices.

    Attributes
    ----------
    devices
        A row for each device of each worker.
    transfers
        A row for each pair of devices between which values moved, and for each way.
    refused
        The tasks that failed before they could run, because they got no device.
    workers
        Whether each worker runs the plugin, by its address.
    silent
        The reason why a worker did not answer, by its address. The other attributes lack it.
    """

    def __init__(
        self,
        tasks: Sequence[ReportedTask] = (),
        devices: Sequence[ReportedDevice] = (),
        refused: Sequence[ReportedRefusal] = (),
        workers: Mapping[str, bool] | None = None,
        silent: Mapping[str, str] | None = None,
        transfers: Sequence[ReportedTransfer] = (),
    ) -> None:
        super().__init__(tasks)
        self.devices = list(devices)
        self.refused = list(refused)
        self.transfers = list(transfers)
        self.workers = dict(workers or {})
        self.silent = dict(silent or {})

    def __repr__(self) -> str:
        return str(self)  # a list of thousands of tasks is unreadable

    def __str__(self) -> str:
        """Return a line for each device and each kind of task on it, then the problems."""
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
        tables = [aligned((*head, "busy s", "memory"), rows)]
        if self.transfers:
            tables.append(aligned(_TRANSFERS, [_transfer_row(row) for row in self.transfers]))
        return "\n".join([*tables, *self._amiss()])

    def _amiss(self) -> Iterator[str]:
        same = Counter((task.worker, task.prefix, task.reason) for task in self.refused)
        for (worker, prefix, reason), count in same.items():
            yield f"refused on {worker}: {count} of {prefix}: {reason}"
        for worker, reason in self.silent.items():
            yield f"no answer from {worker}: {reason}"
        without = [worker for worker, runs in self.workers.items() if not runs]
        if not self.workers and not self.silent:
            yield "the cluster has no workers"
        elif len(without) == len(self.workers) > 0:
            yield "no worker runs the plugin: client.register_plugin(DevicePlugin())"
        elif without:
            yield f"without the plugin: {', '.join(without)}"
        having = {device.worker for device in self.devices}
        bare = [worker for worker, runs in self.workers.items() if runs and worker not in having]
        if bare:
            yield f"with the plugin and without devices: {', '.join(bare)}"


_TRANSFERS = ("worker", "from", "to", "way", "moved", "values", "saved", "because")


def _transfer_row(row: ReportedTransfer) -> Sequence[object]:
    moved = nbytes_text(row.nbytes)
    where = row.worker, row.source, row.destination
    return *where, row.way, moved, row.copies, row.saved, row.reason or ""


def report(client: Client) -> Any:
    """Return the tasks that ran on each device of a cluster.

    Parameters
    ----------
    client
        A client of the cluster; an asynchronous one gives an awaitable.

    Returns
    -------
    Report
        The tasks; ``devices`` has the devices, ``transfers`` the values that moved between them,
        and ``refused`` the tasks that got no device. A
        worker remembers its latest tasks, ``devctx.history`` of them; one that has left is not in
        it.

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
    transfers: list[ReportedTransfer] = []
    refused: list[ReportedRefusal] = []
    workers: dict[str, bool] = {}
    silent: dict[str, str] = {}
    # A worker that restarts, or has another version of this package, must not hide the others.
    answers = await client.run(_of_worker, on_error="return")
    for worker, answer in sorted(answers.items()):
        if isinstance(answer, BaseException):
            silent[worker] = repr(answer)
            continue
        workers[worker] = answer is not None
        if answer is not None:
            tasks += [ReportedTask(*(*run, worker)) for run in answer["runs"] if run[2] is not None]
            devices += [ReportedDevice(worker=worker, **row) for row in answer["devices"]]
            transfers += [ReportedTransfer(worker=worker, **row) for row in answer["transfers"]]
            refused += [ReportedRefusal(*(*task, worker)) for task in answer["refused"]]
    tasks.sort(key=lambda task: task.start or 0.0)
    return Report(tasks, devices, refused, workers, silent, transfers)


async def _of_worker(dask_worker: Worker) -> dict[str, Any] | None:
    # A coroutine, so that it runs on the worker's event loop.
    plugin = dask_worker.plugins.get(DevicePlugin.name)
    return plugin.report() if isinstance(plugin, DevicePlugin) else None
