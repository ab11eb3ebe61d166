"""The timeline of a cluster's devices as a file for Perfetto and chrome://tracing.

References
----------
The "Trace Event Format" of the Chromium project: its JSON object format.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from distributed import Client, Scheduler

from dask_devctx.client.live import refuse_unusable
from dask_devctx.errors import DevctxError, counted
from dask_devctx.scheduler.history import DeviceHistory, KnownDevice, KnownWorker
from dask_devctx.scheduler.rows import HOST, Copy, Incident, Sample, TaskRun

# Inside a `with`, the rows are read this often, so that none are dropped before the end.
_INTERVAL_S: Final = 1.0
Event = dict[str, Any]
Row = TaskRun | Copy | Incident
End = tuple[str, str | None]  # a worker, and a device of it or None


@dataclass
class Stretch:
    """The known history of a stretch of time."""

    rows: list[tuple[str, Row]] = field(default_factory=list)
    samples: list[tuple[str, Sample]] = field(default_factory=list)
    devices: Mapping[tuple[str, str], KnownDevice] = field(default_factory=dict)
    workers: Mapping[str, KnownWorker] = field(default_factory=dict)
    lost: int = 0


class Timeline:
    """The timeline of a cluster's devices in a file; :func:`timeline` makes it.

    Attributes
    ----------
    path
        The file.
    tasks, copies
        The number of tasks and of copies in the file.
    lost
        How many rows of the history were dropped before they were read.
    """

    def __init__(self, client: Client, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.tasks = self.copies = self.lost = 0
        self._client = client
        self._stretch = Stretch()
        self._number = 0
        self._last_sample = 0.0
        self._reading: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        lost = f", {self.lost} rows lost" if self.lost else ""
        tasks = counted(self.tasks, "task")
        copies = f"{self.copies} {'copy' if self.copies == 1 else 'copies'}"
        return f"<timeline {str(self.path)!r}: {tasks}, {copies}{lost}>"

    def __await__(self) -> Generator[Any, Any, Self]:
        return self.written().__await__()

    async def written(self) -> Self:
        """Write all that the cluster remembers, or that was read, and return this."""
        await self._read()
        content = trace(self._stretch)
        about = content["otherData"]
        self.tasks, self.copies, self.lost = about["tasks"], about["copies"], about["lost_rows"]
        self.path.write_text(json.dumps(content), encoding="utf-8")
        return self

    # -- for a stretch of work

    def __enter__(self) -> Self:
        self._client.sync(self.__aenter__)
        return self

    def __exit__(self, *error: object) -> None:
        self._client.sync(self.__aexit__)

    async def __aenter__(self) -> Self:
        await self._read()  # so that rows of earlier work are not in its way
        self._stretch = Stretch()
        self._reading = asyncio.ensure_future(self._read_often())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._reading is not None
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading
        await self.written()

    async def _read_often(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            with suppress(OSError):  # the end reads again, and raises
                await self._read()

    async def _read(self) -> None:
        """Read the rows since the last time."""
        found: Any = await self._client.run_on_scheduler(
            _of_scheduler, since=self._number, samples_since=self._last_sample
        )
        if found is None:
            raise DevctxError(
                "no timeline was made, because the scheduler does not have the plugin of "
                "dask-devctx. The plugin comes with the first worker that has devices: "
                "client.register_plugin(DevicePlugin()), and install dask-devctx where the "
                "scheduler runs"
            )
        reading, samples, devices, workers = found
        stretch = self._stretch
        stretch.rows += reading.rows
        stretch.samples += samples
        stretch.devices, stretch.workers = devices, workers
        stretch.lost += reading.lost
        self._number = reading.next
        self._last_sample = max((one.time for _, one in samples), default=self._last_sample)


def timeline(client: Client, path: str | os.PathLike[str]) -> Timeline:
    """Write what ran on a cluster's devices as a trace, for https://ui.perfetto.dev.

    Parameters
    ----------
    client
        A client of the cluster; with an asynchronous one, use ``await`` or ``async with``.
    path
        The file that is written, such as ``"timeline.json"``. chrome://tracing opens it too.

    Returns
    -------
    Timeline
        The numbers of tasks and copies, and of rows that are lost. The file has all that the
        workers remember: ``devctx.history`` rows each. With ``with``, the file is written again at
        the end, and has only what happened inside.

    Raises
    ------
    DevctxError
        The scheduler does not have the plugin.
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
    smaller ones are not timed. Counters show memory, utilisation and the tasks on a device.

    Examples
    --------
    ::

        timeline(client, "all.json")
        with timeline(client, "training.json"):
            client.gather(client.map(train, parts))
    """
    if isinstance(client, str | os.PathLike) and isinstance(path, Client):
        raise TypeError(f"timeline(client, path): the client comes first, got {client!r}")
    refuse_unusable(client, "timeline(Client(cluster), path)")
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"timeline(client, path) takes the path of a file, got {path!r}")
    made = Timeline(client, path)
    if not client.asynchronous:
        client.sync(made.written)
    return made


async def _of_scheduler(dask_scheduler: Scheduler, since: int, samples_since: float) -> Any:
    history = DeviceHistory.of(dask_scheduler)
    if history is None:
        return None
    await history.collect()
    samples: list[tuple[str, Sample]] = [
        (worker, one)
        for (worker, _), kept in history.samples.items()
        for one in kept
        if one.time > samples_since
    ]
    reading = history.read(since)
    return reading, samples, history.devices, history.workers


# -- the file: a process of the trace is a worker, and a thread is a device. Slices of one thread
# may not overlap, so a device that runs several tasks at a time has several threads

# The threads of a device follow each other: its tasks, the copies that leave it and that arrive.
_PER_DEVICE: Final = 1000
_FIRST: Final = {"tasks": 0, "sends": 400, "receives": 700}
# The ordinal of the threads that belong to no device.
_NO_DEVICE: Final = -1
# A slice of no duration has no place for an arrow.
_SHORTEST_US: Final = 1.0
_MEMORY: Final = ("held", "copies", "staging", "spilled", "others", "free")


def trace(stretch: Stretch) -> dict[str, Any]:
    """Return the content of a trace file."""
    times = [_begin(row) for _, row in stretch.rows] + [one.time for _, one in stretch.samples]
    writer = _Writer(stretch, min((time for time in times if time is not None), default=0.0))
    events = [*writer.rows(), *writer.counters()]
    # Workers tell of the rows that they dropped before these were collected.
    told = [one for _, one in stretch.rows if isinstance(one, Incident) and one.what == "lost"]
    lost = stretch.lost + sum(one.count for one in told)
    if lost:
        events.append(
            _event("i", 0, 0, 0.0, f"{lost} earlier rows are lost", s="g", args={"rows": lost})
        )
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


def _event(ph: str, pid: int, tid: int, ts: float, name: str, **content: Any) -> Event:
    return {"ph": ph, "pid": pid, "tid": tid, "ts": ts, "name": name, **content}


class _Writer:
    def __init__(self, stretch: Stretch, origin: float) -> None:
        self.origin = origin
        self._stretch = stretch
        # The ends of the latest slices on the lanes of each process, device and kind.
        self._lanes: defaultdict[tuple[int, int, str], list[float]] = defaultdict(list)
        self._pids: dict[str, int] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._n_copies = 0
        self._homes = {uuid: worker for worker, uuid in reversed([*stretch.devices])}
        for worker in stretch.workers:
            self._pid(worker)
        for worker, uuid in stretch.devices:  # a device without tasks has a lane, too
            self._thread((worker, uuid), "tasks", 0)

    def _us(self, time: float) -> float:
        return round((time - self.origin) * 1e6, 3)

    def _pid(self, worker: str) -> int:
        return self._pids.setdefault(worker, len(self._pids) + 1)

    def _ordinal(self, end: End) -> int:
        known = None if end[1] is None else self._stretch.devices.get((end[0], end[1]))
        return _NO_DEVICE if known is None else known.device_id

    def _thread(self, end: End, kind: str, lane: int) -> tuple[int, int]:
        """Return the numbers of a process and of a thread, which gets its name."""
        pid, ordinal = self._pid(end[0]), self._ordinal(end)
        tid = (ordinal + 1) * _PER_DEVICE + _FIRST[kind] + lane + 1
        name = f"cuda:{ordinal}" if ordinal != _NO_DEVICE else "host"
        if kind != "tasks":
            name += f" {kind}"
        elif ordinal == _NO_DEVICE:
            name = "no device"
        self._names.setdefault((pid, tid), f"{name} ({lane + 1})" if lane else name)
        return pid, tid

    def _slice(
        self, end: End, kind: str, start: float, stop: float, name: str, **content: Any
    ) -> Event:
        """Return a slice on a free thread of a device."""
        begin = self._us(start)
        duration = max(round((stop - start) * 1e6, 3), _SHORTEST_US)
        lanes = self._lanes[self._pid(end[0]), self._ordinal(end), kind]
        lane = next((n for n, ends in enumerate(lanes) if ends <= begin), len(lanes))
        lanes[lane : lane + 1] = [begin + duration]
        return _event("X", *self._thread(end, kind, lane), begin, name, dur=duration, **content)

    # -- events

    def rows(self) -> Iterator[Event]:
        """Yield the events of tasks, copies and incidents."""
        for worker, row in sorted(self._stretch.rows, key=lambda pair: _begin(pair[1]) or 0.0):
            if isinstance(row, TaskRun):
                yield from self._task(worker, row)
            elif isinstance(row, Copy):
                yield from self._copy(worker, row)
            elif row.what != "lost":
                args = {"text": row.text, "device": row.uuid}
                if row.key is not None:
                    args["key"] = str(row.key)
                where = self._thread((worker, row.uuid), "tasks", 0)
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
        red: dict[str, Any] = {"cname": "terrible"} if run.outcome == "error" else {}
        end, times = (worker, run.uuid), (run.start, run.stop)
        yield self._slice(end, "tasks", *times, run.prefix, cat="task", args=args, **red)

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
        name = f"copy by {row.transport}"
        sends, receives = self._end(worker, row.source), self._end(worker, row.destination)
        source, target = (
            self._slice(*end, row.start, row.stop, name, cat="copy", args=args)
            for end in ((sends, "sends"), (receives, "receives"))
        )
        self._n_copies += 1
        arrow: dict[str, Any] = {"name": "copy", "cat": "copy", "id": self._n_copies}
        stop = round(target["ts"] + target["dur"] - _SHORTEST_US / 2, 3)  # readers ask for "inside"
        yield from (
            source,
            target,
            _event("s", source["pid"], source["tid"], source["ts"], **arrow),
            _event("f", target["pid"], target["tid"], stop, bp="e", **arrow),
        )

    def _end(self, worker: str, end: str) -> End:
        """Return the worker and the device of an end of a copy."""
        if end == HOST:
            return worker, None
        if (worker, end) in self._stretch.devices:
            return worker, end
        home = self._homes.get(end)
        return (end, None) if home is None else (home, end)

    def counters(self) -> Iterator[Event]:
        """Yield the counters of the devices' memory, utilisation and tasks."""
        for worker, one in self._stretch.samples:
            device = f"cuda:{self._ordinal((worker, one.uuid))}"
            shares = {"GPU": one.utilization, "memory": one.bandwidth}
            for about, values in (
                ("memory (bytes)", {kind: getattr(one, f"memory_{kind}") for kind in _MEMORY}),
                ("utilization (%)", {k: None if v is None else 100 * v for k, v in shares.items()}),
                ("tasks", {"running": one.running, "queued": one.queued}),
            ):
                known = {kind: value for kind, value in values.items() if value is not None}
                if known:
                    at = self._pid(worker), 0, self._us(one.time)
                    yield _event("C", *at, f"{device} {about}", args=known)

    def names(self) -> Iterator[Event]:
        """Yield the names of the processes and threads; call this last."""
        for worker, pid in self._pids.items():
            known, name = self._stretch.workers.get(worker), worker
            if known is not None and known.name != worker:
                name = f"worker {known.name} ({worker}{'' if known.present else ', left'})"
            yield _event("M", pid, 0, 0.0, "process_name", args={"name": name})
            yield _event("M", pid, 0, 0.0, "process_sort_index", args={"sort_index": pid})
        for (pid, tid), name in sorted(self._names.items()):
            yield _event("M", pid, tid, 0.0, "thread_name", args={"name": name})
            yield _event("M", pid, tid, 0.0, "thread_sort_index", args={"sort_index": tid})
