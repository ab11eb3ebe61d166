"""The lanes of the plots: one for each device, grouped by host, and one for other work."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple

from dask_devctx.scheduler.cluster import device_names

# The space between two hosts, as a part of a lane's height.
HOST_PADDING: Final = 0.6
# The label of the lane for tasks without a device.
NO_DEVICE: Final = "no device"

# The most rows of a lane: more tasks at a time share one.
_MOST: Final = 8


class Member(NamedTuple):
    """A device of a host: its ordinal there, or None twice for the tasks without a device."""

    host: str
    uuid: str | None
    device_id: int | None


class Lanes:
    """The positions of lanes on an axis with the labels ``factors``, from the bottom to the top.

    A device that several workers use has one lane, and so do the tasks without a device of one
    host. With several hosts, a factor is the pair of the host and the device.

    Examples
    --------
    >>> lanes = Lanes(Member("node-1", f"GPU-{n}", n) for n in range(2))
    >>> lanes.factors
    ['cuda:1', 'cuda:0']
    >>> lanes.position("node-1", "GPU-0"), lanes.label("node-1", "GPU-0")
    (1.5, 'cuda:0')
    """

    def __init__(self, members: Iterable[Member] = ()) -> None:
        labels = _labels(set(members))
        several = len({host for host, _ in labels}) > 1
        self.factors: list[str | tuple[str, str]] = []
        self.positions: dict[tuple[str, str | None], float] = {}
        self.labels: dict[tuple[str, str | None], str] = {}
        position, last = 0.5, None
        for place, label in reversed(labels.items()):
            host = place[0]
            if last not in (None, host):
                position += HOST_PADDING
            last = host
            self.positions[place] = position
            self.labels[place] = f"{host} {label}" if several else label
            self.factors.append((host, label) if several else label)
            position += 1

    def position(self, host: str, uuid: str | None) -> float | None:
        """Return the middle of a device's lane, or None if it has no lane."""
        return self.positions.get((host, uuid))

    def label(self, host: str, uuid: str | None) -> str:
        """Return the name of a device's lane, with its host if there are several."""
        return self.labels.get((host, uuid), NO_DEVICE if uuid is None else uuid)


def _labels(members: set[Member]) -> dict[tuple[str, str | None], str]:
    """Return the label of each lane, from the top to the bottom."""
    ordered = sorted(members, key=_order)
    names = device_names((m.host, m.device_id or 0, m.uuid) for m in ordered if m.uuid is not None)
    return {(m.host, m.uuid): NO_DEVICE if m.uuid is None else names[m.uuid] for m in ordered}


def _order(member: Member) -> tuple[object, ...]:
    last = member.device_id is None
    return _natural(member.host), last, member.device_id or 0, member.uuid


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers in a text by their value: node-2 comes before node-10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)
    ]


class Slots:
    """The rows of all lanes, so that tasks that ran at the same time do not hide each other.

    A lane has as many as it had tasks at a time, eight at most. The tasks of one thread ran one
    after the other, even if their times overlap.

    Examples
    --------
    >>> slots = Slots()
    >>> [slots.place("cuda:0", *task) for task in ((0, 2, 7), (1, 3, 8), (2, 4, 9))]
    [0, 1, 0]
    >>> slots.count("cuda:0"), slots.count("cuda:1")
    (2, 1)
    """

    def __init__(self) -> None:
        # The thread of the last task of each row, and when that task ended.
        self._lanes: dict[Hashable, list[tuple[Hashable, float]]] = {}

    def place(self, lane: Hashable, start: float, stop: float, thread: Hashable) -> int:
        """Return the row of a task; the tasks of a lane come in about the order of their starts."""
        rows = self._lanes.setdefault(lane, [])
        same = [n for n, (last, _) in enumerate(rows) if last == thread is not None]
        free = [n for n, (_, until) in enumerate(rows) if until <= start]
        if not (same or free) and len(rows) < _MOST:
            rows.append((thread, stop))
            return len(rows) - 1
        number = [*same, *free, min(range(len(rows)), key=lambda n: rows[n][1])][0]
        rows[number] = thread, stop
        return number

    def count(self, lane: Hashable) -> int:
        """Return how many rows a lane has."""
        return len(self._lanes.get(lane, ())) or 1

    def counts(self) -> dict[Hashable, int]:
        """Return how many rows each lane has that has more than one."""
        return {lane: len(rows) for lane, rows in self._lanes.items() if len(rows) > 1}
