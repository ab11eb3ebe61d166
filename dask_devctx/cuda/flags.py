"""The flags of a context: how it waits, and other options."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Iterable


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


def written(flags: ContextFlags) -> str:
    """Return the flags as they are written in code."""
    names = [one.name for one in ContextFlags if one & flags] or [ContextFlags.SCHED_AUTO.name]
    return " | ".join(f"ContextFlags.{name}" for name in names)


def joined(flags: ContextFlags | Iterable[object]) -> int:
    """Return a flag, or all flags of an iterable, as one number for the driver."""
    wanted = _number(flags)
    unknown = wanted & ~sum(map(int, ContextFlags))
    if unknown:
        names = ", ".join(f"{one.name} ({one:#x})" for one in ContextFlags.__members__.values())
        raise ValueError(
            f"a context has no flag {unknown:#x}, which is in {wanted:#x}; there are {names}"
        )
    ways = [one.name for one in ContextFlags if one & wanted & _SCHEDULING]
    if len(ways) > 1:
        raise ValueError(
            f"the flags {' and '.join(map(str, ways))} exclude each other, got {wanted:#x}: a "
            "context waits in one way. Give one of SCHED_SPIN, SCHED_YIELD and "
            "SCHED_BLOCKING_SYNC, or none for SCHED_AUTO"
        )
    return wanted


def _number(flags: object) -> int:
    if isinstance(flags, int) and not isinstance(flags, bool):
        return int(flags)
    if isinstance(flags, Iterable) and not isinstance(flags, str):
        return functools.reduce(operator.or_, map(_number, flags), 0)
    raise TypeError(
        "a context's flags are ContextFlags, such as ContextFlags.SCHED_SPIN; got "
        f"{flags!r} of type {type(flags).__name__}"
    )
