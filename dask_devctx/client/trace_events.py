"""A cluster's history in the trace event format, which Perfetto and chrome://tracing open.

A process of the trace is a worker, and a thread is a device. Slices of one thread may not overlap,
so a device that runs several tasks at a time has several threads, and copies have their own. A copy
is a slice on both of its ends, with an arrow from one to the other.

References
----------
The "Trace Event Format" of the Chromium project: its JSON object format.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dask_devctx.scheduler.history import KnownDevice, KnownWorker
from dask_devctx.scheduler.rows import HOST, Copy, Incident, Sample, TaskRun

Event = dict[str, Any]
Row = TaskRun | Copy | Incident

# The threads of a device follow each other: its tasks, the copies that leave it and that arrive.
_PER_DEVICE: Final = 1000
_TASKS, _SENDS, _RECEIVES = "tasks", "sends", "receives"
_FIRST: Final = {_TASKS: 0, _SENDS: 400, _RECEIVES: 700}
# The place of the threads that belong to no device.
_NO_DEVICE: Final = -1
# A slice of no duration has no place for an arrow.
_SHORTEST_US: Final = 1.0
_MEMORY: Final = ("held", "copies", "staging", "spilled", "others", "free")


@dataclass
class Stretch:
    """The known history of a stretch of time."""

    rows: list[tuple[str, Row]] = field(default_factory=list)
    samples: list[tuple[str, Sample]] = field(default_factory=list)
    devices: Mapping[tuple[str, str], KnownDevice] = field(default_factory=dict)
    workers: Mapping[str, KnownWorker] = field(default_factory=dict)
    lost: int = 0

    @property
    def all_lost(self) -> int:
        """All rows that are lost, those too that workers dropped before they were collected."""
        told = (
            row.text for _, row in self.rows if isinstance(row, Incident) and row.what == "lost"
        )
        return self.lost + sum(int(text.split()[0]) for text in told)


def trace(stretch: Stretch) -> dict[str, Any]:
    """Return the content of a trace file."""
    times = [_begin(row) for _, row in stretch.rows] + [one.time for _, one in stretch.samples]
    writer = _Writer(stretch, min((time for time in times if time is not None), default=0.0))
    events = [*writer.rows(), *writer.counters()]
    lost = stretch.all_lost
    if lost:
        events.insert(0, writer.global_instant(f"{lost} earlier rows are lost", lost))
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


def _begin(row: Row) -> float | None:
    return row.time if isinstance(row, Incident) else row.start


class _Lanes:
    """Finds a thread for each slice so that no two slices of a thread overlap."""

    def __init__(self) -> None:
        self._free: defaultdict[Any, list[int]] = defaultdict(list)
        self._busy: defaultdict[Any, list[tuple[float, int]]] = defaultdict(list)
        self._count: defaultdict[Any, int] = defaultdict(int)

    def find(self, where: Any, start: float, stop: float) -> int:
        """Return the number of the lane; a place's slices come in the order of their starts."""
        free, busy = self._free[where], self._busy[where]
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane = self._count[where]
            self._count[where] += 1
        heapq.heappush(busy, (stop, lane))
        return lane


class _Writer:
    def __init__(self, stretch: Stretch, origin: float) -> None:
        self.origin = origin
        self._stretch = stretch
        self._lanes = _Lanes()
        self._pids: dict[str, int] = {}
        self._thread_names: dict[tuple[int, int], str] = {}
        self._flows = itertools.count(1)
        self._homes: dict[str, str] = {}
        for worker, uuid in stretch.devices:
            self._homes.setdefault(uuid, worker)
        for worker in stretch.workers:
            self._pid(worker)
        for (worker, _), known in stretch.devices.items():  # a device without tasks has a lane, too
            self._name_thread(self._pid(worker), known.device_id, _TASKS, 0)

    # -- places

    def _us(self, time: float) -> float:
        return round((time - self.origin) * 1e6, 3)

    def _pid(self, worker: str) -> int:
        return self._pids.setdefault(worker, len(self._pids) + 1)

    def _device_id(self, worker: str, uuid: str | None) -> int:
        known = None if uuid is None else self._stretch.devices.get((worker, uuid))
        return _NO_DEVICE if known is None else known.device_id

    def _name_thread(self, pid: int, ordinal: int, kind: str, lane: int) -> int:
        tid = (ordinal + 1) * _PER_DEVICE + _FIRST[kind] + lane + 1
        self._thread_names.setdefault((pid, tid), _thread_name(ordinal, kind, lane))
        return tid

    def _slice(
        self,
        worker: str,
        uuid: str | None,
        kind: str,
        start: float,
        stop: float,
        **content: Any,
    ) -> Event:
        """Return a slice on a free thread of a device."""
        pid, ordinal = self._pid(worker), self._device_id(worker, uuid)
        begin = self._us(start)
        duration = max(round((stop - start) * 1e6, 3), _SHORTEST_US)
        lane = self._lanes.find((pid, ordinal, kind), begin, begin + duration)
        tid = self._name_thread(pid, ordinal, kind, lane)
        return {"ph": "X", "pid": pid, "tid": tid, "ts": begin, "dur": duration, **content}

    # -- events

    def rows(self) -> Iterator[Event]:
        """Yield the events of tasks, copies and incidents."""
        for worker, row in sorted(self._stretch.rows, key=_order):
            if isinstance(row, TaskRun):
                yield from self._task(worker, row)
            elif isinstance(row, Copy):
                yield from self._copy(worker, row)
            elif row.what != "lost":
                yield self._incident(worker, row)

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
        about: dict[str, Any] = {"name": run.prefix, "cat": "task", "args": args}
        if run.outcome == "error":
            about["cname"] = "terrible"
        yield self._slice(worker, run.uuid, _TASKS, run.start, run.stop, **about)

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
        about: dict[str, Any] = {"name": f"copy by {row.transport}", "cat": "copy", "args": args}
        begin, end = row.start, row.stop
        source = self._slice(*self._end(worker, row.source), _SENDS, begin, end, **about)
        target = self._slice(*self._end(worker, row.destination), _RECEIVES, begin, end, **about)
        yield source
        yield target
        flow = {"name": "copy", "cat": "copy", "id": next(self._flows)}
        yield {"ph": "s", "pid": source["pid"], "tid": source["tid"], "ts": source["ts"], **flow}
        stop = round(target["ts"] + target["dur"] - _SHORTEST_US / 2, 3)  # readers ask for "inside"
        yield {"ph": "f", "bp": "e", "pid": target["pid"], "tid": target["tid"], "ts": stop, **flow}

    def _end(self, worker: str, end: str) -> tuple[str, str | None]:
        """Return the worker and the device of an end of a copy."""
        if end == HOST:
            return worker, None
        if (worker, end) in self._stretch.devices:
            return worker, end
        home = self._homes.get(end)
        return (end, None) if home is None else (home, end)

    def _incident(self, worker: str, row: Incident) -> Event:
        pid, ordinal = self._pid(worker), self._device_id(worker, row.uuid)
        tid = self._name_thread(pid, ordinal, _TASKS, 0)
        args = {"text": row.text, "device": row.uuid}
        if row.key is not None:
            args["key"] = str(row.key)
        where = {"pid": pid, "tid": tid, "ts": self._us(row.time)}
        return {"ph": "i", "s": "t", "name": row.what, "cat": "incident", "args": args, **where}

    def global_instant(self, name: str, lost: int) -> Event:
        """Return an event of the whole trace, at its begin."""
        where = {"pid": 0, "tid": 0, "ts": 0.0}
        return {"ph": "i", "s": "g", "name": name, "cat": "lost", "args": {"rows": lost}, **where}

    def counters(self) -> Iterator[Event]:
        """Yield the counters of the devices' memory, utilisation and tasks."""
        for worker, one in self._stretch.samples:
            name = f"cuda:{self._device_id(worker, one.uuid)}"
            at = {"ph": "C", "pid": self._pid(worker), "ts": self._us(one.time)}
            memory = {kind: getattr(one, f"memory_{kind}") for kind in _MEMORY}
            shares = {"GPU": one.utilization, "memory": one.bandwidth}
            for about, values in (
                ("memory (bytes)", memory),
                ("utilization (%)", {k: None if v is None else 100 * v for k, v in shares.items()}),
                ("tasks", {"running": one.running, "queued": one.queued}),
            ):
                known = {kind: value for kind, value in values.items() if value is not None}
                if known:
                    yield {"name": f"{name} {about}", "args": known, **at}

    def names(self) -> Iterator[Event]:
        """Yield the names of the processes and threads; call this last."""
        for worker, pid in self._pids.items():
            known = self._stretch.workers.get(worker)
            if known is None:
                name = worker
            else:
                name = f"worker {known.name}" if known.name == worker else _named(known, worker)
            yield _name("process_name", pid, 0, name=name)
            yield _name("process_sort_index", pid, 0, sort_index=pid)
        for (pid, tid), name in sorted(self._thread_names.items()):
            yield _name("thread_name", pid, tid, name=name)
            yield _name("thread_sort_index", pid, tid, sort_index=tid)


def _named(known: KnownWorker, address: str) -> str:
    gone = "" if known.present else ", left"
    return f"worker {known.name} ({address}{gone})"


def _name(what: str, pid: int, tid: int, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0.0, "args": args}


def _thread_name(ordinal: int, kind: str, lane: int) -> str:
    place = "host" if ordinal == _NO_DEVICE else f"cuda:{ordinal}"
    if kind == _TASKS and ordinal == _NO_DEVICE:
        place = "no device"
    number = f" ({lane + 1})" if lane else ""
    return f"{place}{'' if kind == _TASKS else f' {kind}'}{number}"


def _order(pair: tuple[str, Row]) -> float:
    return _begin(pair[1]) or 0.0
