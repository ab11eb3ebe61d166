"""The rows within a lane, so that tasks that ran at the same time do not hide each other."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

# More tasks at a time than this share a row.
_MOST: Final = 8
# Two tasks of one thread ran one after the other, even if their times overlap by this much: a
# worker's estimate of the scheduler's clock changes from time to time.
_JUMP_S: Final = 0.1


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
        self._of_threads: dict[Hashable, int] = {}

    def place(self, lane: Hashable, start: float, stop: float, thread: Hashable = None) -> int:
        """Return the row of a task; the tasks of a lane come in about the order of their ends."""
        free_from = self._free_from.setdefault(lane, [])
        slot = self._of_threads.get((lane, thread))
        if slot is None or free_from[slot] > start + _JUMP_S:
            slot = self._free(free_from, start)
            if thread is not None:
                self._of_threads[lane, thread] = slot
        free_from[slot] = stop
        return slot

    @staticmethod
    def _free(free_from: list[float], start: float) -> int:
        for slot, free in enumerate(free_from):
            if free <= start:
                return slot
        if len(free_from) < _MOST:
            free_from.append(start)
            return len(free_from) - 1
        return min(range(_MOST), key=free_from.__getitem__)

    def count(self, lane: Hashable) -> int:
        """Return how many rows a lane has."""
        used = len(self._free_from.get(lane, ()))
        return 1 if used <= 1 else 1 << (used - 1).bit_length()

    def counts(self) -> dict[Hashable, int]:
        """Return how many rows each lane has that has more than one."""
        return {lane: self.count(lane) for lane, rows in self._free_from.items() if len(rows) > 1}

    def clear(self) -> None:
        """Forget the tasks, and keep the number of rows."""
        self._of_threads.clear()
        for free_from in self._free_from.values():
            free_from[:] = [0.0] * len(free_from)
