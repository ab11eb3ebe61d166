"""The device scope: make a context current, then restore exactly the context from before.

Each thread has one stack. It holds the context that the driver reported as current at each enter.
A scope never asks which *device* is current: that question cannot tell "device 0" from "nothing".
Scopes get and set contexts; they never push and pop them.

The extension ``_scope`` (its source is in ``csrc``) does the ordinary enter and leave in C, if it
was built and if the driver gives the addresses of its functions. This module does everything else,
on the same stack. Without the extension it does all of it, with the same results.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn, Self

from dask_devctx import driver
from dask_devctx.errors import DevctxError, DeviceScopeError

if TYPE_CHECKING:
    from dask_devctx.driver._scope import Entry, Stack
    from dask_devctx.driver.backends import Backend
    from dask_devctx.driver.calls import Calls

try:
    from dask_devctx.driver._scope import ScopeBase, stack
except ImportError:  # the extension was not built: no compiler, or a Python without the stable ABI

    class _Thread(threading.local):
        def __init__(self) -> None:
            self.entries: list[Entry] = []

    _thread = _Thread()

    def stack() -> list[Entry]:  # type: ignore[misc]
        """Return the stack of the calling thread."""
        return _thread.entries

    class ScopeBase:  # type: ignore[no-redef]
        """The base of ``Scope``."""

        __slots__ = ("_backend", "_handle")


def open_scopes() -> tuple[Scope, ...]:
    """Return the scopes that are open on this thread, outermost first."""
    return tuple(scope for scope, _, _ in stack())


class Scope(ScopeBase):
    """A scope that ``with`` enters: the base of ``Device`` and of contexts.

    Reentrant and reusable from any thread: entering it affects the calling thread only.
    """

    __slots__ = ("__weakref__",)

    _backend: Backend
    _handle: int  # of the context to make current; 0 until it is bound

    def _bind(self) -> int:
        """Return the handle of the context to make current, and keep it in ``_handle``."""
        raise NotImplementedError

    def _enter(self) -> Self:
        handle = self._handle or self._bind()
        backend = self._backend
        calls = backend.calls
        previous = calls.current()
        identity = _identity(backend, previous)
        entries = stack()
        depth = len(entries)
        try:
            entries.append((self, previous, identity))
            calls.set_current(handle)
        except BaseException:
            # The driver refused, or an interrupt came before or after the call: undo the enter.
            while len(entries) > depth:
                entries.pop()
            self._undo(previous, identity)
            raise
        return self

    def _undo(self, previous: int, identity: int | None) -> None:
        if self._backend.calls.current() != previous:
            self._restore(previous, identity)

    def _exit(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        try:
            self._leave()
        except DevctxError as error:
            raise_or_note(error, exc)
        return False

    if not hasattr(ScopeBase, "__enter__"):
        __enter__ = _enter
        __exit__ = _exit

    def _leave(self) -> None:
        entries = stack()
        if not entries or entries[-1][0] is not self:
            self._leave_out_of_order(entries)
        _, previous, identity = entries[-1]
        try:
            self._restore(previous, identity)
        except Exception:
            raise
        except BaseException:  # interrupted: the thread still gets its context back
            self._restore(previous, identity)
            raise
        finally:
            entries.pop()

    def _failed_restore(self, error: Exception, exc: BaseException | None) -> Literal[False]:
        """Report an error of the restore in C, as :meth:`_exit` does."""
        raise_or_note(error, exc)
        return False

    def _restore(self, previous: int, identity: int | None) -> None:
        _restore(self, self._backend, previous, identity)

    def _leave_out_of_order(self, entries: Stack) -> NoReturn:
        """Raise, after taking this scope off the stack so that the others restore correctly."""
        for place in range(len(entries) - 1, -1, -1):
            scope, previous, identity = entries[place]
            if scope is self:
                above = entries[place + 1][0]
                entries[place + 1] = (above, previous, identity)
                del entries[place]
                raise DeviceScopeError(
                    f"the scope of {self} was left while that of {above!r}, entered after it, "
                    "is open. Scopes that interleave come from a 'with' around an 'await' or a "
                    "'yield': use on_device(...), which leaves the device at each of them",
                )
        raise DeviceScopeError(
            f"the scope of {self} was left on the thread {threading.current_thread().name!r}, "
            "which did not enter it, or left it already. Leave a scope once, on the thread that "
            "entered it; nothing was changed",
        )


def leave_nothing_current() -> None:
    """Leave no context current on this thread, no matter how many are on the driver's stack."""
    backend = driver.backend()
    if backend.current_context():
        _empty(backend.calls)


class Restored:
    """A scope after which the same context is current as before; for one ``with`` at a time.

    Nothing is current after it, if nothing was before, nor in it if it is ``empty``. It starts no
    driver: without one, nothing is current.
    """

    __slots__ = ("_identity", "_is_empty", "_previous")

    def __init__(self, *, empty: bool = False) -> None:
        self._is_empty = empty

    def __enter__(self) -> None:
        backend = _usable()
        self._previous = 0 if backend is None else backend.current_context()
        if backend is None or not self._previous:
            return
        self._identity = _identity(backend, self._previous)
        if self._is_empty:
            if self._identity is None:  # it is destroyed already: nothing to come back to
                self._previous = 0
            _empty(backend.calls)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        backend = _usable()
        if backend is None:
            return
        try:
            if self._previous:
                _restore(self, backend, self._previous, self._identity)
            elif backend.current_context():
                _empty(backend.calls)
        except DevctxError as error:
            raise_or_note(error, exc)

    def __repr__(self) -> str:
        return "<a task without a device>"


def is_any_current() -> bool:
    """Return whether a context is current on this thread; starts no driver."""
    backend = _usable()
    return backend is not None and backend.current_context() != 0


def _usable() -> Backend | None:
    """Return the driver that may have made a context current on this thread; None if none can."""
    backend = driver.current_backend()
    return None if backend is None or backend.calls.checked.forked else backend


def _identity(backend: Backend, context: int) -> int | None:
    """Return a context's number; 0 if it always lives, None if it is destroyed already."""
    return 0 if context in backend.lasting else backend.calls.context_id(context)


def _restore(scope: object, backend: Backend, previous: int, identity: int | None) -> None:
    """Make the context current again that was so before a scope."""
    calls = backend.calls
    if previous == 0:
        _empty(calls)
        return
    if identity == 0 or lives(backend, previous, identity):
        calls.set_current(previous)
        return
    # Making it current would end the process: the driver does not check that it is alive.
    _empty(calls)
    when = "before this scope was entered" if identity is None else "in the meantime"
    raise DeviceScopeError(
        f"the scope of {scope} cannot restore the context 0x{previous:x}, which was destroyed "
        f"{when}; this thread has no current context now. Close a context after the scopes "
        "inside it",
    )


def lives(backend: Backend, handle: int, identity: int | None) -> bool:
    """Return whether a handle still means the context with this number."""
    if identity is None or identity in backend.destroyed:
        return False
    return backend.calls.context_id(handle) == identity


def _empty(calls: Calls) -> None:
    """Take all contexts off the driver's stack of this thread; a call with 0 takes one off it."""
    calls.set_current(0)
    while calls.current():
        calls.set_current(0)


def raise_or_note(error: Exception, body: BaseException | None) -> None:
    """Raise the error of leaving a scope, or add it as a note to the body's own exception."""
    if body is None:
        raise error
    body.add_note(f"While leaving the device scope: {type(error).__name__}: {error}")
    import logging  # imported late: most programs load this module before they log

    logging.getLogger(__name__).warning("%s, while %r was on its way out", error, body)
