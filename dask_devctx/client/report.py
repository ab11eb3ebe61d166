"""The report of a cluster's devices: the tasks that ran there, and the values that moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from distributed import Client, Worker
from distributed.deploy import Cluster

from dask_devctx.client import rendering
from dask_devctx.client.past import of_scheduler, refuse_unusable
from dask_devctx.plugin import DevicePlugin
from dask_devctx.scheduler.counts import PastCounts
from dask_devctx.scheduler.rows import DeviceCounts, RefusedTask, TaskRun, Transfer, known

By = Literal["device", "prefix"]


@dataclass(frozen=True, slots=True)
class ReportedTask(TaskRun):
    """A task that ran, or that failed.

    Parameters
    ----------
    worker
        Its worker's address.
    device_ids
        The ordinals of all its devices, in the worker's process. The other fields are those of its
        first device.
    """

    worker: str = ""
    device_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportedRefusal(RefusedTask):
    """A task that failed before it had a device, and its worker's address."""

    worker: str = ""


@dataclass(frozen=True, slots=True)
class ReportedDevice(DeviceCounts):
    """A device of a worker.

    Parameters
    ----------
    worker
        The worker's address.
    worker_name
        The worker's name.
    present
        Whether the worker is there. A device that no worker has any more keeps its counts.
    """

    worker: str = ""
    worker_name: str = ""
    present: bool = True


@dataclass(frozen=True, slots=True)
class ReportedTransfer(Transfer):
    """Values that went from one device to another, and the address of the worker that counted.

    The address is empty for the transfers of workers that left.
    """

    worker: str = ""


@dataclass(frozen=True, slots=True)
class LostWorker:
    """A worker that left unexpectedly.

    Parameters
    ----------
    worker
        Its address.
    time
        The time, in seconds since the epoch by the scheduler's clock.
    uuids
        The UUIDs of its devices.
    tasks
        The number of tasks that it had to run.
    results
        The number of results that were there alone: dask computes them again if they are needed.
    """

    worker: str
    time: float
    uuids: tuple[str, ...]
    tasks: int
    results: int


@dataclass(frozen=True, slots=True)
class FailedDevice:
    """A device that failed, so that its worker ended.

    Parameters
    ----------
    worker
        The worker's address.
    time
        The time, in seconds since the epoch by the scheduler's clock.
    device, uuid, status, suspects
        As in :class:`~dask_devctx.DeviceFailedError`.
    """

    worker: str
    time: float
    device: str
    uuid: str
    status: str
    suspects: tuple[str, ...]


class Report(list[ReportedTask]):
    """The tasks that ran on a cluster's devices, the earliest first.

    Its text has a line for each device and one for the cluster. In notebooks it is a table with
    bars. ``pandas.DataFrame(report)`` makes a data frame of the tasks, and
    ``pandas.DataFrame(report.devices)`` one of the devices.

    Attributes
    ----------
    devices
        A row for each device of each worker. The counts of workers that left are in the row of a
        worker that has the same device.
    transfers
        A row for each pair of devices between which values moved, and for each way.
    refused
        The tasks that failed before they could run, because they got no device.
    without_device
        The latest tasks that ran on no device.
    hosted
        The number of all tasks that ran on no device, on workers that are there.
    workers
        Whether each worker runs the plugin, by its address.
    silent
        The reason why a worker did not answer, by its address. The other attributes lack it.
    lost
        The latest workers that left unexpectedly, each a :class:`LostWorker`.
    failures
        The latest devices that failed, each a :class:`FailedDevice`.
    unplaced
        The numbers of tasks whose resources no worker has, by the prefix of their keys and by these
        resources, as a text.
    waiting
        The actors that hold devices for which tasks wait, and the remedy, as a text by the worker's
        address.
    by
        ``"device"`` or ``"prefix"``: the lines of its text.
    """

    def __init__(
        self,
        tasks: Sequence[ReportedTask] = (),
        devices: Sequence[ReportedDevice] = (),
        refused: Sequence[ReportedRefusal] = (),
        workers: Mapping[str, bool] | None = None,
        silent: Mapping[str, str] | None = None,
        transfers: Sequence[ReportedTransfer] = (),
        *,
        waiting: Mapping[str, str] | None = None,
        without_device: Sequence[ReportedTask] = (),
        hosted: int = 0,
        lost: Sequence[LostWorker] = (),
        failures: Sequence[FailedDevice] = (),
        unplaced: Mapping[tuple[str, str], int] | None = None,
        by: By = "device",
    ) -> None:
        super().__init__(tasks)
        self.devices = list(devices)
        self.refused = list(refused)
        self.transfers = list(transfers)
        self.without_device = list(without_device)
        self.hosted = hosted
        self.lost = list(lost)
        self.failures = list(failures)
        self.unplaced = dict(unplaced or {})
        self.workers = dict(workers or {})
        self.silent = dict(silent or {})
        self.waiting = dict(waiting or {})
        self.by = by

    def __repr__(self) -> str:
        return str(self)  # a list of thousands of tasks is unreadable

    def __str__(self) -> str:
        return rendering.text(self)

    def _repr_html_(self) -> str:
        return rendering.html(self)


def report(client: Client | Cluster, *, by: By = "device") -> Report:
    """Return the tasks that ran on each device of a cluster.

    Parameters
    ----------
    client
        A client of the cluster, or the cluster. An asynchronous client gives an awaitable.
    by
        The lines of the report's text: ``"device"``, or ``"prefix"`` for a line for each kind of
        task. The report's content is the same.

    Returns
    -------
    Report
        The tasks; ``devices`` has the devices, ``transfers`` the values that moved between them,
        ``refused`` the tasks that got no device, and ``without_device`` the tasks that ran on none.
        A worker remembers its latest tasks, ``devctx.history`` of them; tasks of a worker that left
        are not in it. The counts of the devices include the workers that left.

    Raises
    ------
    TypeError
        ``client`` is neither a client nor a cluster.
    ValueError
        ``by`` is neither, or the client is closed.

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
    if by not in ("device", "prefix"):
        raise ValueError(f"by must be 'device' or 'prefix', got {by!r}")
    if isinstance(client, Cluster) and not client.asynchronous:
        with Client(client, set_as_default=False) as own:
            return report(own, by=by)
    refuse_unusable(client, "report(Client(cluster))")
    found: Report = client.sync(_report, client, by)
    return found


async def _report(client: Client, by: By) -> Report:
    tasks: list[ReportedTask] = []
    devices: list[ReportedDevice] = []
    transfers: list[ReportedTransfer] = []
    refused: list[ReportedRefusal] = []
    workers: dict[str, bool] = {}
    silent: dict[str, str] = {}
    waiting: dict[str, str] = {}
    hosted = 0
    # A worker that restarts, or has another version of this package, must not hide the others.
    answers = await client.run(_of_worker, on_error="return")
    for worker, answer in sorted(answers.items()):
        if isinstance(answer, BaseException):
            silent[worker] = repr(answer)
            continue
        workers[worker] = answer is not None
        if answer is not None:
            who = {"worker": worker, "worker_name": answer["name"]}
            more = answer.get("more", {})
            tasks += [_task(r, worker, more.get(n, ())) for n, r in enumerate(answer["runs"])]
            devices += [
                ReportedDevice(**known(DeviceCounts, row), **who) for row in answer["devices"]
            ]
            transfers += [
                ReportedTransfer(**known(Transfer, row), worker=worker)
                for row in answer["transfers"]
            ]
            refused += [ReportedRefusal(*(*task[:3], worker)) for task in answer["refused"]]
            hosted += answer["without_device"]
            if text := answer.get("waiting"):
                waiting[worker] = text
    past, moved, lost, unplaced, failures = await of_scheduler(client)
    devices = _with_past(devices, past)
    for (source, destination, way), (nbytes, copies, saved, seconds, *measured) in moved.items():
        counts = int(nbytes), int(copies), int(saved), seconds
        timed = int(measured[0]), measured[1]
        transfers.append(ReportedTransfer(source, destination, way, *counts, None, *timed))
    tasks.sort(key=lambda task: task.start or 0.0)
    on_devices = [task for task in tasks if task.uuid is not None]
    on_none = [task for task in tasks if task.uuid is None]
    return Report(
        on_devices,
        devices,
        refused,
        workers,
        silent,
        transfers,
        waiting=waiting,
        without_device=on_none,
        hosted=hosted,
        lost=[LostWorker(*one) for one in lost],
        failures=[FailedDevice(*one) for one in failures],
        unplaced=unplaced,
        by=by,
    )


def _task(run: Sequence[Any], worker: str, more: Sequence[int]) -> ReportedTask:
    # A row may lack its last fields.
    found: dict[str, Any] = dict(zip(TaskRun.__slots__, run, strict=False))
    first = found["device_id"]
    device_ids = () if first is None else (first, *more)
    return ReportedTask(**found, worker=worker, device_ids=device_ids)


def _with_past(devices: Sequence[ReportedDevice], past: Mapping[str, Any]) -> list[ReportedDevice]:
    """Return the devices, each with the counts of workers that left."""
    rows, missing = [], dict(past)
    for device in devices:
        before = missing.pop(device.uuid, None)
        if before is not None:
            sums = {
                one.name: getattr(device, one.name) + getattr(before.counts, one.name)
                for one in fields(PastCounts)
            }
            device = replace(device, **sums)
        rows.append(device)
    for uuid, before in missing.items():
        counts = {one.name: getattr(before.counts, one.name) for one in fields(PastCounts)}
        who: Any = {"worker": before.worker, "worker_name": before.worker, "present": False}
        rows.append(ReportedDevice(before.device_id, uuid, before.name, **counts, **who))
    return rows


async def _of_worker(dask_worker: Worker) -> dict[str, Any] | None:
    plugin = dask_worker.plugins.get(DevicePlugin.name)
    if not isinstance(plugin, DevicePlugin):
        return None
    found = plugin.report()
    return None if found is None else {**found, "name": str(dask_worker.name)}
