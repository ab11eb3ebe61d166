"""The operations that every context has: owned, borrowed or primary."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Generic, NamedTuple, NoReturn, ParamSpec, Self, TypeVar

from dask_devctx.cuda.flags import ContextFlags, joined
from dask_devctx.cuda.limits import Limits
from dask_devctx.cuda.scope import Scope, leave_nothing_current
from dask_devctx.cuda.suspending import call
from dask_devctx.cuda.synchronized import Synchronized
from dask_devctx.driver.calls import Calls
from dask_devctx.errors import DeviceScopeError

D = TypeVar("D")
P = ParamSpec("P")
T = TypeVar("T")


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


class AnyContext(Scope, Generic[D]):
    """A CUDA context: the scope that makes it current, and all that can be read and set on it.

    The base of ``Context`` and ``PrimaryContext``. ``D`` is the type of its device. A device knows
    its primary context, so this module cannot import the class ``Device``.
    """

    __slots__ = ("_device", "_identity")

    _device: D
    _identity: int | None  # which context the handle meant when it was taken

    def __enter__(self) -> Self:
        self._check_alive()
        return super().__enter__()

    def _check_alive(self) -> None:
        """Raise unless the context can be made current."""
        raise NotImplementedError

    def __copy__(self) -> Self:
        return self  # a copy would own the context, too, and destroy it a second time

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled: a context is one process' alone. Send its device, and "
            "make a context there or ask for one"
        )

    def close(self) -> None:
        """Raise ``DeviceScopeError``: only a ``Context`` that owns its context destroys it.

        Raises
        ------
        DeviceScopeError
            This object does not own the context.
        """
        why = "cannot be closed: the context belongs to somebody else"
        why += "; release() gives up this process's hold of it" if self.is_primary else ""
        raise DeviceScopeError(self, why)

    # -- its properties

    @property
    def device(self) -> D:
        """The device of the context."""
        return self._device

    @property
    def handle(self) -> int:
        """The driver's handle, a ``CUcontext``; 0 once it is closed."""
        return self._handle

    @property
    def is_current(self) -> bool:
        """Whether it is current on this thread."""
        raise NotImplementedError

    @property
    def is_primary(self) -> bool:
        """Whether it is its device's primary context."""
        raise NotImplementedError

    @property
    def api_version(self) -> int:
        """The version of the driver API that it was made with, such as 3020.

        References
        ----------
        ``cuCtxGetApiVersion``.
        """
        return self.run(lambda: self._calls.api_version(self._handle))

    @property
    def flags(self) -> ContextFlags:
        """The flags of the context. One flag or several can be set.

        Raises
        ------
        TypeError, ValueError
            On setting, for the same reasons as when a context is made with these flags.

        References
        ----------
        ``cuCtxGetFlags``, ``cuCtxSetFlags``.
        """
        return ContextFlags(self.run(self._calls.flags))

    @flags.setter
    def flags(self, value: ContextFlags) -> None:
        self.run(self._calls.set_flags, joined(value))

    @property
    def limits(self) -> Limits:
        """Its limits, which can be read and set by name: ``context.limits[Limit.STACK_SIZE]``."""
        return Limits(self)

    @property
    def cache_config(self) -> CacheConfig:
        """Whether its kernels prefer cache or shared memory.

        References
        ----------
        ``cuCtxGetCacheConfig``, ``cuCtxSetCacheConfig``.
        """
        return CacheConfig(self.run(self._calls.cache_config))

    @cache_config.setter
    def cache_config(self, value: CacheConfig) -> None:
        self.run(self._calls.set_cache_config, CacheConfig(value))

    @property
    def stream_priority_range(self) -> StreamPriorityRange:
        """The priorities that its streams can have.

        References
        ----------
        ``cuCtxGetStreamPriorityRange``.
        """
        return StreamPriorityRange(*self.run(self._calls.stream_priority_range))

    @property
    def _calls(self) -> Calls:
        return self._backend.driver()

    # -- its actions

    def set_current(self) -> None:
        """Make it current on this thread until something else changes that.

        Raises
        ------
        DeviceScopeError
            It was closed or destroyed.

        References
        ----------
        ``cuCtxSetCurrent``.
        """
        self._check_alive()
        self._calls.set_current(self._handle)

    @staticmethod
    def unset_current() -> None:
        """Leave no context current on this thread: see :meth:`dask_devctx.Device.unset_current`."""
        leave_nothing_current()

    def synchronize(self) -> None:
        """Wait until all work of the context is done; the current context stays.

        Raises
        ------
        DriverError
            Work of the context failed.

        References
        ----------
        ``cuCtxSynchronize``.
        """
        self.run(self._calls.synchronize)

    sync = synchronize

    def synchronized(self) -> Synchronized[Self]:
        """Return a scope of the context that waits for its work before it restores.

        :meth:`dask_devctx.Device.synchronized` does the same and has the details.
        """
        return Synchronized(self)

    def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``fn(*args, **kwargs)``, run inside the context's scope.

        Notes
        -----
        A coroutine or generator function gives a coroutine or generator, which enters the scope at
        each resume and leaves it at each suspend. If the previous context cannot be restored, the
        error carries the function's result in its attribute ``result``.
        """
        result: T = call(self, fn, *args, **kwargs)
        return result
