"""A lock that works in a forked process, whichever thread held it at the fork."""

from __future__ import annotations

import os
import threading
import weakref


class ProcessLock:
    """A reentrant lock that works in a forked process, whichever thread held it at the fork."""

    # A fork copies one thread only: what another thread holds would never be released in the child.
    # Reentrant: a signal handler or a `__del__` may need it while this thread holds it.

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def _after_fork(self) -> None:
        if self._lock.acquire(blocking=False):  # free, or held by this thread
            self._lock.release()
        else:
            self._lock = threading.RLock()


_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _locks:
        lock._after_fork()


os.register_at_fork(after_in_child=_after_fork)
