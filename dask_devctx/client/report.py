"""The report of a cluster's devices: the tasks that ran there, and the values that moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import InitVar, asdict, astuple, dataclass, field
from typing import Any, Literal

from distributed import Client, Scheduler, Worker
from distributed.deploy import Cluster

from dask_devctx.client import rendering
from dask_devctx.client.live import refuse_unusable
from dask_devctx.plugin import DevicePlugin
from dask_devctx.scheduler.counts import PastDevice
from dask_devctx.scheduler.rows import (
    DeviceCounts,
    TaskRun,
    Transfer,
    added,
    known,
)

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
class ReportedRefusal:
    """A task that failed before it had a device, for example because no worker has the device.

    Parameters
    ----------
    key, prefix
        Its key, and the common name of tasks of its kind.
    reason, worker
        The error as text, and its worker's address.
    """

    key: Hashable
    prefix: str
    reason: str
    worker: str


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


@dataclass(repr=False, eq=False)
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
        A row for each pair of devices between which values moved, and for each transport.
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

    tasks: InitVar[Sequence[ReportedTask]] = ()
    devices: Sequence[ReportedDevice] = field(default_factory=list)
    refused: Sequence[ReportedRefusal] = field(default_factory=list)
    workers: Mapping[str, bool] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)
    transfers: Sequence[ReportedTransfer] = field(default_factory=list)
    waiting: Mapping[str, str] = field(default_factory=dict)
    without_device: Sequence[ReportedTask] = field(default_factory=list)
    hosted: int = 0
    lost: Sequence[LostWorker] = field(default_factory=list)
    failures: Sequence[FailedDevice] = field(default_factory=list)
    unplaced: Mapping[tuple[str, str], int] = field(default_factory=dict)
    by: By = "device"

    def __post_init__(self, tasks: Sequence[ReportedTask]) -> None:
        super().__init__(tasks)

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
    # A worker that restarts, or has another version of this package, must not hide the others.
    answers = sorted((await client.run(_of_worker, on_error="return")).items())
    silent = {w: repr(one) for w, one in answers if isinstance(one, BaseException)}
    workers = {w: one is not None for w, one in answers if w not in silent}
    found = [(w, one) for w, one in answers if workers.get(w)]
    of_scheduler: Any = await client.run_on_scheduler(_of_scheduler)
    past, moved, lost, unplaced, failures = of_scheduler
    tasks = [
        _task(run, w, one.get("more", {}).get(n, ()))
        for w, one in found
        for n, run in enumerate(one["runs"])
    ]
    tasks.sort(key=lambda task: task.start or 0.0)
    devices = [
        ReportedDevice(**known(DeviceCounts, row), worker=w, worker_name=one["name"])
        for w, one in found
        for row in one["devices"]
    ]
    transfers = [(w, known(Transfer, row)) for w, one in found for row in one["transfers"]]
    transfers += [("", asdict(one)) for one in moved.values()]
    return Report(
        [task for task in tasks if task.uuid is not None],
        _with_past(devices, past),
        [ReportedRefusal(*(*task[:3], w)) for w, one in found for task in one["refused"]],
        workers,
        silent,
        [ReportedTransfer(**row, worker=w) for w, row in transfers],
        waiting={w: text for w, one in found if (text := one.get("waiting"))},
        without_device=[task for task in tasks if task.uuid is None],
        hosted=sum(one["without_device"] for _, one in found),
        lost=[LostWorker(*one) for one in lost],
        failures=[FailedDevice(*one) for one in failures],
        unplaced=unplaced,
        by=by,
    )


def _task(run: Sequence[Any], worker: str, more: Sequence[int]) -> ReportedTask:
    first = run[TaskRun.__slots__.index("device_id")]  # a row may lack its last fields
    own: Any = {"worker": worker, "device_ids": () if first is None else (first, *more)}
    return ReportedTask(*run, **own)


def _with_past(
    devices: Sequence[ReportedDevice], past: Mapping[str, PastDevice]
) -> list[ReportedDevice]:
    """Return the devices, each with the counts of workers that left."""
    missing = dict(past)
    rows = list(devices)
    for n, device in enumerate(rows):
        if before := missing.pop(device.uuid, None):
            rows[n] = added(device, before.counts)
    gone = (ReportedDevice(*(*astuple(row), w, w, False)) for w, row in missing.values())
    return [*rows, *gone]


def _of_scheduler(dask_scheduler: Scheduler) -> Any:
    """Return the counts of workers that left, and the tasks that no worker may run."""
    routing = dask_scheduler.plugins.get("devctx-routing")
    if routing is None:
        return {}, {}, [], {}, []
    unplaced = Counter(
        (ts.prefix.name, f"resources={ts.resource_restrictions}")
        for ts in dask_scheduler.unrunnable
        if ts.resource_restrictions
    )
    lost, used = [], routing.counts.used
    for at, event in dask_scheduler.get_events("all"):
        is_left = isinstance(event, dict) and event.get("action") == "remove-worker"
        if is_left and not event["expected"]:
            worker, kinds = event["worker"], ("processing-tasks", "lost-computed-tasks")
            lost.append((worker, at, used.get(worker, ()), *(len(event[k]) for k in kinds)))
    failures = [(worker, at, *row[:3], tuple(row[4])) for worker, at, row in routing.failures]
    return routing.counts.past, routing.counts.transfers, lost[-5:], dict(unplaced), failures


_of_scheduler.__module__ = "__main__"  # sent by value, to a scheduler without this package too


async def _of_worker(dask_worker: Worker) -> dict[str, Any] | None:
    # A coroutine, so that it runs on the worker's event loop.
    plugin = dask_worker.plugins.get(DevicePlugin.name)
    if not isinstance(plugin, DevicePlugin):
        return None
    found = plugin.report()
    return None if found is None else {**found, "name": str(dask_worker.name)}
