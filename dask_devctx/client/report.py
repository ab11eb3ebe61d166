"""The report of a cluster's devices: the tasks that ran there, and the values that moved."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import reduce
from html import escape
from textwrap import wrap
from typing import Any, Final

from distributed import Client, Scheduler, Status, Worker
from distributed.deploy import Cluster

from dask_devctx.client import live
from dask_devctx.client.live import ReportedDevice
from dask_devctx.dask_internals.scheduler import ask
from dask_devctx.errors import counted, nbytes_text
from dask_devctx.plugin import DevicePlugin
from dask_devctx.scheduler.history import DeviceHistory
from dask_devctx.scheduler.messages import ACTION
from dask_devctx.scheduler.rows import DeviceCounts, Incident, TaskRun, Transfer, added, known

_COLUMNS: Final = 100
# A rate of fewer bytes says nothing about a link.
_LEAST_TIMED: Final = 2**20
# So many kinds of refused tasks are named.
_MOST: Final = 5
_BY_DEVICE: Final = (
    *("worker", "runs", "waits", "done", "failed", "use", "memory used", "kept", "spilled"),
    "copied in",
)


@dataclass(frozen=True, slots=True)
class ReportedTask(TaskRun):
    """A task that ran, or that failed, with its worker's address.

    ``device_ids`` are the ordinals of all its devices there; other fields are of the first device.
    """

    worker: str = ""
    device_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportedRefusal:
    """A task that failed before it had a device, for example because no worker has the device.

    ``prefix`` is the common name of tasks of its kind, ``reason`` the error as text.
    """

    key: Hashable
    prefix: str
    reason: str
    worker: str


@dataclass(frozen=True, slots=True)
class ReportedTransfer(Transfer):
    """Values that went from one device to another, and the address of the worker that counted."""

    worker: str = ""


@dataclass(repr=False, eq=False)
class Report(list[ReportedTask]):
    """The tasks that ran on a cluster's devices, the earliest first.

    Its text has a line for each device. In notebooks it is a table.
    ``pandas.DataFrame(report)`` makes a data frame of the tasks, and
    ``pandas.DataFrame(report.devices)`` one of the devices.

    Attributes
    ----------
    devices
        A row for each device of each worker.
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
    waiting
        The number of tasks that no worker has yet, because all have enough or none is suitable.
    seceded
        The number of tasks that run and hold no slot: they seceded, or wait for tasks.
    failures
        The latest failures of devices, each as a text, also of workers that left.
    paused
        The workers that dask paused, since their host memory is nearly full.
    on_disk
        The bytes of values that dask wrote to disk, for the same reason.
    """

    tasks: InitVar[Sequence[ReportedTask]] = ()
    devices: Sequence[ReportedDevice] = field(default_factory=list)
    refused: Sequence[ReportedRefusal] = field(default_factory=list)
    workers: Mapping[str, bool] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)
    transfers: Sequence[ReportedTransfer] = field(default_factory=list)
    without_device: Sequence[ReportedTask] = field(default_factory=list)
    hosted: int = 0
    waiting: int = 0
    seceded: int = 0
    failures: Sequence[str] = ()
    paused: Sequence[str] = ()
    on_disk: int = 0

    def __post_init__(self, tasks: Sequence[ReportedTask]) -> None:
        super().__init__(tasks)

    def __repr__(self) -> str:  # a list of thousands of tasks is unreadable
        below = [wrapped for line in _below(self) for wrapped in wrap(line, _COLUMNS)]
        return "\n".join([live.aligned(*_table(self)), *below])

    def _repr_html_(self) -> str:
        head, rows = _table(self)
        shown = [["-" if cell is None else str(cell) for cell in row] for row in [head, *rows]]
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in shown)
        lines = (f"<div>{escape(line)}</div>" for line in _below(self))
        return f"<table><tr>{'</tr><tr>'.join(cells)}</tr></table>{''.join(lines)}"


def report(client: Client | Cluster) -> Report:
    """Return the tasks that ran on each device of a cluster.

    Parameters
    ----------
    client
        A client of the cluster, or the cluster. An asynchronous client gives an awaitable.

    Returns
    -------
    Report
        The tasks; ``devices`` has the devices, ``transfers`` the values that moved between them,
        ``refused`` the tasks that got no device, and ``without_device`` the tasks that ran on none.
        A worker remembers its latest tasks, ``devctx.history`` of them; tasks of a worker that left
        are not in it, nor in the counts of the devices.

    Raises
    ------
    DevctxError
        The scheduler lacks this package.
    TypeError
        ``client`` is neither a client nor a cluster.
    ValueError
        The client is closed.

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
    if isinstance(client, Cluster) and not client.asynchronous:
        with Client(client, set_as_default=False) as own:
            return report(own)
    live.refuse_unusable(client, "report(Client(cluster))")
    found: Report = client.sync(_report, client)
    return found


async def _report(client: Client) -> Report:
    facts, mute = await live.on_scheduler(client, _of_scheduler)
    # A worker that restarts, or has another version of this package, must not hide the others.
    there = [worker for worker, why in mute.items() if why is None]
    said = mute | await client.run(_of_worker, workers=there, on_error="return")
    answers = sorted(said.items())
    silent = {w: repr(one) for w, one in answers if isinstance(one, BaseException)}
    workers = {w: one is not None for w, one in answers if w not in silent}
    found = [(w, one) for w, one in answers if workers.get(w)]
    tasks = [task for w, one in found for task in _tasks(one["runs"], w)]
    tasks.sort(key=lambda task: task.start or 0.0)
    transfers = [(w, known(Transfer, row)) for w, one in found for row in one["transfers"]]
    return Report(
        [task for task in tasks if task.uuid is not None],
        live.device_rows((w, one["name"], one["devices"]) for w, one in found),
        [ReportedRefusal(*(*task[:3], w)) for w, one in found for task in one["refused"]],
        workers,
        silent,
        [ReportedTransfer(**row, worker=w) for w, row in transfers],
        without_device=[task for task in tasks if task.uuid is None],
        hosted=sum(one["without_device"] for _, one in found),
        seceded=sum(one["seceded"] for _, one in found),
        **facts,
    )


async def _of_scheduler(dask_scheduler: Scheduler) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return fields of the report, and the reason why each worker does not answer, or None."""
    workers = [*dask_scheduler.workers]
    asking = (ask(dask_scheduler, one, "echo") for one in workers)
    mute = await asyncio.gather(*asking, return_exceptions=True)
    history = DeviceHistory.of(dask_scheduler)
    incidents = () if history is None else (row for _, row in history.rows().rows)
    there = dask_scheduler.workers.values()
    facts = {
        "waiting": len(dask_scheduler.queued) + len(dask_scheduler.unrunnable),
        "paused": [one.address for one in there if one.status is Status.paused],
        "on_disk": sum(one.memory.spilled for one in there),
        "failures": [o.text for o in incidents if isinstance(o, Incident) and o.what == ACTION],
    }
    return facts, dict(zip(workers, mute, strict=True))


def _tasks(rows: Sequence[Sequence[Any]], worker: str) -> list[ReportedTask]:
    """Return a worker's tasks; one of several devices has a row for each, one after the other."""
    tasks: list[ReportedTask] = []
    for row in rows:
        run = TaskRun(*row)
        here = () if run.device_id is None else (run.device_id,)
        if not run.nth:
            own: Any = {"worker": worker, "device_ids": here}
            tasks.append(ReportedTask(*row, **own))
        elif tasks and tasks[-1].key == run.key:  # else the row of its first device was dropped
            tasks[-1] = replace(tasks[-1], device_ids=(*tasks[-1].device_ids, *here))
    return tasks


async def _of_worker(dask_worker: Worker) -> dict[str, Any] | None:
    # A coroutine, so that it runs on the worker's event loop.
    more = {"name": str(dask_worker.name), "seceded": len(dask_worker.state.long_running)}
    for plugin in dask_worker.plugins.values():
        if isinstance(plugin, DevicePlugin) and (found := plugin.report()) is not None:
            return found | more
    return None


# -- its text


def _table(report: Report) -> tuple[Sequence[str], list[list[object]]]:
    devices = live.by_device(report.devices, report.transfers)
    return ("device", *_BY_DEVICE), live.cells(list(devices.values()), _BY_DEVICE)


def _below(report: Report) -> Iterator[str]:
    """Yield the lines below the table."""
    if report.waiting:
        yield f"on no worker yet: {counted(report.waiting, 'task')}"
    if report.paused:
        yield f"paused by dask, as host memory is nearly full: {', '.join(report.paused)}"
    if report.seceded:
        yield f"seceded, such as tasks that wait for tasks: {report.seceded}"
    if report.hosted:
        yield f"tasks without a device: {report.hosted}"
    yield from _moved(report)
    total = reduce(added, report.devices, DeviceCounts())
    if total.spills:
        away, back = nbytes_text(total.spilled_nbytes), nbytes_text(total.unspilled_nbytes)
        values = counted(total.spills, "value")
        yield f"spilled: {away} in {values}; restored: {back} in {total.unspills}"
    if report.on_disk:
        yield f"on disk, as host memory is nearly full: {nbytes_text(report.on_disk)}"
    for worker, reason in report.silent.items():
        yield f"no answer from {worker}: {reason}"
    without = [worker for worker, runs in report.workers.items() if not runs]
    if not report.workers and not report.silent:
        yield "the cluster has no workers"
    elif len(without) == len(report.workers) > 0:
        yield "no worker runs the plugin: client.register_plugin(DevicePlugin())"
    elif without:
        yield f"without the plugin: {', '.join(without)}"
    having = {device.worker for device in report.devices}
    bare = [worker for worker, runs in report.workers.items() if runs and worker not in having]
    if bare:
        yield f"with the plugin and without devices: {', '.join(bare)}"
    failed = Counter(task.prefix for task in report if task.outcome == "error").most_common(_MOST)
    yield from (f"failed: {n} of {prefix}" for prefix, n in failed)
    if report.failures:
        n, last = len(report.failures), report.failures[-1].partition(". ")[0]
        yield f"failures of devices: {n}, the last: {last}. See report(client).failures"
    if total.out_of_memory:
        yield f"ran out of memory: {counted(total.out_of_memory, 'time')}, retries included"
    refused = Counter((task.prefix, task.reason) for task in report.refused).most_common()
    for (prefix, reason), n in refused[:_MOST]:
        yield f"refused: {n} of {prefix}: {reason}"
    if len(refused) > _MOST:
        yield f"refused for more reasons: {len(refused) - _MOST}, see report(client).refused"


def _moved(report: Report) -> Iterator[str]:
    sums: dict[tuple[str, str | None], ReportedTransfer] = {}
    for row in report.transfers:
        key = row.transport, row.reason
        sums[key] = added(row, sums[key]) if key in sums else row
    for (transport, reason), row in sums.items():
        timed = row.rate and row.measured_nbytes >= _LEAST_TIMED
        rate = f", {row.rate / 1e9:.3g} GB/s" if row.rate and timed else ""
        because = f": {reason}" if reason else ""
        values = counted(row.copies, "value")
        yield f"moved by {transport}: {nbytes_text(row.nbytes)} in {values}{rate}{because}"
