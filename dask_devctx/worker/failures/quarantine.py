"""The watched tasks, which may have broken a device before: they run one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Final

from dask_devctx.worker.failures.suspects import Suspect

# A watched task waits this long for its turn: the task whose turn it is may wait for this task.
_TURN_S: Final = 60.0


class Watch:
    """The watched tasks of this process that run, and the task whose turn it is.

    Parameters
    ----------
    turn_s
        How long a task waits for its turn, in seconds, before it continues without a turn.

    Notes
    -----
    All devices report a sticky error of one device. So watched tasks run one after the other: if a
    device fails while one of them runs, that task is blamed. Other tasks run beside it as usual.

    No task waits without end. A task that secedes from its thread to wait for others gives up its
    turn, and a task continues after ``turn_s`` seconds. Then several watched tasks run at once, and
    all of them are blamed for a failure.

    Thread-safe. Nothing here blocks: it is called on threads and on the event loop.
    """

    def __init__(self, turn_s: float = _TURN_S) -> None:
        self._turn_s = turn_s
        self._lock = threading.Lock()
        self._turns: dict[Hashable, bool] = {}  # True while the task has its turn
        self._running: dict[Hashable, Suspect] = {}
        self._closed = False

    def turns(self, key: Hashable, check: Callable[[], None]) -> Iterator[None]:
        """Yield until it is a task's turn.

        Parameters
        ----------
        key
            The task's key.
        check
            Called repeatedly; if it raises, the wait ends.
        """
        until = time.monotonic() + self._turn_s
        while True:
            check()
            with self._lock:
                late = self._closed or time.monotonic() >= until
                if late or not any(self._turns.values()):
                    self._turns[key] = True
                    return
            yield

    def seceded(self, key: Hashable) -> None:
        """Give a task's turn to the next task, while the first continues."""
        with self._lock:
            if key in self._turns:
                self._turns[key] = False

    def began(self, suspect: Suspect) -> None:
        """Note that the task whose turn it is got its device."""
        with self._lock:
            self._running[suspect.key] = suspect

    def ended(self, key: Hashable) -> None:
        """Note that a task and its device's work are done; the task's turn is over."""
        with self._lock:
            self._turns.pop(key, None)
            self._running.pop(key, None)

    def running(self) -> tuple[Suspect, ...]:
        """Return the watched tasks that have their device."""
        with self._lock:
            return tuple(self._running.values())

    def close(self) -> None:
        """End all waits."""
        self._closed = True
