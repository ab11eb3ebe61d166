"""The rows within a lane, so that tasks that ran at the same time do not hide each other."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

# More tasks at a time than this share a row.
_MOST: Final = 8


class Slots:
    """The rows of all lanes; a lane has as many as it had tasks at a time: 1, 2, 4 or 8.

    Examples
    --------
    >>> slots = Slots()
    >>> [slots.place("cuda:0", *task) for task in ((0, 2), (1, 3), (2, 4))]
    [0, 1, 0]
    >>> slots.count("cuda:0"), slots.count("cuda:1")
    (2, 1)
    """

    def __init__(self) -> None:
        self._free_from: dict[Hashable, list[float]] = {}

    def place(self, lane: Hashable, start: float, stop: float) -> int:
        """Return the row of a task; the tasks of a lane come in any order of about their ends."""
        free_from = self._free_from.setdefault(lane, [])
        for slot, free in enumerate(free_from):
            if free <= start:
                free_from[slot] = stop
                return slot
        if len(free_from) < _MOST:
            free_from.append(stop)
            return len(free_from) - 1
        earliest = min(range(_MOST), key=free_from.__getitem__)
        free_from[earliest] = stop
        return earliest

    def count(self, lane: Hashable) -> int:
        """Return how many rows a lane has."""
        used = len(self._free_from.get(lane, ()))
        return 1 if used <= 1 else 1 << (used - 1).bit_length()

    def counts(self) -> dict[Hashable, int]:
        """Return how many rows each lane has that has more than one."""
        return {lane: self.count(lane) for lane, rows in self._free_from.items() if len(rows) > 1}

    def clear(self) -> None:
        """Forget the tasks, and keep the number of rows."""
        for free_from in self._free_from.values():
            free_from[:] = [0.0] * len(free_from)
