"""The rows within a lane, so that tasks that ran at the same time do not hide each other."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

# More tasks at a time than this share a row.
_MOST: Final = 8
# Times may be wrong by this much: a worker's estimate of the scheduler's clock changes.
_JUMP_S: Final = 0.1


@dataclass
class _Slot:
    """A row: the thread of its last task, and when that task ended."""

    thread: Hashable
    free_from: float


class Slots:
    """The rows of all lanes; a lane has as many as it had tasks at a time: 1, 2, 4 or 8.

    Notes
    -----
    The tasks of one thread ran one after the other, even if their times overlap.

    Examples
    --------
    >>> slots = Slots()
    >>> [slots.place("cuda:0", *task) for task in ((0, 2), (1, 3), (2, 4))]
    [0, 1, 0]
    >>> slots.count("cuda:0"), slots.count("cuda:1")
    (2, 1)
    """

    def __init__(self) -> None:
        self._lanes: dict[Hashable, list[_Slot]] = {}

    def place(self, lane: Hashable, start: float, stop: float, thread: Hashable = None) -> int:
        """Return the row of a task; the tasks of a lane come in about the order of their ends."""
        slots = self._lanes.setdefault(lane, [])
        number = self._find(slots, start, thread)
        if number == len(slots):
            slots.append(_Slot(thread, stop))
        else:
            slots[number] = _Slot(thread, stop)
        return number

    @staticmethod
    def _find(slots: list[_Slot], start: float, thread: Hashable) -> int:
        if thread is not None:
            for number, slot in enumerate(slots):
                if slot.thread == thread:
                    return number
        for number, slot in enumerate(slots):
            if slot.free_from <= start + (0.0 if thread is None else _JUMP_S):
                return number
        if len(slots) < _MOST:
            return len(slots)
        return min(range(_MOST), key=lambda number: slots[number].free_from)

    def count(self, lane: Hashable) -> int:
        """Return how many rows a lane has."""
        used = len(self._lanes.get(lane, ()))
        return 1 if used <= 1 else 1 << (used - 1).bit_length()

    def counts(self) -> dict[Hashable, int]:
        """Return how many rows each lane has that has more than one."""
        return {lane: self.count(lane) for lane, slots in self._lanes.items() if len(slots) > 1}

    def clear(self) -> None:
        """Forget the tasks, and keep the number of rows."""
        for slots in self._lanes.values():
            slots[:] = [_Slot(None, 0.0) for _ in slots]
