"""The tasks that are watched, since they may have broken a device before: one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Final

from dask_devctx.worker.failures.suspects import Suspect

# A watched task waits no longer for its turn: the one that has it may be waiting for this one.
_TURN_S: Final = 60.0


class Watch:
    """Which watched tasks of this process run, and whose turn it is.

    Parameters
    ----------
    turn_s
        How long a task waits for its turn before it goes on without, in seconds.

    Notes
    -----
    A sticky error of one device is seen on all. So watched tasks run one after the other: when a
    device fails while one runs, it is that one. Tasks that are not watched run beside it as ever.

    No task waits without end: a task that secedes from its thread, as one does that waits for
    others, gives its turn away, and a task that waited for long enough goes on. Then several run at
    once, and which of them it is cannot be told.

    Thread-safe. Nothing here blocks: it is called on threads and on the event loop.
    """

    def __init__(self, turn_s: float = _TURN_S) -> None:
        self._turn_s = turn_s
        self._lock = threading.Lock()
        self._turns: dict[Hashable, bool] = {}  # of which those are True that still have it
        self._running: dict[Hashable, Suspect] = {}
        self._closed = False

    def turns(self, key: Hashable, check: Callable[[], None]) -> Iterator[None]:
        """Yield while it is not yet a task's turn; when this ends, it is.

        Parameters
        ----------
        key
            The task's key.
        check
            Called again and again; an exception from it ends the waiting.
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
        """Give a task's turn to the next, while it goes on."""
        with self._lock:
            if key in self._turns:
                self._turns[key] = False

    def began(self, suspect: Suspect) -> None:
        """Note that a task whose turn it is was given its device."""
        with self._lock:
            self._running[suspect.key] = suspect

    def ended(self, key: Hashable) -> None:
        """Note that a task is done, and its device was seen to be; its turn is over."""
        with self._lock:
            self._turns.pop(key, None)
            self._running.pop(key, None)

    def running(self) -> tuple[Suspect, ...]:
        """Return those that have their device."""
        with self._lock:
            return tuple(self._running.values())

    def close(self) -> None:
        """Let nobody wait any more."""
        self._closed = True
