"""A report as text of at most 100 columns, and as a table with bars for notebooks."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Final, NamedTuple

from dask_devctx.client.live import SUMS, LiveDevice, by_device
from dask_devctx.client.tables import aligned, device_names, host_of, shortened
from dask_devctx.errors.base import counted, listed, nbytes_text

if TYPE_CHECKING:
    from dask_devctx.client.report import Report, ReportedTask

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
    *("for a slot s", "inputs s", "memory s", "devices"),
)


class Line(NamedTuple):
    """The cells of a device of a cluster, or of all devices; and what bars show of them."""

    cells: tuple[object, ...]
    busy_s: float
    used: int
    total: int


def lines(report: Report) -> list[Line]:
    """Return a line for each device, and one for all devices."""
    copied = Counter[str]()
    found = _devices(report)
    for row in report.transfers:
        if row.destination in found:
            copied[row.destination] += row.nbytes
    shown = _names(report)
    each = [
        _line(shown[uuid], ", ".join(one.workers) or "(left)", [one], copied[uuid])
        for uuid, one in found.items()
    ]
    workers = counted(len({row.worker for row in report.devices if row.present}), "worker")
    return [*each, _line(f"all {len(found)}", workers, found.values(), copied.total())]


def _line(name: str, workers: str, devices: Collection[LiveDevice], copied_in: int) -> Line:
    sums = {one: sum(getattr(device, one) for device in devices) for one in SUMS}
    uses = [device.utilization for device in devices if device.utilization is not None]
    known = [one.memory for one in devices if one.memory.keys() >= {"free", "total"}]
    total = sum(memory["total"] for memory in known)
    used = total - sum(memory["free"] for memory in known)
    busy_s = sums.pop("busy_s")
    cells = (
        name,
        shortened(workers, _WORKER),
        *sums.values(),
        round(busy_s, 1),
        None if not uses else f"{sum(uses) / len(uses):.0%}",
        None if not total else f"{nbytes_text(used)} of {nbytes_text(total)}",
        nbytes_text(copied_in),
    )
    return Line(cells, busy_s, used, total)


def _devices(report: Report) -> dict[str, LiveDevice]:
    rows = report.devices
    return by_device((row.worker, row.worker_name if row.present else None, row) for row in rows)


def _names(report: Report) -> dict[str, str]:
    return device_names((host_of(d.worker), d.device_id, d.uuid) for d in report.devices)


def text(report: Report) -> str:
    """Return a report as text."""
    if report.by == "prefix":
        table = aligned(_BY_PREFIX, list(_prefixes(report)))
    else:
        table = aligned(_BY_DEVICE, [line.cells for line in lines(report)])
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
            round(sum(run.slot_s for run in runs), 2),
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
    sums: defaultdict[tuple[str, str | None], list[float]] = defaultdict(lambda: [0, 0, 0, 0.0])
    for row in report.transfers:
        numbers = row.nbytes, row.copies, row.measured_nbytes, row.measured_s
        key = row.transport, row.reason
        sums[key] = [a + b for a, b in zip(sums[key], numbers, strict=True)]
    for (transport, reason), (nbytes, copies, timed, seconds) in sums.items():
        because = f": {reason}" if reason else ""
        several = f"{int(copies)} {'copy' if copies == 1 else 'copies'}"
        moved = f"{nbytes_text(int(nbytes))} in {several}{_rate(timed, seconds)}"
        yield f"moved by {transport}: {moved}{because}"
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
    cells = [escape("-" if cell is None else str(cell)) for cell in line.cells]
    busy, memory = _BY_DEVICE.index("busy s"), _BY_DEVICE.index("memory used")
    if not is_all and most_s > 0:
        cells[busy] = _bar(_BUSY, line.busy_s / most_s, cells[busy])
    if line.total:
        cells[memory] = _bar(_MEMORY, line.used / line.total, cells[memory])
    return cells


def _bar(color: str, share: float, shown: str) -> str:
    return _BAR.format(color=color, percent=100 * min(max(share, 0.0), 1.0), text=shown)
