"""The rows of a worker's history and of its counts, as workers make them and others read them.

A worker sends each row as a plain tuple in the order of its fields. All times are seconds since the
epoch by the scheduler's clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, ClassVar, Final, TypeVar


@dataclass(frozen=True, slots=True)
class TaskRun:
    """One task that ran, or that failed.

    Parameters
    ----------
    key
        Its key.
    prefix
        The common name of tasks of its kind.
    uuid
        The device's UUID; None for a task without a device.
    device_id
        The device's ordinal in the worker's process; None for a task without a device.
    start, stop
        The times of its start and end; None if it failed before it could run.
    outcome
        ``"memory"`` or ``"error"``.
    slot_s
        The seconds that it waited on its worker for a free slot of its device.
    inputs_s
        The seconds that its thread spent on bringing its inputs to the device.
    memory_s
        The seconds that passed, after its first start, until there was enough memory for it.
    thread
        The identifier of its thread, or None.
    nth
        For a task of several devices, which has a row for each: the number of this one, from 0.
    """

    key: Hashable
    prefix: str
    uuid: str | None
    device_id: int | None
    start: float | None
    stop: float | None
    outcome: str
    slot_s: float = 0.0
    inputs_s: float = 0.0
    memory_s: float = 0.0
    thread: int | None = None
    nth: int = 0

    place_s = property(attrgetter("slot_s"))  # its old name


@dataclass(frozen=True, slots=True)
class Copy:
    """Values that went from one device to another, or from a device to the host and back.

    ``source`` and ``destination`` are UUIDs, or ``"host"``; or the address of a worker that got
    values through the host. ``transport`` is ``"peer"`` within a worker, ``"ipc"`` between workers
    of one machine, ``"host"`` or ``"ucx"`` as dask sends values, or ``"spill"``. A copy within a
    worker starts when the device gets its order; where it is not ``timed``, its ``stop`` is its
    ``start``.
    """

    source: str
    destination: str
    nbytes: int
    start: float
    stop: float
    transport: str
    values: int = 1
    timed: bool = True

    @property
    def rate(self) -> float | None:
        """The bytes in a second; None if it was not timed."""
        seconds = self.stop - self.start
        return self.nbytes / seconds if self.timed and seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that went wrong, or that was tried again, ``count`` times.

    ``what`` is ``"error"`` for a task that failed, ``"out-of-memory"`` for one that is tried again,
    ``"device-failed"``, ``"refused"`` for a task that got no device, or ``"lost"`` for rows that
    were dropped before a reader saw them. ``text`` is a sentence for people.
    """

    what: str
    time: float
    uuid: str | None = None
    key: Hashable = None
    text: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class DeviceCounts:
    """One device of one worker: its tasks, its memory and its load.

    Parameters
    ----------
    device_id
        Its ordinal in the worker's process.
    uuid, name
        Its UUID, and its name if that is known.
    queued, running
        The tasks that wait for a slot on it, and that run on it.
    done, failed
        The tasks that ended well, and that raised. A task of several devices counts on each.
    busy_s
        The sum of the seconds of tasks that ended. Tasks that seceded do not count, because most
        of them only wait for others.
    memory_free, memory_total
        Bytes of the whole device; None if NVML does not know them.
    occupied_s
        The seconds, since the worker has the device, in which it had at least one task.
    device_memory_limit
        The bytes that dask's values may take there; None without a limit.
    memory_held
        The bytes of dask's results there; None if they are not counted.
    memory_copies
        The bytes of copies of other devices' values.
    memory_spilled
        The bytes of the device's values that were moved to the host.
    memory_others
        The bytes of other processes; None if NVML does not know them.
    utilization
        The share of the last moment, by NVML, in which the device computed; from 0 to 1, or None.
    bandwidth
        The share of the last moment, by NVML, in which the device's memory was read or written.
    slot_s, inputs_s, memory_s
        The sums over the tasks that ended; as in :class:`TaskRun`.
    out_of_memory
        How often a task ran out of the device's memory.
    spills, spilled_nbytes
        How many values were moved from the device to the host, and their bytes.
    unspills, unspilled_nbytes
        How many values came back from the host to the device, and their bytes.
    memory_staging
        The bytes of staging memory for other workers; None if they are not counted.
    power_w, temperature
        The watts and the degrees Celsius, by NVML; None if it does not know them.
    tasks_now
        The names of some tasks that hold slots on it now.
    """

    # The counts that are added over the workers that had a device.
    SUMS: ClassVar = (
        *("done", "failed", "busy_s", "occupied_s", "slot_s", "inputs_s", "memory_s"),
        *("out_of_memory", "spills", "spilled_nbytes", "unspills", "unspilled_nbytes"),
    )

    device_id: int = -1
    uuid: str = ""
    name: str | None = None
    queued: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0
    busy_s: float = 0.0
    memory_free: int | None = None
    memory_total: int | None = None
    occupied_s: float = 0.0
    device_memory_limit: int | None = None
    memory_held: int | None = None
    memory_copies: int | None = None
    memory_spilled: int | None = None
    memory_others: int | None = None
    utilization: float | None = None
    bandwidth: float | None = None
    slot_s: float = 0.0
    inputs_s: float = 0.0
    memory_s: float = 0.0
    out_of_memory: int = 0
    spills: int = 0
    spilled_nbytes: int = 0
    unspills: int = 0
    unspilled_nbytes: int = 0
    memory_staging: int | None = None
    power_w: float | None = None
    temperature: float | None = None
    tasks_now: tuple[str, ...] = ()

    memory_limit = property(attrgetter("device_memory_limit"))  # its old name

    place_s = property(attrgetter("slot_s"))  # its old name


@dataclass(frozen=True, slots=True)
class Sample(DeviceCounts):
    """The counts of a device at a time."""

    time: float = 0.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """The values that went from one device to another, by one transport.

    Parameters
    ----------
    source, destination
        The devices' UUIDs. For values that went through the host, the destination is the address
        of the worker that asked for them, or "other workers" after a worker's first 256 rows.
    transport
        As in :class:`Copy`.
    nbytes, copies
        The bytes and the number of values that moved.
    saved
        How often a task found a value there already.
    reason
        The reason why the values went through the host, if it is known.
    measured_nbytes, measured_s
        The bytes of the transfers whose own time is known, and that time. Within a worker, the
        devices time copies of 1 MiB and more.
    """

    SUMS: ClassVar = ("nbytes", "copies", "saved", "measured_nbytes", "measured_s")

    source: str = ""
    destination: str = ""
    transport: str = "peer"
    nbytes: int = 0
    copies: int = 0
    saved: int = 0
    reason: str | None = None
    measured_nbytes: int = 0
    measured_s: float = 0.0

    way = property(attrgetter("transport"))  # its old name

    @property
    def ends(self) -> tuple[str, str, str]:
        """The source, the destination and the transport."""
        return self.source, self.destination, self.transport

    @property
    def rate(self) -> float | None:
        """The bytes in a second of the transfers whose time is known; None if there are none."""
        return self.measured_nbytes / self.measured_s if self.measured_s > 0 else None


Counted = TypeVar("Counted", bound="DeviceCounts | Transfer")
Present = TypeVar("Present", bound=DeviceCounts)


def merged(rows: Sequence[Present]) -> Present:
    """Return the row of a device that several workers use, by the latest row, which is the last.

    The values of the whole device are the latest, and the workers' own values are added.
    """
    if len(rows) == 1:
        return rows[0]
    sums: dict[str, Any] = {}
    for name in _OF_WORKERS:
        known = [value for row in rows if (value := getattr(row, name)) is not None]
        sums[name] = sum(known) if known else None
    latest, taken = rows[-1], sum(sums[memory_field(kind)] or 0 for kind in ON_A_DEVICE)
    if latest.memory_total is not None and latest.memory_free is not None:
        sums["memory_others"] = max(latest.memory_total - latest.memory_free - taken, 0)
    now = tuple(dict.fromkeys(task for row in rows for task in row.tasks_now))
    return replace(latest, tasks_now=now, **sums)


def added(one: Counted, other: DeviceCounts | Transfer) -> Counted:
    """Return a row with the sums of its own counts and another row's."""
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in one.SUMS})


def known(kind: type, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a worker's row that are fields of its kind, which have defaults.

    Workers may have another version.
    """
    return {one.name: row[one.name] for one in fields(kind) if one.name in row}


def transfers(metrics: Mapping[str, Any]) -> Iterator[Transfer]:
    """Yield the transfers that a worker's heartbeat tells of."""
    for row in metrics.get(TRAFFIC, ()):
        yield Transfer(**known(Transfer, row))


# The metrics with a row for each device in a worker's heartbeat, and for each pair of devices, and
# the name of the device in a task's metadata.
METRIC: Final = "devctx"
TRAFFIC: Final = "devctx-traffic"
DEVICE: Final = "device"
# The end of a copy that is the worker's host memory.
HOST: Final = "host"
LONGEST_TEXT: Final = 2_000  # of an incident, or of an error
# The kinds of memory that a row counts as ``memory_…``: those of the whole device, those that each
# worker counts for itself on the device, and with these the values that left it.
OF_A_DEVICE: Final = ("free", "total", "limit", "others")
ON_A_DEVICE: Final = ("held", "copies", "staging")
OF_A_WORKER: Final = (*ON_A_DEVICE, "spilled")


def memory_field(kind: str) -> str:
    """Return the field of a kind of memory."""
    return "device_memory_limit" if kind == "limit" else f"memory_{kind}"


_OF_WORKERS: Final = ("running", "queued", *DeviceCounts.SUMS, *map(memory_field, OF_A_WORKER))


Happened = TaskRun | Copy | Incident
Row = Happened | Sample
# The rings of a worker's history, and the rows in them.
KINDS: Final[dict[str, Any]] = {
    "tasks": TaskRun,
    "copies": Copy,
    "incidents": Incident,
    "samples": Sample,
}
