"""CUDA contexts as objects: those that this process owns, and those that it borrows."""

from __future__ import annotations

import enum
import warnings
import weakref
from collections.abc import Callable
from typing import NamedTuple, NoReturn, ParamSpec, Self, TypeVar

from dask_devctx import driver
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.flags import ContextFlags, joined
from dask_devctx.cuda.limits import Limits
from dask_devctx.cuda.scope import Scope
from dask_devctx.cuda.suspending import call
from dask_devctx.driver.backends import Backend
from dask_devctx.driver.calls import Calls
from dask_devctx.driver.process_lock import ProcessLock
from dask_devctx.errors import DeviceScopeError

P = ParamSpec("P")
T = TypeVar("T")


class CacheConfig(enum.IntEnum):
    """Whether kernels prefer first-level cache or shared memory: ``CUfunc_cache``."""

    PREFER_NONE = 0
    PREFER_SHARED = 1
    PREFER_L1 = 2
    PREFER_EQUAL = 3


class StreamPriorityRange(NamedTuple):
    """The priorities that streams can have; the greater priority is the smaller number."""

    least: int
    greatest: int


class Context(Scope):
    """A CUDA context that this object owns, or borrows.

    Parameters
    ----------
    device
        What :class:`~dask_devctx.Device` accepts.
    flags
        Any of :class:`ContextFlags`.

    Raises
    ------
    DriverError
        The driver does not make it.
    TypeError
        A flag is no number, or ``device`` no way to name one, such as a flag.
    ValueError
        A flag is unknown, or two exclude each other: more than one of the ``SCHED_`` flags.

    Notes
    -----
    ``Context(device)`` makes a context of its own, beside the primary one that CUDA's libraries
    use, and owns it: :meth:`close` destroys it, and nothing else does. An owner that is collected
    unclosed warns, and leaves the context, which may be current on some thread, to the end of the
    process. ``Context.current()`` borrows; ``device.primary_context`` is shared.

    Making one leaves the thread's current context as it was, as does every property. A copy of the
    object is the object itself, as for ``Device``; it cannot be pickled.

    References
    ----------
    ``cuCtxCreate``, ``cuCtxDestroy``.

    Examples
    --------
    >>> from contextlib import closing
    >>> with closing(Context(1, ContextFlags.SCHED_BLOCKING_SYNC)) as own, own:
    ...     Context.current() is own, Device.current().device_id
    (True, 1)
    """

    __slots__ = ("_device", "_identity", "_owned")

    _device: Device
    _identity: int | None  # which context the handle meant when it was taken
    _owned: bool

    def __init__(self, device: object, *flags: ContextFlags) -> None:
        self._owned = False  # until it is made
        if isinstance(device, ContextFlags):  # a number, which would name some device
            raise TypeError(f"a context needs its device before its flags: Context(0, {device!s})")
        wanted = joined(flags)
        self._device = Device(device)
        self._backend = self._device._backend
        calls = self._backend.driver()
        self._handle = calls.create(self._device._ordinal(), wanted)
        self._owned = True
        calls.set_current(0)  # making it also put it on the driver's stack: this takes it off
        self._identity = calls.context_id(self._handle)
        if self._identity is not None:
            _owners(self._backend)[self._identity] = self

    @classmethod
    def current(cls) -> Context | None:
        """Return the context that is current on this thread, borrowed, or None.

        Returns
        -------
        Context or None
            The owner itself where it is a context of ours, the device's ``primary_context`` where
            it is primary, else an object that borrows it and never destroys it. None where none is
            current, as on a machine without a driver.

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
        owner = None if identity is None else _owners(backend).get(identity)
        if owner is not None:
            return owner
        device = Device._of_current_context(backend)
        if is_primary(backend, device, handle):
            return device.primary_context
        return cls._borrowed(backend, device, handle, identity)

    @classmethod
    def _borrowed(
        cls, backend: Backend, device: Device, handle: int, identity: int | None
    ) -> Context:
        self = Context.__new__(Context)
        self._backend = backend
        self._device = device
        self._handle = handle
        self._identity = identity
        self._owned = False
        return self

    def _bind(self) -> int:
        raise DeviceScopeError(self, "cannot be entered: this context was closed")

    def __enter__(self) -> Self:
        self._check_alive()
        return super().__enter__()

    def _check_alive(self) -> None:
        if not self._handle:
            self._bind()
        if not self._lives(self._handle, self._identity):
            raise DeviceScopeError(
                self, "cannot be entered: the context was destroyed by somebody else"
            )

    def __repr__(self) -> str:
        kind = "owned" if self._owned else "borrowed"
        state = f"0x{self._handle:x}" if self._handle else "closed"
        return f"<Context {state} on {self._device!r}, {kind}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Context):
            return NotImplemented
        if self._identity is None:  # it was dead when it was borrowed, and nothing tells it apart
            return self is other
        return self._backend is other._backend and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)  # for life: the handle goes when it is closed

    def __copy__(self) -> Self:
        return self  # a copy would own the context, too, and destroy it a second time

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled: a context is one process' alone. Send its device, and "
            "make or ask for a context there"
        )

    def __del__(self) -> None:
        if getattr(self, "_owned", False) and self._handle:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)

    def close(self) -> None:
        """Destroy the context that this object owns; closing twice does nothing.

        Raises
        ------
        DeviceScopeError
            It is borrowed or primary, and not this object's to destroy.
        DriverError
            The driver refuses; the object counts as closed all the same.

        Notes
        -----
        A scope that was entered while it was current cannot restore it any more: it raises
        ``DeviceScopeError`` on leaving, and leaves its thread without a current context. Other
        threads on which it is current must make another one current.

        References
        ----------
        ``cuCtxDestroy``.
        """
        if not self._owned:
            why = "cannot be closed: the context belongs to somebody else"
            why += "; release() gives up our hold of it" if self.is_primary else ""
            raise DeviceScopeError(self, why)
        with _closing:
            handle, self._handle = self._handle, 0
        if handle:
            if self._identity is not None:
                self._backend.destroyed.add(self._identity)
            self._backend.calls.destroy(handle)

    # -- what it is

    @property
    def device(self) -> Device:
        """The device that it is on."""
        return self._device

    @property
    def handle(self) -> int:
        """The driver's handle, a ``CUcontext``; 0 once it is closed."""
        return self._handle

    @property
    def is_current(self) -> bool:
        """Whether it is current on this thread."""
        if not self._handle or self._backend.current_context() != self._handle:
            return False
        return self._calls.context_id(self._handle) == self._identity

    @property
    def is_primary(self) -> bool:
        """Whether it is its device's primary context."""
        return bool(self._handle) and is_primary(self._backend, self._device, self._handle)

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
        """What it was made with, and what was set since.

        Raises
        ------
        TypeError, ValueError
            On setting: what making a context with them raises.

        References
        ----------
        ``cuCtxGetFlags``, ``cuCtxSetFlags``.
        """
        return ContextFlags(self.run(self._calls.flags))

    @flags.setter
    def flags(self, value: ContextFlags) -> None:
        self.run(self._calls.set_flags, joined([value]))

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

    # -- what it does

    def set_current(self) -> None:
        """Make it current on this thread, for good: nothing is restored.

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
        """Wait until it has done all work that it was given; the current context stays.

        Raises
        ------
        DriverError
            That work failed.

        References
        ----------
        ``cuCtxSynchronize``.
        """
        self.run(self._calls.synchronize)

    def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``fn(*args, **kwargs)``, run inside the context's scope.

        Notes
        -----
        Of a coroutine or generator function this is a coroutine or generator that enters the scope
        at each resume and leaves it at each suspend.
        """
        result: T = call(self, fn, *args, **kwargs)
        return result


_Owners = weakref.WeakValueDictionary[int, "Context"]
_owned: weakref.WeakKeyDictionary[Backend, _Owners] = weakref.WeakKeyDictionary()
_closing = ProcessLock()


def _owners(backend: Backend) -> _Owners:
    """The contexts that this process owns, by their numbers: handles are used again."""
    return _owned.setdefault(backend, weakref.WeakValueDictionary())


def is_primary(backend: Backend, device: Device, handle: int) -> bool:
    if device._handle:
        return device._handle == handle
    calls = backend.driver()
    ordinal = device._ordinal()
    if not calls.primary_state(ordinal)[1]:
        return False
    try:  # somebody else holds it: its handle is only told to those who retain it too
        return calls.primary_retain(ordinal) == handle
    finally:
        calls.primary_release(ordinal)
