"""The limits of a context: stacks, heaps, launches."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, SupportsIndex

from dask_devctx.driver.calls import Calls
from dask_devctx.errors import DriverError


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


_MOST = 2**64 - 1  # the driver takes a size_t

# A driver that is older than the limit answers with the second one.
_NO_SUCH_LIMIT = ("CUDA_ERROR_UNSUPPORTED_LIMIT", "CUDA_ERROR_INVALID_VALUE")


class _Limited(Protocol):
    """A context, as far as this module needs it."""

    def run(self, fn: Callable[..., Any], /, *args: Any) -> Any: ...
    @property
    def _calls(self) -> Calls: ...


class Limits(Mapping[Limit, int]):
    """The limits of a context: a mapping from :class:`Limit` to numbers, which can be set.

    Notes
    -----
    Iterating gives the limits that the device supports. Reading or setting any other raises
    ``DriverError`` with the status ``CUDA_ERROR_UNSUPPORTED_LIMIT``. Some limits can be read but
    not set. The driver may round a value that is set: read it back.

    References
    ----------
    ``cuCtxGetLimit``, ``cuCtxSetLimit``.
    """

    def __init__(self, context: _Limited) -> None:
        self._context = context

    def __getitem__(self, limit: Limit) -> int:
        return int(self._context.run(self._context._calls.limit, _known(limit)))

    def __setitem__(self, limit: Limit, value: int) -> None:
        number = -1 if isinstance(value, bool) or not isinstance(value, SupportsIndex) else value
        if not 0 <= operator.index(number) <= _MOST:
            raise ValueError(f"a limit is a whole number, 0 or more, got {value!r}")
        self._context.run(self._context._calls.set_limit, _known(limit), operator.index(number))

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


def _known(limit: object) -> Limit:
    try:
        return Limit(limit)  # type: ignore[arg-type]
    except ValueError:
        names = ", ".join(f"Limit.{known}" for known in Limit.__members__)
        raise ValueError(f"no limit {limit!r}; there are {names}") from None
