"""The properties of a context: its flags and limits."""

from __future__ import annotations

import enum
from typing import Any


class ContextFlags(enum.IntFlag):
    """How a context waits, and other options: the driver's ``CUctx_flags``."""

    SCHED_AUTO = 0x00
    SCHED_SPIN = 0x01
    SCHED_YIELD = 0x02
    SCHED_BLOCKING_SYNC = 0x04
    MAP_HOST = 0x08
    LMEM_RESIZE_TO_MAX = 0x10
    COREDUMP_ENABLE = 0x20
    USER_COREDUMP_ENABLE = 0x40
    SYNC_MEMOPS = 0x80


def checked(flags: ContextFlags) -> int:
    """Return a context's flags as a number for the driver, which says less about wrong ones."""
    if not isinstance(flags, ContextFlags):
        raise TypeError(
            "a context's flags are ContextFlags, such as ContextFlags.SCHED_SPIN, joined by |; got "
            f"{flags!r} of type {type(flags).__name__}"
        )
    return int(flags)


class Limit(enum.IntEnum):
    """A limit of a context: the driver's ``CUlimit``. In bytes, unless a comment says otherwise."""

    STACK_SIZE = 0
    PRINTF_FIFO_SIZE = 1
    MALLOC_HEAP_SIZE = 2
    DEV_RUNTIME_SYNC_DEPTH = 3  # launches in depth
    DEV_RUNTIME_PENDING_LAUNCH_COUNT = 4  # launches
    MAX_L2_FETCH_GRANULARITY = 5
    PERSISTING_L2_CACHE_SIZE = 6
    SHMEM_SIZE = 7
    CIG_ENABLED = 8  # 0 or 1
    CIG_SHMEM_FALLBACK_ENABLED = 9  # 0 or 1
    PER_BLOCK_MEMORY_SIZE = 10


class Limits:
    """The limits of a context: ``limits[Limit.STACK_SIZE]`` is one of them, and can be set."""

    # One that the device does not support raises a DriverError with the status
    # CUDA_ERROR_UNSUPPORTED_LIMIT. The driver may round a value that is set: read it back.

    __iter__ = None  # Python would ask for one limit after the other, by their numbers

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getitem__(self, limit: Limit) -> int:
        return int(self._context.run(self._context._calls.limit, Limit(limit)))

    def __setitem__(self, limit: Limit, value: int) -> None:
        self._context.run(self._context._calls.set_limit, Limit(limit), value)
