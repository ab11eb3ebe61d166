"""The timeline of a cluster's devices as a file for Perfetto and chrome://tracing.

References
----------
The "Trace Event Format" of the Chromium project: its JSON object format.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from distributed import Client, Scheduler

from dask_devctx.client.live import on_scheduler, refuse_unusable
from dask_devctx.errors import DevctxError
from dask_devctx.scheduler.history import DeviceHistory, KnownWorker
from dask_devctx.scheduler.rows import HOST, Copy, Happened, Incident, TaskRun

Event = dict[str, Any]
End = tuple[str, str | None]  # a worker, and a device of it or None


@dataclass
class Stretch:
    """The known history of a stretch of time."""

    rows: list[tuple[str, Happened]] = field(default_factory=list)
    workers: Mapping[str, KnownWorker] = field(default_factory=dict)
    lost: int = 0
    silent: Sequence[str] = ()


@dataclass
class Timeline:
    """The timeline of a cluster's devices in a file.

    Attributes
    ----------
    path
        The file.
    tasks, copies
        The number of tasks and of copies in the file.
    lost
        How many rows of the history were dropped before they were read.
    silent
        The addresses of workers that did not answer: the file may lack rows of theirs.
    """

    path: Path
    tasks: int
    copies: int
    lost: int
    silent: Sequence[str] = ()


def timeline(client: Client, path: str | os.PathLike[str], *, since: float = 0.0) -> Timeline:
    """Write what ran on a cluster's devices as a trace, for https://ui.perfetto.dev.

    Parameters
    ----------
    client
        A client of the cluster; with an asynchronous one, use ``await``.
    path
        The file that is written, such as ``"timeline.json"``. chrome://tracing opens it too.
    since
        Only rows that begin at this time or later are written: seconds since the epoch, as
        ``time.time()`` returns them.

    Returns
    -------
    Timeline
        The numbers of tasks and copies, and of rows that are lost. The file has all that the
        workers remember: ``devctx.history`` rows each.

    Raises
    ------
    DevctxError
        The scheduler does not have the plugin, or lacks this package.
    OSError
        The file cannot be written.
    TypeError
        The first argument is no client, or the second no path.
    ValueError
        The client is closed.

    Notes
    -----
    A process of the trace is a worker, and a thread is a device. Copies are slices on both ends,
    with an arrow. Within a worker, a copy of 1 MiB or more lasts for as long as the device needs;
    smaller ones are not timed.
    """
    refuse_unusable(client, "timeline(Client(cluster), path)")
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"timeline(client, path) takes the path of a file, got {path!r}")
    made: Timeline = client.sync(_written, client, Path(path), since)
    return made


async def _written(client: Client, path: Path, since: float) -> Timeline:
    stretch: Any = await on_scheduler(client, _of_scheduler, since=since)
    if stretch is None:
        raise DevctxError(
            "no timeline was made, because the scheduler does not have the plugin of dask-devctx. "
            "It comes with the first worker that has it: client.register_plugin(DevicePlugin())"
        )
    content = trace(stretch)
    about = content["otherData"]
    path.write_text(json.dumps(content), encoding="utf-8")
    return Timeline(path, about["tasks"], about["copies"], about["lost_rows"], stretch.silent)


async def _of_scheduler(dask_scheduler: Scheduler, since: float) -> Stretch | None:
    history = DeviceHistory.of(dask_scheduler)
    if history is None:
        return None
    silent = await history.collect()
    reading = history.rows()
    rows = [pair for pair in reading.rows if (_begin(pair[1]) or 0.0) >= since]
    return Stretch(rows, history.workers, reading.lost, silent)


# -- the file: a process of the trace is a worker, and a thread is a device. Slices of one thread
# may not overlap, so a device that runs several tasks at a time has several threads

# The threads of a device: its tasks, the copies that leave it and those that arrive.
_TASKS, _SENDS, _RECEIVES = range(3)
_KINDS: Final = ("", " sends", " receives")
# The ordinal of the threads that belong to no device.
_NO_DEVICE: Final = -1
# A slice of no duration has no place for an arrow.
_SHORTEST_US: Final = 1.0


def trace(stretch: Stretch) -> dict[str, Any]:
    """Return the content of a trace file."""
    writer = _Writer(stretch)
    events = [*writer.rows()]
    # Workers tell of the rows that they dropped before these were collected.
    told = [one for _, one in stretch.rows if isinstance(one, Incident) and one.what == "lost"]
    lost = stretch.lost + sum(one.count for one in told)
    if lost:
        said = {"s": "g", "args": {"rows": lost}}
        events.append(_event("i", 0, 0, 0.0, f"{lost} earlier rows are lost", **said))
    events.sort(key=lambda event: event["ts"])
    return {
        "traceEvents": [*writer.names(), *events],
        "displayTimeUnit": "ms",
        "otherData": {
            "begins_at": writer.origin,
            "tasks": sum(isinstance(row, TaskRun) for _, row in stretch.rows),
            "copies": sum(isinstance(row, Copy) for _, row in stretch.rows),
            "lost_rows": lost,
        },
    }


def _begin(row: Happened) -> float | None:
    return row.time if isinstance(row, Incident) else row.start


def _event(ph: str, pid: int, tid: int, ts: float, name: str, **content: Any) -> Event:
    return {"ph": ph, "pid": pid, "tid": tid, "ts": ts, "name": name, **content}


class _Writer:
    def __init__(self, stretch: Stretch) -> None:
        times = [_begin(row) for _, row in stretch.rows]
        self.origin = min((time for time in times if time is not None), default=0.0)
        self._stretch = stretch
        self._pids = {worker: n for n, worker in enumerate(stretch.workers, 1)}
        # The threads, by their process, their device's ordinal, their kind and their number.
        self._tids: dict[tuple[int, int, int, int], int] = {}
        # The ends of the latest slices on the threads of each process, device and kind.
        self._lanes: defaultdict[tuple[int, int, int], list[float]] = defaultdict(list)
        self._ids = itertools.count()
        self._ordinals: dict[End, int] = {
            (w, uuid): n for w, one in stretch.workers.items() for uuid, n in one.devices.items()
        }
        self._homes = {uuid: worker for worker, uuid in reversed([*self._ordinals])}
        for end in self._ordinals:  # a device without tasks has a thread, too
            self._thread(*self._device(end), _TASKS)

    def _us(self, time: float) -> float:
        return round((time - self.origin) * 1e6, 3)

    def _device(self, end: End) -> tuple[int, int]:
        """Return the numbers of a worker and of its device."""
        pid = self._pids.setdefault(end[0], len(self._pids) + 1)
        return pid, self._ordinals.get(end, _NO_DEVICE)

    def _thread(self, pid: int, ordinal: int, kind: int, lane: int = 0) -> tuple[int, int]:
        """Return the numbers of a process and of a thread."""
        return pid, self._tids.setdefault((pid, ordinal, kind, lane), len(self._tids) + 1)

    def _slice(
        self, end: End, kind: int, start: float, stop: float, name: str, **content: Any
    ) -> Event:
        """Return a slice on a free thread of a device."""
        begin, where = self._us(start), (*self._device(end), kind)
        duration = max(round((stop - start) * 1e6, 3), _SHORTEST_US)
        lanes = self._lanes[where]
        lane = next((n for n, end_us in enumerate(lanes) if end_us <= begin), len(lanes))
        lanes[lane : lane + 1] = [begin + duration]
        return _event("X", *self._thread(*where, lane), begin, name, dur=duration, **content)

    # -- events

    def rows(self) -> Iterator[Event]:
        """Yield the events of tasks, copies and incidents."""
        for worker, row in sorted(self._stretch.rows, key=lambda pair: _begin(pair[1]) or 0.0):
            if isinstance(row, TaskRun):
                yield from self._task(worker, row)
            elif isinstance(row, Copy):
                yield from self._copy(worker, row)
            elif row.what != "lost":
                args = {"text": row.text, "device": row.uuid, "key": str(row.key)}
                where = self._thread(*self._device((worker, row.uuid)), _TASKS)
                at = self._us(row.time)
                yield _event("i", *where, at, row.what, s="t", cat="incident", args=args)

    def _task(self, worker: str, run: TaskRun) -> Iterator[Event]:
        if run.start is None or run.stop is None:
            return
        args = {
            "key": str(run.key),
            "outcome": run.outcome,
            "device": run.uuid,
            "waited for a slot (s)": round(run.slot_s, 6),
            "waited for inputs (s)": round(run.inputs_s, 6),
            "waited for memory (s)": round(run.memory_s, 6),
            "thread": run.thread,
        }
        more: dict[str, Any] = {"cat": "task", "args": args}
        if run.outcome == "error":
            more["cname"] = "terrible"  # red
        yield self._slice((worker, run.uuid), _TASKS, run.start, run.stop, run.prefix, **more)

    def _copy(self, worker: str, row: Copy) -> Iterator[Event]:
        args: dict[str, Any] = {
            "from": row.source,
            "to": row.destination,
            "bytes": row.nbytes,
            "transport": row.transport,
            "values": row.values,
        }
        if row.rate is not None:
            args["GB/s"] = round(row.rate / 1e9, 3)
        what = row.start, row.stop, f"copy by {row.transport}"
        source, target = (
            self._slice(self._end(worker, end), kind, *what, cat="copy", args=args)
            for end, kind in ((row.source, _SENDS), (row.destination, _RECEIVES))
        )
        arrow: dict[str, Any] = {"name": "copy", "cat": "copy", "id": next(self._ids)}
        stop = round(target["ts"] + target["dur"] - _SHORTEST_US / 2, 3)  # readers ask for "inside"
        yield source
        yield target
        yield _event("s", source["pid"], source["tid"], source["ts"], **arrow)
        yield _event("f", target["pid"], target["tid"], stop, bp="e", **arrow)

    def _end(self, worker: str, end: str) -> End:
        """Return the worker and the device of an end of a copy."""
        if end == HOST:
            return worker, None
        if (worker, end) in self._ordinals:
            return worker, end
        home = self._homes.get(end)
        return (end, None) if home is None else (home, end)

    def names(self) -> Iterator[Event]:
        """Yield the names of the processes and threads; call this last."""
        for worker, pid in self._pids.items():
            known = self._stretch.workers.get(worker)
            name = worker if known is None else f"worker {known.name} ({worker})"
            yield _event("M", pid, 0, 0.0, "process_name", args={"name": name})
        for n, ((pid, ordinal, kind, lane), tid) in enumerate(sorted(self._tids.items())):
            none = "host" if kind else "no device"
            name = (none if ordinal == _NO_DEVICE else f"cuda:{ordinal}") + _KINDS[kind]
            name += f" ({lane + 1})" if lane else ""
            yield _event("M", pid, tid, 0.0, "thread_name", args={"name": name})
            yield _event("M", pid, tid, 0.0, "thread_sort_index", args={"sort_index": n})
