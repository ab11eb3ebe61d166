"""The operations that every context has, and the primary context of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Self

from dask_devctx.cuda.properties import (
    CacheConfig,
    ContextFlags,
    Limits,
    StreamPriorityRange,
    joined,
)
from dask_devctx.cuda.scope import Scope, open_scopes
from dask_devctx.cuda.synchronized import RunningScope
from dask_devctx.driver.calls import Calls
from dask_devctx.errors import DeviceScopeError

if TYPE_CHECKING:
    from dask_devctx.cuda.device import Device


class AnyContext(RunningScope):
    """A CUDA context: the scope that makes it current, and all that can be read and set on it.

    The base of ``Context`` and ``PrimaryContext``.
    """

    __slots__ = ("_device", "_identity")

    _device: Device
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
    def device(self) -> Device:
        """The device of the context."""
        return self._device

    @property
    def handle(self) -> int:
        """The driver's handle, a ``CUcontext``; 0 once it is closed."""
        return self._handle

    @property
    def is_current(self) -> bool:
        """Whether it is current on this thread."""
        current = self._backend.current_context()
        return bool(current) and self._has_handle(current)

    def _has_handle(self, handle: int) -> bool:
        """Return whether the handle means this context; creates nothing."""
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


class PrimaryContext(AnyContext):
    """The context of a device that all libraries of this process share.

    Parameters
    ----------
    device
        A ``Device``.

    Notes
    -----
    ``PrimaryContext(device)`` is ``device.primary_context``: there is one object per device.
    Getting the object creates nothing. The first scope of the device or of this object retains the
    context, once per process. The object is an instance of ``Context``, too.

    References
    ----------
    ``cuDevicePrimaryCtxRetain``, ``cuDevicePrimaryCtxGetState``, ``cuDevicePrimaryCtxSetFlags``,
    ``cuDevicePrimaryCtxRelease``.
    """

    __slots__ = ()

    def __new__(cls, device: object) -> Self:
        if isinstance(device, Scope) and hasattr(device, "primary_context"):
            found: Self = device.primary_context
            return found
        raise TypeError(
            f"a primary context belongs to a Device, got {device!r} of type "
            f"{type(device).__name__}. Write Device(...).primary_context"
        )

    @classmethod
    def _of(cls, device: Device) -> Self:
        self = object.__new__(cls)
        self._device = device
        self._backend = device._backend
        self._handle = 0
        self._identity = None
        return self

    def _bind(self) -> int:
        self._handle = self._device._bind()
        return self._handle

    def _check_alive(self) -> None:
        self._bind()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return hash(self._device)

    def __repr__(self) -> str:
        return f"<PrimaryContext of {self._device!r}>"

    @property
    def handle(self) -> int:
        """The driver's handle, a ``CUcontext``; reading it retains the context."""
        return self._bind()

    def _has_handle(self, handle: int) -> bool:
        if self._device._handle:
            return self._device._handle == handle
        ordinal = self._device._ordinal()
        if not self._calls.primary_state(ordinal)[1]:
            return False
        try:  # another library holds the context: the driver only tells the handle on a retain
            return self._calls.primary_retain(ordinal) == handle
        finally:
            self._calls.primary_release(ordinal)

    @property
    def is_primary(self) -> bool:
        """True."""
        return True

    @property
    def is_active(self) -> bool:
        """Whether any code in this process has retained it; reading this does not retain it."""
        return self._calls.primary_state(self._device._ordinal())[1]

    @property
    def flags(self) -> ContextFlags:
        """The flags of the context; they can be read and set whether it is active or not."""
        return ContextFlags(self._calls.primary_state(self._device._ordinal())[0])

    @flags.setter
    def flags(self, value: ContextFlags) -> None:
        self._calls.primary_set_flags(self._device._ordinal(), joined(value))

    def release(self) -> None:
        """Release this package's hold of the context; the last holder's release destroys it.

        Raises
        ------
        DeviceScopeError
            A scope of the context is open on this thread.

        Notes
        -----
        The next scope retains the context again. No other thread may have a scope of it open.
        """
        ours: tuple[object, ...] = (self, self._device)
        if any(scope in ours for scope in open_scopes()):
            raise DeviceScopeError(self, "cannot be released while a scope of it is open")
        self._handle = 0
        self._device._unbind()
