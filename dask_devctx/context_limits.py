"""What is limited in a context: stacks, heaps, launches."""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, SupportsIndex

from dask_devctx.errors import DriverError

if TYPE_CHECKING:
    from dask_devctx.context import Context


class Limit(enum.IntEnum):
    """What can be limited in a context: the driver's ``CUlimit``; bytes unless it says else."""

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


# A driver that is older than a limit says the second.
_NO_SUCH_LIMIT = ("CUDA_ERROR_UNSUPPORTED_LIMIT", "CUDA_ERROR_INVALID_VALUE")


class Limits(Mapping[Limit, int]):
    """The limits of a context: a mapping from :class:`Limit` to numbers, which can be set.

    Notes
    -----
    Iterating gives those that the device has. Reading or setting another raises ``DriverError``
    with the status ``CUDA_ERROR_UNSUPPORTED_LIMIT``; some can be read and not set. The driver may
    round what is set: read it back.

    References
    ----------
    ``cuCtxGetLimit``, ``cuCtxSetLimit``.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def __getitem__(self, limit: Limit) -> int:
        return self._context.run(self._context._calls.limit, Limit(limit))

    def __setitem__(self, limit: Limit, value: int) -> None:
        if not isinstance(value, SupportsIndex) or operator.index(value) < 0:
            raise ValueError(f"a limit is a whole number, 0 or more, got {value!r}")
        self._context.run(self._context._calls.set_limit, Limit(limit), operator.index(value))

    def __contains__(self, limit: object) -> bool:
        return any(limit == known for known in self)

    def __iter__(self) -> Iterator[Limit]:
        for limit in Limit:
            try:
                self[limit]
            except DriverError as error:
                if error.status not in _NO_SUCH_LIMIT:
                    raise
            else:
                yield limit

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<Limits of {self._context!r}>"
