"""Python's garbage collector where a scheduler or a worker runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# The thresholds of Python's releases: anybody else's stay as they are.
_OF_PYTHON: Final = {(700, 10, 10), (2_000, 10, 10), (2_000, 10, 0)}
_before: Final[list[tuple[int, int, int]]] = []  # for each user of this process


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """While it is open, garbage is collected as rarely as by ``dask scheduler``: a third as often.

    A full collection visits every object, those of imported modules too: the scheduler, or all of a
    worker's GPUs, wait for it.
    """
    usual = _before[0] if _before else gc.get_threshold()
    rare = tuple(3 * count for count in usual) if usual in _OF_PYTHON else usual
    if not _before:
        gc.set_threshold(*rare)
    _before.append(usual)
    try:
        yield
    finally:
        _before.pop()
        if not _before and gc.get_threshold() == rare:  # else the user has changed them
            gc.set_threshold(*usual)
