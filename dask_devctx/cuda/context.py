"""CUDA contexts: those that this process makes and owns or borrows, and a device's primary one."""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, Self

from dask_devctx import driver
from dask_devctx.cuda.properties import ContextFlags, Limits, checked
from dask_devctx.cuda.scope import lives
from dask_devctx.cuda.suspending import RunningScope
from dask_devctx.driver.backends import ProcessLock
from dask_devctx.driver.calls import Calls
from dask_devctx.errors import DevctxError, DeviceScopeError, DriverError

if TYPE_CHECKING:
    from dask_devctx.cuda.device import Device

_closing = ProcessLock()


class Context(RunningScope):
    """A CUDA context that this object owns, or borrows.

    Parameters
    ----------
    device
        Anything that :class:`~dask_devctx.Device` accepts.
    flags
        One of :class:`ContextFlags`, or several: ``SCHED_SPIN | MAP_HOST``.

    Raises
    ------
    DriverError
        The driver cannot make the context: ``SCHED_`` flags exclude each other, for example.
    TypeError
        ``flags`` are no ``ContextFlags``, or ``device`` does not name a device; a flag does not.

    Notes
    -----
    ``Context(device)`` makes a new context beside the primary one that CUDA's libraries use, and
    owns it: only :meth:`close` destroys it. If an owner is collected before it is closed, it warns.
    The context then lives until the process ends, because it may be current on some thread.
    ``Context.current()`` borrows one. ``device.primary_context`` is shared, and is an instance of
    this class, too.

    Making a context leaves the thread's current context as it was. So does every property. If
    making it fails half-way, the new context is destroyed. The object cannot be copied or pickled.

    References
    ----------
    ``cuCtxCreate``, ``cuCtxDestroy``.

    Examples
    --------
    >>> from contextlib import closing
    >>> with closing(Context(1, ContextFlags.SCHED_BLOCKING_SYNC)) as own, own:
    ...     Context.current() is own, own.device.device_id
    (True, 1)
    """

    __slots__ = ("_device", "_identity", "_owned")

    _device: Device
    _identity: int | None  # which context the handle meant when it was taken
    _owned: bool

    def __init__(self, device: object, flags: ContextFlags = ContextFlags.SCHED_AUTO) -> None:
        from dask_devctx.cuda.device import Device

        self._owned = False  # until it is made
        if isinstance(device, ContextFlags):  # a number, which would name some device
            raise TypeError(f"a context needs its device before its flags: Context(0, {device!r})")
        wanted = checked(flags)
        self._device = Device(device)
        self._backend = self._device._backend
        calls = self._backend.driver()
        handle = calls.create(self._device._ordinal(), wanted)
        try:
            calls.set_current(0)  # making it also put it on the driver's stack: this takes it off
            self._identity = calls.context_id(handle)
        except BaseException:
            with suppress(DevctxError):
                calls.destroy(handle)
            raise
        self._handle, self._owned = handle, True
        if self._identity is not None:
            self._backend.contexts[self._identity] = self

    @classmethod
    def current(cls) -> Context | None:
        """Return the context that is current on this thread, borrowed, or None.

        Returns
        -------
        Context, PrimaryContext or None
            The owner itself if this package made the context; the device's ``primary_context`` if
            it is primary; otherwise an object that borrows it and never destroys it. None if no
            context is current, as on a machine without a driver.

        References
        ----------
        ``cuCtxGetCurrent``, ``cuCtxGetId``.
        """
        backend = driver.backend()
        handle = backend.current_context()
        if not handle:
            return None
        calls = backend.driver()
        identity = calls.context_id(handle)
        from dask_devctx.cuda.device import Device

        known: Context | None = None if identity is None else backend.contexts.get(identity)
        if known is not None:
            return known
        device = Device._of_current_context(backend)
        if device.primary_context._has_handle(handle):
            return device.primary_context
        borrowed = Context.__new__(Context)
        borrowed._backend, borrowed._device = backend, device
        borrowed._handle, borrowed._identity = handle, identity
        borrowed._owned = False
        return borrowed if identity is None else backend.contexts.setdefault(identity, borrowed)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be copied or pickled: a context has one owner, in one process. Send "
            "its device, and make a context there or ask for one"
        )

    def _bind(self) -> int:
        raise DeviceScopeError(f"{self} cannot be entered: this context was closed")

    def _check_alive(self) -> None:
        """Raise unless the context can be made current."""
        if not self._handle:
            self._bind()
        if not lives(self._backend, self._handle, self._identity):
            raise DeviceScopeError(f"{self} cannot be entered: destroyed by somebody else")

    def __enter__(self) -> Self:
        self._check_alive()
        return super().__enter__()

    def __repr__(self) -> str:
        kind = "owned" if self._owned else "borrowed"
        state = f"0x{self._handle:x}" if self._handle else "closed"
        return f"<Context {state} on {self._device!r}, {kind}>"

    def __del__(self) -> None:
        if getattr(self, "_owned", False) and self._handle and not sys.is_finalizing():
            said = f"{self!r} was never closed: it lives, with its memory, until the process ends"
            warnings.warn(said, ResourceWarning, stacklevel=2, source=self)

    def close(self) -> None:
        """Destroy the context that this object owns; closing twice does nothing.

        Raises
        ------
        DeviceScopeError
            The context is borrowed or primary: this object does not own it.
        DriverError
            The driver refuses. If the context is still alive, it can be used, and ``close()`` can
            be tried again.

        Notes
        -----
        A scope that was entered while the context was current cannot restore it any more. On
        leaving, that scope raises ``DeviceScopeError`` and leaves its thread without a current
        context. Other threads on which the context is current must make another one current. The
        context's memory is freed: arrays that were made in it must not be used any more.

        References
        ----------
        ``cuCtxDestroy``.
        """
        if not self._owned:
            raise DeviceScopeError(f"{self} cannot be closed: the context belongs to somebody else")
        with _closing:
            if not self._handle:
                return
            # Noted before the call: no scope makes it current until it is known to be alive.
            destroyed = self._backend.destroyed
            destroyed.add(self._identity)
            try:
                self._backend.calls.destroy(self._handle)
            except DriverError:
                destroyed.discard(self._identity)
                raise
            self._handle = 0

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
        return Context.current() is self

    @property
    def is_primary(self) -> bool:
        """Whether it is its device's primary context."""
        return self is self._device.primary_context

    @property
    def flags(self) -> ContextFlags:
        """The flags of the context, which can be set: ``cuCtxGetFlags``, ``cuCtxSetFlags``."""
        return ContextFlags(self.run(self._calls.flags))

    @flags.setter
    def flags(self, value: ContextFlags) -> None:
        self.run(self._calls.set_flags, checked(value))

    @property
    def limits(self) -> Limits:
        """Its limits, which can be read and set by name: ``context.limits[Limit.STACK_SIZE]``."""
        return Limits(self)

    @property
    def _calls(self) -> Calls:
        return self._backend.driver()

    # -- its actions

    def set_current(self) -> None:
        """Make it current on this thread until something else changes that: ``cuCtxSetCurrent``.

        Raises
        ------
        DeviceScopeError
            It was closed or destroyed.
        """
        self._check_alive()
        self._calls.set_current(self._handle)

    def synchronize(self) -> None:
        """Wait for all work of the context; the current one stays: ``cuCtxSynchronize``.

        Raises
        ------
        DriverError
            Work of the context failed.
        """
        self.run(self._calls.synchronize)

    sync = synchronize


class PrimaryContext(Context):
    """The context of a device that all libraries of this process share.

    Notes
    -----
    ``device.primary_context`` is the one object per device. Getting it creates nothing. The first
    scope of the device or of this object retains the context, once per process.

    References
    ----------
    ``cuDevicePrimaryCtxRetain``, ``cuDevicePrimaryCtxGetState``, ``cuDevicePrimaryCtxSetFlags``.
    """

    __slots__ = ()

    def __init__(self, device: Device) -> None:
        self._device = device
        self._backend = device._backend
        self._handle = 0
        self._identity = None
        self._owned = False

    def _bind(self) -> int:
        self._handle = self._device._bind()
        return self._handle

    def _check_alive(self) -> None:
        self._bind()

    def __repr__(self) -> str:
        return f"<PrimaryContext of {self._device!r}>"

    @property
    def handle(self) -> int:
        """The driver's handle, a ``CUcontext``; reading it retains the context."""
        return self._bind()

    def _has_handle(self, handle: int) -> bool:
        """Return whether the handle means this context; creates nothing."""
        # Where another library holds the context, the driver tells its handle on a retain only.
        return bool(self._device._handle or self.is_active) and self._bind() == handle

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
        self._calls.primary_set_flags(self._device._ordinal(), checked(value))
