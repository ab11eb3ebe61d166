"""A lock that a forked process does not find held by a thread that it does not have."""

from __future__ import annotations

import os
import threading
import weakref


class ProcessLock:
    """A reentrant lock, used with ``with``.

    Notes
    -----
    Of a process' threads a fork takes along the one that forks. A lock that another one held at
    that moment would be held for ever: who waits for it in the child would hang, where it is to be
    told that a forked process cannot use CUDA. Here the child gets a new lock.

    Reentrant, because what runs inside may be interrupted by what takes the lock, too: a signal
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
        if self._lock.acquire(blocking=False):  # nobody's, or this thread's
            self._lock.release()
        else:
            self._lock = threading.RLock()


_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _locks:
        lock._after_fork()


os.register_at_fork(after_in_child=_after_fork)
