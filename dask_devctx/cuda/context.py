"""Contexts that this process makes and owns, and those that it borrows."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from abc import ABCMeta
from collections.abc import Iterable
from typing import Literal, overload

from dask_devctx import driver
from dask_devctx.cuda.any_context import AnyContext
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.flags import ContextFlags, joined, written
from dask_devctx.cuda.primary import PrimaryContext
from dask_devctx.cuda.temporary import Temporary
from dask_devctx.driver.backends import Backend
from dask_devctx.driver.process_lock import ProcessLock
from dask_devctx.errors import DevctxError, DeviceScopeError

Flags = ContextFlags | Iterable[ContextFlags]


class Context(AnyContext[Device], metaclass=ABCMeta):
    """A CUDA context that this object owns, or borrows.

    Parameters
    ----------
    device
        What :class:`~dask_devctx.Device` accepts.
    more, flags
        Any of :class:`ContextFlags`: each a flag, or an iterable of flags.

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
    process. ``Context.temporary(device)`` makes, enters and closes one. ``Context.current()``
    borrows; ``device.primary_context`` is shared, and an instance of this class, too.

    Making one leaves the thread's current context as it was, as does every property. Where making
    it fails or is interrupted half-way, it is destroyed. A copy of the object is the object itself,
    as for ``Device``; it cannot be pickled.

    References
    ----------
    ``cuCtxCreate``, ``cuCtxDestroy``.

    Examples
    --------
    >>> with Context.temporary(1, flags=ContextFlags.SCHED_BLOCKING_SYNC) as own:
    ...     Context.current() is own, Device.current().device_id
    (True, 1)
    """

    __slots__ = ("_owned",)

    _owned: bool

    def __init__(self, device: object, *more: Flags, flags: Flags = ()) -> None:
        self._owned = False  # until it is made
        if isinstance(device, ContextFlags):  # a number, which would name some device
            raise TypeError(
                f"a context needs its device before its flags: Context(0, {written(device)})"
            )
        wanted = joined([more, flags])
        self._device = Device(device)
        self._backend = self._device._backend
        calls = self._backend.driver()
        before, handle = calls.current(), 0
        try:
            handle = calls.create(self._device._ordinal(), wanted)
            calls.set_current(0)  # making it also put it on the driver's stack: this takes it off
            self._identity = calls.context_id(handle)
            self._handle = handle
            self._owned = True
            if self._identity is not None:
                _owners(self._backend)[self._identity] = self
        except BaseException as error:
            self._owned = False
            self._handle = 0
            _unmake(self._backend, handle, before, error)
            raise

    @classmethod
    def temporary(cls, device: object, *more: Flags, flags: Flags = ()) -> Temporary[Context]:
        """Return a scope that makes a context and enters it, and leaves it and closes it.

        Parameters
        ----------
        device, more, flags
            As ``Context`` takes them. They are looked at when the scope is entered.

        Notes
        -----
        Each ``with`` makes a context of its own, which it gives to its block.

        Examples
        --------
        >>> with Context.temporary(1) as own:
        ...     own.is_current
        True
        >>> own.handle
        0
        """
        make = functools.partial(cls, device, *more, flags=flags)
        return Temporary(make, f"Context.temporary({device!r})")

    @overload
    @classmethod
    def current(
        cls, *, required: Literal[False] = False
    ) -> Context | PrimaryContext[Device] | None: ...
    @overload
    @classmethod
    def current(cls, *, required: Literal[True]) -> Context | PrimaryContext[Device]: ...

    @classmethod
    def current(cls, *, required: bool = False) -> Context | PrimaryContext[Device] | None:
        """Return the context that is current on this thread, borrowed, or None.

        Parameters
        ----------
        required
            Raise where none is current, instead of returning None.

        Returns
        -------
        Context, PrimaryContext or None
            The owner itself where it is a context of ours, the device's ``primary_context`` where
            it is primary, else an object that borrows it and never destroys it. None where none is
            current, as on a machine without a driver.

        Raises
        ------
        DevctxError
            None is current, and one is required.

        References
        ----------
        ``cuCtxGetCurrent``, ``cuCtxGetId``.
        """
        backend = driver.backend()
        handle = backend.current_context()
        if not handle:
            if required:
                raise DevctxError(
                    "no context is current on this thread. Enter one, with 'with Device(n):', or "
                    "ask for the one that you mean: Device(n).primary_context"
                )
            return None
        calls = backend.driver()
        identity = calls.context_id(handle)
        owner = None if identity is None else _owners(backend).get(identity)
        if owner is not None:
            return owner
        device = Device._of_current_context(backend)
        if device.primary_context.has_handle(handle):
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
        if not isinstance(other, AnyContext):
            return NotImplemented
        if self._identity is None:  # it was dead when it was borrowed, and nothing tells it apart
            return self is other
        return self._backend is other._backend and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)  # for life: the handle goes when it is closed

    def __del__(self) -> None:
        if getattr(self, "_owned", False) and self._handle and not sys.is_finalizing():
            import logging  # not with the module, which is there before most programs log

            said = f"{self!r} was never closed: it lives, with its memory, until the process ends"
            logging.getLogger(__name__).warning("%s. Use 'with Context.temporary(...)'", said)
            warnings.warn(said, ResourceWarning, stacklevel=2, source=self)

    def close(self) -> None:
        """Destroy the context that this object owns; closing twice does nothing.

        Raises
        ------
        DeviceScopeError
            It is borrowed or primary, and not this object's to destroy.
        DriverError
            The driver refuses. Where the context is alive all the same, ``close()`` can be tried
            again, and the context be used until then.

        Notes
        -----
        A scope that was entered while it was current cannot restore it any more: it raises
        ``DeviceScopeError`` on leaving, and leaves its thread without a current context. Other
        threads on which it is current must make another one current. Its memory is freed: arrays
        that were made in it must not be used any more.

        References
        ----------
        ``cuCtxDestroy``.
        """
        if not self._owned:
            super().close()
        with _closing:
            if self._handle:
                self._destroy()

    def _destroy(self) -> None:
        calls = self._backend.calls
        # Before the call: until it is known that the context is alive, nobody makes it current.
        if self._identity is not None:
            self._backend.destroyed.add(self._identity)
        gone = False
        try:
            calls.destroy(self._handle)
            gone = True
        finally:
            if gone or not self._still_lives():  # refused, or interrupted on either side
                self._handle = 0
            elif self._identity is not None:
                self._backend.destroyed.discard(self._identity)

    def _still_lives(self) -> bool:
        try:
            return self._backend.calls.context_id(self._handle) == self._identity
        except DevctxError:  # a driver that answers nothing any more has not destroyed it
            return True

    @property
    def is_current(self) -> bool:
        """Whether it is current on this thread."""
        if not self._handle or self._backend.current_context() != self._handle:
            return False
        return self._calls.context_id(self._handle) == self._identity

    @property
    def is_primary(self) -> bool:
        """Whether it is its device's primary context."""
        return bool(self._handle) and self._device.primary_context.has_handle(self._handle)


Context.register(PrimaryContext)


_Owners = weakref.WeakValueDictionary[int, "Context"]
_owned: weakref.WeakKeyDictionary[Backend, _Owners] = weakref.WeakKeyDictionary()
_closing = ProcessLock()


def _owners(backend: Backend) -> _Owners:
    """The contexts that this process owns, by their numbers: handles are used again."""
    return _owned.setdefault(backend, weakref.WeakValueDictionary())


def _unmake(backend: Backend, handle: int, before: int, error: BaseException) -> None:
    """Destroy a context whose making failed half-way; ``handle`` is 0 where nobody was told it.

    It is current where it was not taken off the driver's stack, and destroying it does that.
    """
    calls = backend.calls
    try:
        current = calls.current()
        made = handle or (current if current != before else 0)
        if made:
            calls.destroy(made)
    except DevctxError as refused:
        error.add_note(f"The context that was made half-way could not be destroyed: {refused}")
        if calls.current() != before:
            calls.set_current(0)
