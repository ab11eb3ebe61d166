"""Python's garbage collector where a scheduler or a worker runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_RARELY: Final = (2_100, 30, 30)


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """While it is open, garbage is collected as rarely as in ``dask scheduler``'s process.

    A full collection visits every object, those of imported modules too: the scheduler, or all of a
    worker's GPUs, wait for it.
    """
    before = gc.get_threshold()
    often = 0 < before[0] < _RARELY[0]  # 0: never by itself
    if often:
        gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        if often:
            gc.set_threshold(*before)
