"""The properties of a context: flags, limits, its cache and its streams' priorities."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from dask_devctx.errors import DriverError


class CacheConfig(enum.IntEnum):
    """Whether kernels prefer first-level cache or shared memory: ``CUfunc_cache``."""

    PREFER_NONE = 0
    PREFER_SHARED = 1
    PREFER_L1 = 2
    PREFER_EQUAL = 3


class StreamPriorityRange(NamedTuple):
    """The priorities that streams can have; a smaller number is a greater priority."""

    least: int
    greatest: int


# -- flags


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


# A context waits in one of these ways; the other flags can be added.
_SCHEDULING = ContextFlags.SCHED_SPIN | ContextFlags.SCHED_YIELD | ContextFlags.SCHED_BLOCKING_SYNC


def joined(flags: object) -> int:
    """Return a flag, or all flags of an iterable, as one number for the driver."""
    if isinstance(flags, int) and not isinstance(flags, bool):
        wanted = int(flags)
    elif isinstance(flags, Iterable) and not isinstance(flags, str):
        wanted = functools.reduce(operator.or_, map(joined, flags), 0)
    else:
        raise TypeError(
            "a context's flags are ContextFlags, such as ContextFlags.SCHED_SPIN; got "
            f"{flags!r} of type {type(flags).__name__}"
        )
    if wanted & ~sum(ContextFlags) or (wanted & _SCHEDULING).bit_count() > 1:
        names = ", ".join(f"{one.name} ({one:#x})" for one in ContextFlags)
        raise ValueError(
            f"no context has the flags {wanted:#x}: there are {names}. SCHED_SPIN, SCHED_YIELD and "
            "SCHED_BLOCKING_SYNC exclude each other: a context waits in one way"
        )
    return wanted


# -- limits


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


# A driver that is older than the limit answers with the second one.
_NO_SUCH_LIMIT = ("CUDA_ERROR_UNSUPPORTED_LIMIT", "CUDA_ERROR_INVALID_VALUE")


class Limits(Mapping[Limit, int]):
    """The limits of a context: a mapping from :class:`Limit` to numbers, which can be set."""

    # Iterating gives the limits that the device supports. Any other raises a DriverError with the
    # status CUDA_ERROR_UNSUPPORTED_LIMIT. Some can be read but not set. The driver may round a
    # value that is set: read it back.

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getitem__(self, limit: Limit) -> int:
        return int(self._context.run(self._context._calls.limit, Limit(limit)))

    def __setitem__(self, limit: Limit, value: int) -> None:
        self._context.run(self._context._calls.set_limit, Limit(limit), value)

    def get(self, limit: Limit, default: Any = None) -> Any:
        """Return a limit, or ``default`` if the device does not support it."""
        try:
            return self[limit]
        except DriverError as error:
            if error.status not in _NO_SUCH_LIMIT:
                raise
            return default

    def __contains__(self, limit: object) -> bool:
        return any(limit == known for known in self)

    def __iter__(self) -> Iterator[Limit]:
        return (limit for limit in Limit if self.get(limit) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<Limits of {self._context!r}>"
