"""A report as text of at most 100 columns, and as a table with bars for notebooks."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Final

from dask_devctx.client.tables import aligned, device_names, host_of, shortened
from dask_devctx.errors.base import counted, listed, nbytes_text

if TYPE_CHECKING:
    from dask_devctx.client.report import Report, ReportedDevice, ReportedTask

COLUMNS: Final = 100
_WORKER: Final = 16
# A rate of fewer bytes says nothing about a link.
_LEAST_TIMED: Final = 2**20
# So many kinds of errors of refused tasks have a line.
_KINDS: Final = 5

_BY_DEVICE: Final = (
    *("device", "worker", "runs", "waits", "done", "failed", "busy s", "use"),
    *("memory used", "copied in"),
)
_BY_PREFIX: Final = (
    *("tasks", "done", "failed", "busy s", "mean ms"),
    *("for a place s", "inputs s", "memory s", "devices"),
)


@dataclass
class Line:
    """One device of a cluster, with the sums over the workers that use it; or all devices."""

    name: str
    workers: list[str] = field(default_factory=list)
    running: int = 0
    queued: int = 0
    done: int = 0
    failed: int = 0
    busy_s: float = 0.0
    uses: list[float] = field(default_factory=list)
    used: int | None = None
    total: int | None = None
    copied_in: int = 0

    def add(self, device: ReportedDevice) -> None:
        """Add the counts of a device of a worker."""
        self.running += device.running
        self.queued += device.queued
        self.done += device.done
        self.failed += device.failed
        self.busy_s += device.busy_s

    def cells(self) -> tuple[object, ...]:
        """Return its cells, in the order of the table's columns."""
        return (
            self.name,
            shortened(", ".join(self.workers), _WORKER),
            self.running,
            self.queued,
            self.done,
            self.failed,
            round(self.busy_s, 1),
            None if not self.uses else f"{sum(self.uses) / len(self.uses):.0%}",
            None if not self.total else f"{nbytes_text(self.used)} of {nbytes_text(self.total)}",
            nbytes_text(self.copied_in),
        )


def lines(report: Report) -> list[Line]:
    """Return a line for each device, and one for all devices."""
    found: dict[str, Line] = {}
    everything = Line("")
    names: set[str] = set()
    shown = _names(report)
    for device in sorted(report.devices, key=_place):
        line = found.get(device.uuid)
        first = line is None
        if line is None:
            line = found[device.uuid] = Line(shown[device.uuid])
        if device.present:
            line.workers.append(device.worker_name)
            names.add(device.worker)
        elif first:
            line.workers.append("(left)")
        for one in (line, everything):
            one.add(device)
            if first and device.utilization is not None:
                one.uses.append(device.utilization)
            if first and device.memory_total is not None and device.memory_free is not None:
                one.used = (one.used or 0) + device.memory_total - device.memory_free
                one.total = (one.total or 0) + device.memory_total
    for row in report.transfers:
        if row.destination in found:
            for one in (found[row.destination], everything):
                one.copied_in += row.nbytes
    everything.name = f"all {len(found)}"
    everything.workers = [f"{len(names)} worker{'' if len(names) == 1 else 's'}"]
    return [*found.values(), everything]


def _place(device: ReportedDevice) -> tuple[object, ...]:
    """Return a device's place among the lines: by host and ordinal; those that left come last."""
    return not device.present, host_of(device.worker), device.device_id, device.worker


def _names(report: Report) -> dict[str, str]:
    return device_names((host_of(d.worker), d.device_id, d.uuid) for d in report.devices)


def text(report: Report) -> str:
    """Return a report as text."""
    if report.by == "prefix":
        table = aligned(_BY_PREFIX, list(_prefixes(report)))
    else:
        table = aligned(_BY_DEVICE, [line.cells() for line in lines(report)])
    problems = [wrapped for line in _problems(report) for wrapped in wrap(line, COLUMNS)]
    return "\n".join([table, *(_cut(line) for line in _below(report)), *problems])


def _cut(line: str) -> str:
    return line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…"


def _prefixes(report: Report) -> Iterator[Sequence[object]]:
    groups: defaultdict[str, list[ReportedTask]] = defaultdict(list)
    for run in report:
        groups[run.prefix].append(run)
    for prefix, runs in sorted(groups.items(), key=lambda item: -_busy_s(item[1])):
        failed = sum(run.outcome == "error" for run in runs)
        on = ",".join(str(n) for n in sorted({n for run in runs for n in run.device_ids}))
        yield (
            shortened(prefix, 24),
            len(runs) - failed,
            failed,
            round(_busy_s(runs), 2),
            round(1000 * sum(map(_seconds, runs)) / len(runs), 1),
            round(sum(run.place_s for run in runs), 2),
            round(sum(run.inputs_s for run in runs), 2),
            round(sum(run.memory_s for run in runs), 2),
            shortened(on, 10),
        )


def _busy_s(runs: Iterable[ReportedTask]) -> float:
    """Return the time of devices: a task of two devices counts twice."""
    return sum(_seconds(run) * len(run.device_ids) for run in runs)


def _seconds(run: ReportedTask) -> float:
    return run.stop - run.start if run.start and run.stop else 0.0


def _refused(report: Report) -> Iterator[str]:
    """Yield a line for each error of the tasks that got no device, the latest last."""
    kinds: dict[str, Counter[str]] = {}
    for task in report.refused:
        reason = " ".join(task.reason.split())
        prefixes = kinds[reason] = kinds.pop(reason, Counter())
        prefixes[task.prefix] += 1
    for reason, prefixes in list(kinds.items())[-_KINDS:]:
        named = ", ".join(shortened(prefix, 24) for prefix, _ in prefixes.most_common(2))
        more = ", …" if len(prefixes) > 2 else ""
        yield f"refused: {prefixes.total()} of {named}{more}: {reason}"
    if len(kinds) > _KINDS:
        more = counted(len(kinds) - _KINDS, "more reason")
        yield f"refused for {more}: report(client).refused"


def _spilled(report: Report) -> Iterator[str]:
    """Yield a line for each device whose values left for the host, and one for the cluster."""
    spills = sum(device.spills for device in report.devices)
    if not spills:
        return
    names = _names(report)
    for device in report.devices:
        if device.spills:
            kept = (device.memory_held or 0) + (device.memory_copies or 0)
            limit = device.device_memory_limit
            of = "" if limit is None else f" of its limit {nbytes_text(limit)}"
            yield (
                f"{names[device.uuid]} of worker {shortened(device.worker_name, _WORKER)} keeps "
                f"{nbytes_text(kept)}{of}; {nbytes_text(device.memory_spilled)} more are in host "
                "memory"
            )
    unspills = sum(device.unspills for device in report.devices)
    away = nbytes_text(sum(device.spilled_nbytes for device in report.devices))
    back = nbytes_text(sum(device.unspilled_nbytes for device in report.devices))
    yield (
        f"moved to host memory since the start: {away} in {counted(spills, 'move')}; "
        f"came back: {back} in {counted(unspills, 'move')}"
    )


def _lost(report: Report) -> Iterator[str]:
    """Yield a line for each of the latest workers that left unexpectedly."""
    names = _names(report)
    for lost in report.lost:
        named = ", ".join(sorted(names.get(uuid, uuid[:12]) for uuid in lost.uuids))
        again = [counted(lost.tasks, "task")] if lost.tasks else []
        again += [counted(lost.results, "result")] if lost.results else []
        many = lost.tasks + lost.results != 1
        made = f"; {' and '.join(again)} {'are' if many else 'is'} computed again" if again else ""
        at = _clock(lost.time)
        yield f"lost at {at}: worker {lost.worker}{f' with {named}' if named else ''}{made}"


def _failures(report: Report) -> Iterator[str]:
    """Yield a line for each of the latest devices that failed."""
    for one in report.failures:
        at, suspects = _clock(one.time), listed(one.suspects, _KINDS) or "none"
        yield f"failed at {at}: {one.device} of {one.worker}, {one.status}; suspects: {suspects}"


def _clock(seconds: float) -> str:
    """Return the time of day of a moment in seconds since the epoch."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _rate(nbytes: float, seconds: float) -> str:
    """Return a rate as text, "" where too little was timed to say anything."""
    if seconds <= 0 or nbytes < _LEAST_TIMED:
        return ""
    rate = nbytes / seconds / 1e9
    return f", {rate:.3g} GB/s" if rate >= 1 else f", {1000 * rate:.3g} MB/s"


def _below(report: Report) -> Iterator[str]:
    """Yield a line for each way of transfers, for tasks without a device, and for problems."""
    if report.hosted:
        yield f"tasks without a device: {report.hosted}"
    nbytes: Counter[tuple[str, str | None]] = Counter()
    copies: Counter[tuple[str, str | None]] = Counter()
    measured: defaultdict[tuple[str, str | None], list[float]] = defaultdict(lambda: [0, 0.0])
    for row in report.transfers:
        nbytes[row.transport, row.reason] += row.nbytes
        copies[row.transport, row.reason] += row.copies
        measured[row.transport, row.reason][0] += row.measured_nbytes
        measured[row.transport, row.reason][1] += row.measured_s
    for way, reason in nbytes:
        because = f": {reason}" if reason else ""
        moved, count = nbytes_text(nbytes[way, reason]), copies[way, reason]
        timed, seconds = measured[way, reason]
        several = "copy" if count == 1 else "copies"
        yield f"moved by {way}: {moved} in {count} {several}{_rate(timed, seconds)}{because}"
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


def _problems(report: Report) -> Iterator[str]:
    """Yield the problems whose reasons and remedies are in the text: it is not cut."""
    yield from _failures(report)
    yield from _refused(report)
    for (prefix, asked), count in list(report.unplaced.items())[:_KINDS]:
        yield (f"waiting for a worker: {count} of {shortened(prefix, 24)}: no worker fits {asked}")
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
    if report.by == "prefix":
        head: Sequence[str] = _BY_PREFIX
        body = [[escape(str(cell)) for cell in row] for row in _prefixes(report)]
    else:
        head, found = _BY_DEVICE, lines(report)
        most = max((line.busy_s for line in found[:-1]), default=0.0)
        body = [_html_cells(line, most, is_all=line is found[-1]) for line in found]
    rows = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in row) + "</tr>"
        for row in body
    )
    names = "".join(f'<th style="{_CELL}">{escape(name)}</th>' for name in head)
    said = [*_below(report), *_problems(report)]
    below = "".join(f"<div>{escape(line)}</div>" for line in said)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>{below}"


def _html_cells(line: Line, most_s: float, *, is_all: bool) -> list[str]:
    cells = [escape("-" if cell is None else str(cell)) for cell in line.cells()]
    busy, memory = _BY_DEVICE.index("busy s"), _BY_DEVICE.index("memory used")
    if not is_all and most_s > 0:
        cells[busy] = _bar(_BUSY, line.busy_s / most_s, cells[busy])
    if line.used is not None and line.total:
        cells[memory] = _bar(_MEMORY, line.used / line.total, cells[memory])
    return cells


def _bar(color: str, share: float, shown: str) -> str:
    return _BAR.format(color=color, percent=100 * min(max(share, 0.0), 1.0), text=shown)
