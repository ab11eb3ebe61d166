"""The launch queues of a context: a call that adds to a full one waits for the device.

A stream has room for about a thousand launches. While the legacy default stream is full, whatever
adds work to any stream waits, and so does the record of an event of the whole context. While
another stream is full, what adds to it or to the legacy stream waits, and so does making an event.

By an address, such a call keeps Python's lock, and all threads of the process would wait with it.
The bindings release the lock, which costs microseconds, and more where other threads are busy. A
record of the whole context, which each task makes, goes through them only where a queue may be
full: a launch takes a thread about two microseconds. So do a few small copies between processes.
"""

from __future__ import annotations

from time import perf_counter
from typing import Final

# CUDA's handles of the streams that always exist.
LEGACY_STREAM: Final = 1
PER_THREAD_STREAM: Final = 2

# In less time than this, no thread fills a queue.
_FILLS_S: Final = 2e-3


class LaunchQueues:
    """Knows for how long work may have gathered in the queues of each context.

    Notes
    -----
    Thread-safe. A context of which nothing is known may have full queues.
    """

    def __init__(self) -> None:
        self._recorded: dict[int, float] = {}
        self._empty: dict[int, float] = {}

    def now(self) -> float:
        """Return a moment for :meth:`recorded`."""
        return perf_counter()

    def recorded(self, event: int, at: float) -> None:
        """Note that an event stands for all work that its context had at a moment."""
        self._recorded[event] = at

    def reached(self, event: int, context: int) -> None:
        """Note that a context has done all work that it had when the event was recorded."""
        at = self._recorded.get(event)
        if at is not None:
            self._empty[context] = at

    def may_be_full(self, context: int) -> bool:
        """Return whether a call that records an event of the context may wait."""
        at = self._empty.get(context)
        return at is None or perf_counter() - at > _FILLS_S
