"""The primary context of a device, which all libraries of a process share."""

from __future__ import annotations

from dask_devctx.cuda.context import Context, is_primary
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.flags import ContextFlags, joined
from dask_devctx.cuda.scope import open_scopes
from dask_devctx.errors import DeviceScopeError


class PrimaryContext(Context):
    """The context of a device that all libraries of this process share.

    Parameters
    ----------
    device
        What :class:`~dask_devctx.Device` accepts.

    Notes
    -----
    ``PrimaryContext(1)`` is ``Device(1).primary_context``: one object per device. Asking for it
    creates nothing; the first scope of the device or of this object retains it, once per process.

    References
    ----------
    ``cuDevicePrimaryCtxRetain``, ``cuDevicePrimaryCtxGetState``, ``cuDevicePrimaryCtxSetFlags``,
    ``cuDevicePrimaryCtxRelease``.
    """

    __slots__ = ()

    def __new__(cls, device: object) -> PrimaryContext:
        return Device(device).primary_context

    def __init__(self, device: object) -> None:
        """Nothing is left to do: the object may have been in use for long."""

    @classmethod
    def _of(cls, device: Device) -> PrimaryContext:
        self = object.__new__(cls)
        self._device = device
        self._backend = device._backend
        self._handle = 0
        self._identity = None
        self._owned = False
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
        """The driver's handle, a ``CUcontext``; asking for it retains the context."""
        return self._bind()

    @property
    def is_current(self) -> bool:
        """Whether it is current on this thread."""
        current = self._backend.current_context()
        return bool(current) and is_primary(self._backend, self._device, current)

    @property
    def is_primary(self) -> bool:
        """True."""
        return True

    @property
    def is_active(self) -> bool:
        """Whether somebody in this process has retained it; asking does not."""
        return self._calls.primary_state(self._device._ordinal())[1]

    @property
    def flags(self) -> ContextFlags:
        """How it waits; can be read and set whether it is active or not."""
        return ContextFlags(self._calls.primary_state(self._device._ordinal())[0])

    @flags.setter
    def flags(self, value: ContextFlags) -> None:
        self._calls.primary_set_flags(self._device._ordinal(), joined([value]))

    def release(self) -> None:
        """Give back this process's hold of it; it is destroyed when no library holds it either.

        Raises
        ------
        DeviceScopeError
            A scope of it is open on this thread.

        Notes
        -----
        The next scope retains it again. No other thread may have a scope of it open.
        """
        if self._device in open_scopes() or self in open_scopes():
            raise DeviceScopeError(self, "cannot be released while a scope of it is open")
        self._handle = 0
        self._device._unbind()
