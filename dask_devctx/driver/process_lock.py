"""A lock that works in a forked process, whichever thread held it at the fork."""

from __future__ import annotations

import os
import threading
import weakref


class ProcessLock:
    """A reentrant lock, used with ``with``.

    Notes
    -----
    A fork copies one thread only, the one that forks. A lock that another thread holds at that
    moment is never released in the child. The child would hang there, and not learn that a forked
    process cannot use CUDA. So the child gets a new lock.

    The lock is reentrant. Code that holds it may be interrupted by code that needs it too: a signal
    handler, or a ``__del__`` that the garbage collector calls.
    """

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
