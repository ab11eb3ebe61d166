"""The primary context of a device, which all libraries of a process share."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from dask_devctx.cuda.any_context import AnyContext
from dask_devctx.cuda.flags import ContextFlags, joined
from dask_devctx.cuda.scope import Scope, open_scopes
from dask_devctx.driver.backends import Backend
from dask_devctx.errors import DeviceScopeError


class HasPrimaryContext(Protocol):
    """A device, as far as its primary context needs it."""

    _backend: Backend
    _handle: int

    def _ordinal(self) -> int: ...
    def _bind(self) -> int: ...
    def _unbind(self) -> None: ...


D = TypeVar("D", bound=HasPrimaryContext)


class PrimaryContext(AnyContext[D]):
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

    def __new__(cls, device: Any) -> PrimaryContext[Any]:
        if isinstance(device, Scope) and hasattr(device, "primary_context"):
            found: PrimaryContext[Any] = device.primary_context
            return found
        raise TypeError(
            f"a primary context belongs to a Device, got {device!r} of type "
            f"{type(device).__name__}. Write Device(...).primary_context"
        )

    @classmethod
    def _of(cls, device: D) -> PrimaryContext[D]:
        self: PrimaryContext[D] = object.__new__(cls)
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

    @property
    def is_current(self) -> bool:
        """Whether it is current on this thread."""
        current = self._backend.current_context()
        return bool(current) and self.has_handle(current)

    def has_handle(self, handle: int) -> bool:
        """Return whether this context has the given handle; creates nothing."""
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
