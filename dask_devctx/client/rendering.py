"""A report as text of at most 100 columns, and as a table with bars for notebooks."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Final

from dask_devctx.client.live import LiveDevice, by_device, rows, total
from dask_devctx.client.tables import aligned, host_of, shortened
from dask_devctx.errors.base import counted, listed, nbytes_text
from dask_devctx.scheduler.cluster import device_names

if TYPE_CHECKING:
    from dask_devctx.client.report import Report, ReportedTask

COLUMNS: Final = 100
_NAME: Final = 24
# A rate of fewer bytes says nothing about a link.
_LEAST_TIMED: Final = 2**20
# So many kinds of errors of refused tasks have a line.
_KINDS: Final = 5

_BY_DEVICE: Final = (
    *("worker", "runs", "waits", "done", "failed", "busy s", "use"),
    *("memory used", "copied in"),
)
_BY_PREFIX: Final = (
    *("tasks", "done", "failed", "busy s", "mean ms"),
    *("for a slot s", "inputs s", "memory s", "devices"),
)


def _devices(report: Report) -> list[LiveDevice]:
    """Return the devices, and the sum of all at the end."""
    copied = Counter[str]()
    for row in report.transfers:
        copied[row.destination] += row.nbytes
    found = by_device(
        ((row.worker, row.worker_name if row.present else None, row) for row in report.devices),
        copied,
    )
    workers = counted(len({row.worker for row in report.devices if row.present}), "worker")
    return [*found.values(), total(found.values(), workers)]


def _table(report: Report) -> tuple[Sequence[str], list[Sequence[object]]]:
    if report.by == "prefix":
        return _BY_PREFIX, [*_prefixes(report)]
    *each, summed = _devices(report)
    last = rows([summed], _BY_DEVICE)[0][1:]
    return ("device", *_BY_DEVICE), [*rows(each, _BY_DEVICE), [f"all {len(each)}", *last]]


def text(report: Report) -> str:
    """Return a report as text."""
    problems = [wrapped for line in _problems(report) for wrapped in wrap(line, COLUMNS)]
    below = [line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…" for line in _below(report)]
    return "\n".join([aligned(*_table(report)), *below, *problems])


def _prefixes(report: Report) -> Iterator[Sequence[object]]:
    groups: defaultdict[str, list[ReportedTask]] = defaultdict(list)
    for run in report:
        groups[run.prefix].append(run)
    for prefix, runs in sorted(groups.items(), key=lambda item: -_busy_s(item[1])):
        failed = sum(run.outcome == "error" for run in runs)
        on = ",".join(str(n) for n in sorted({n for run in runs for n in run.device_ids}))
        waits = [(run.slot_s, run.inputs_s, run.memory_s) for run in runs]
        yield (
            shortened(prefix, _NAME),
            len(runs) - failed,
            failed,
            round(_busy_s(runs), 2),
            round(1000 * sum(map(_seconds, runs)) / len(runs), 1),
            *(round(sum(column), 2) for column in zip(*waits, strict=True)),
            shortened(on, 10),
        )


def _busy_s(runs: Iterable[ReportedTask]) -> float:
    """Return the time of devices: a task of two devices counts twice."""
    return sum(_seconds(run) * len(run.device_ids) for run in runs)


def _seconds(run: ReportedTask) -> float:
    return run.stop - run.start if run.start and run.stop else 0.0


def _names(report: Report) -> dict[str, str]:
    return device_names((host_of(d.worker), d.device_id, d.uuid) for d in report.devices)


def _clock(seconds: float) -> str:
    """Return the time of day of a moment in seconds since the epoch."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))


# -- the lines below the table: those that may be cut, then problems with their remedies


def _below(report: Report) -> Iterator[str]:
    if report.hosted:
        yield f"tasks without a device: {report.hosted}"
    yield from _moved(report)
    yield from _spilled(report)
    yield from _lost(report)
    for worker, reason in report.silent.items():
        yield f"no answer from {worker}: {reason}"
    without = [worker for worker, runs in report.workers.items() if not runs]
    if not report.workers and not report.silent:
        yield "the cluster has no workers"
    elif len(without) == len(report.workers) > 0:
        yield "no worker runs the plugin: client.register_plugin(DevicePlugin())"
    elif without:
        yield f"without the plugin: {', '.join(without)}"
    having = {device.worker for device in report.devices if device.present}
    bare = [worker for worker, runs in report.workers.items() if runs and worker not in having]
    if bare:
        yield f"with the plugin and without devices: {', '.join(bare)}"


def _moved(report: Report) -> Iterator[str]:
    sums: defaultdict[tuple[str, str | None], list[float]] = defaultdict(lambda: [0, 0, 0, 0.0])
    for row in report.transfers:
        numbers = row.nbytes, row.copies, row.measured_nbytes, row.measured_s
        key = row.transport, row.reason
        sums[key] = [a + b for a, b in zip(sums[key], numbers, strict=True)]
    for (transport, reason), (nbytes, copies, timed, seconds) in sums.items():
        rate = ""
        if seconds > 0 and timed >= _LEAST_TIMED:
            speed = timed / seconds / 1e9
            rate = f", {speed:.3g} GB/s" if speed >= 1 else f", {1000 * speed:.3g} MB/s"
        several = f"{int(copies)} {'copy' if copies == 1 else 'copies'}"
        because = f": {reason}" if reason else ""
        yield f"moved by {transport}: {nbytes_text(int(nbytes))} in {several}{rate}{because}"


def _spilled(report: Report) -> Iterator[str]:
    """Yield a line for each device whose values were moved to the host, and one for the cluster."""
    spilled = [device for device in report.devices if device.spills]
    if not spilled:
        return
    names = _names(report)
    for device in spilled:
        kept = (device.memory_held or 0) + (device.memory_copies or 0)
        limit = device.device_memory_limit
        of = "" if limit is None else f" of its limit {nbytes_text(limit)}"
        yield (
            f"{names[device.uuid]} of worker {shortened(device.worker_name, 16)} keeps "
            f"{nbytes_text(kept)}{of}; {nbytes_text(device.memory_spilled)} more are in host memory"
        )
    away = nbytes_text(sum(device.spilled_nbytes for device in report.devices))
    back = nbytes_text(sum(device.unspilled_nbytes for device in report.devices))
    spills = counted(sum(device.spills for device in spilled), "move")
    unspills = counted(sum(device.unspills for device in report.devices), "move")
    since = "moved to host memory since the start"
    yield f"{since}: {away} in {spills}; came back: {back} in {unspills}"


def _lost(report: Report) -> Iterator[str]:
    """Yield a line for each of the latest workers that left unexpectedly."""
    names = _names(report)
    for lost in report.lost:
        named = ", ".join(sorted(names.get(uuid, uuid[:12]) for uuid in lost.uuids))
        again = [counted(lost.tasks, "task")] if lost.tasks else []
        again += [counted(lost.results, "result")] if lost.results else []
        made = f"; computed again: {' and '.join(again)}" if again else ""
        devices = f" with {named}" if named else ""
        yield f"lost at {_clock(lost.time)}: worker {lost.worker}{devices}{made}"


def _problems(report: Report) -> Iterator[str]:
    for one in report.failures:
        at, suspects = _clock(one.time), listed(one.suspects, _KINDS) or "none"
        yield f"failed at {at}: {one.device} of {one.worker}, {one.status}; suspects: {suspects}"
    kinds: dict[str, Counter[str]] = {}
    for task in report.refused:
        reason = " ".join(task.reason.split())
        prefixes = kinds[reason] = kinds.pop(reason, Counter())  # the latest at the end
        prefixes[task.prefix] += 1
    for reason, prefixes in list(kinds.items())[-_KINDS:]:
        named = [shortened(prefix, _NAME) for prefix, _ in prefixes.most_common()]
        yield f"refused: {prefixes.total()} of {listed(named, 2)}: {reason}"
    if len(kinds) > _KINDS:
        more = counted(len(kinds) - _KINDS, "more reason")
        yield f"refused for {more}: report(client).refused"
    for (prefix, asked), count in list(report.unplaced.items())[:_KINDS]:
        yield f"waiting for a worker: {count} of {shortened(prefix, _NAME)}: no worker fits {asked}"
    for worker, reason in report.waiting.items():
        yield f"waiting on {worker}: {reason}"


# -- in notebooks

_CELL: Final = "text-align: right; padding: 2px 8px"
_BAR: Final = (
    '<div style="background: rgba(128, 128, 128, 0.2); width: 8em">'
    '<div style="background: {color}; width: {percent:.1f}%; white-space: nowrap; '
    'padding: 0 4px; box-sizing: border-box">{text}</div></div>'
)
_BUSY, _MEMORY = "rgba(70, 130, 180, 0.6)", "rgba(218, 165, 32, 0.6)"


def html(report: Report) -> str:
    """Return a report as an HTML table; bars show the busy time and the memory of each device."""
    head, table = _table(report)
    body = [[escape("-" if cell is None else str(cell)) for cell in row] for row in table]
    if report.by == "device":
        *each, summed = _devices(report)
        most = max((device.busy_s for device in each), default=0.0)
        for cells, device in zip(body, [*each, summed], strict=True):
            whole = device.memory_total
            for color, name, part, of in (
                (_BUSY, "busy s", device.busy_s, None if device is summed else most),
                (_MEMORY, "memory used", device.used, whole),
            ):
                if of:
                    at, percent = head.index(name), 100 * min(max(part / of, 0.0), 1.0)
                    cells[at] = _BAR.format(color=color, percent=percent, text=cells[at])
    lines = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in row) + "</tr>"
        for row in body
    )
    names = "".join(f'<th style="{_CELL}">{escape(name)}</th>' for name in head)
    below = "".join(f"<div>{escape(line)}</div>" for line in (*_below(report), *_problems(report)))
    return f"<table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>{below}"
