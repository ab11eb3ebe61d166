"""The device scope: make a context current, and give back exactly what was before it.

One stack per thread holds what the driver said was current at each enter; the thread is never
asked which *device* is current, because "device 0" and "nothing" are different answers to one
question. Contexts are got and set, never pushed and popped.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Literal, NamedTuple, NoReturn, Self

from dask_devctx.driver.backends import Backend
from dask_devctx.errors import DevctxError, DeviceScopeError

logger = logging.getLogger(__name__)


class _Entry(NamedTuple):
    scope: Scope
    previous: int  # the handle that the driver gave; 0 for none
    identity: int | None  # of that context, where its handle may die; None if it was dead


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entries: list[_Entry] = []


_thread = _Thread()


def open_scopes() -> tuple[Scope, ...]:
    """Return the scopes that are open on this thread, outermost first."""
    return tuple(entry.scope for entry in _thread.entries)


class Scope:
    """What can be entered with ``with``: the base of ``Device`` and ``Context``.

    Reentrant and reusable, from any thread: what one thread enters is that thread's alone.
    """

    __slots__ = ("__weakref__", "_backend", "_handle")

    _backend: Backend
    _handle: int  # of the context to make current; 0 until it is bound

    def _bind(self) -> int:
        """Return the handle of the context to make current, and keep it in ``_handle``."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        handle = self._handle or self._bind()
        backend = self._backend
        calls = backend.calls
        previous = calls.current()
        identity = 0 if previous in backend.lasting else calls.context_id(previous)
        entries = _thread.entries
        depth = len(entries)
        try:
            entries.append(_Entry(self, previous, identity))
            calls.set_current(handle)
        except BaseException:
            # Refused by the driver, or interrupted on either side of the call: as if never entered.
            del entries[depth:]
            if calls.current() != previous:
                self._restore(_Entry(self, previous, identity))
            raise
        return self

    def __exit__(
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

    def _leave(self) -> None:
        entries = _thread.entries
        if not entries or entries[-1].scope is not self:
            self._leave_out_of_order(entries)
        entry = entries[-1]
        try:
            self._restore(entry)
        except Exception:
            raise
        except BaseException:  # interrupted: the thread gets its context back all the same
            self._restore(entry)
            raise
        finally:
            entries.pop()

    def _restore(self, entry: _Entry) -> None:
        calls = self._backend.calls
        previous, identity = entry.previous, entry.identity
        if previous == 0:
            self._clear()
            return
        if identity == 0 or self._lives(previous, identity):
            calls.set_current(previous)
            return
        # Made current, it would end the process: the driver does not look whether it lives.
        self._clear()
        when = "before this scope was entered" if identity is None else "in the meantime"
        raise DeviceScopeError(
            self,
            f"cannot restore the context 0x{previous:x}, which was destroyed {when}; this thread "
            "has no current context now. Close a context after the scopes inside it",
        )

    def _clear(self) -> None:
        """Leave this thread without a current context, whatever the body pushed and did not pop.

        The driver has nothing current where its stack of contexts is empty, and setting none takes
        one context off it.
        """
        calls = self._backend.calls
        calls.set_current(0)
        while calls.current():
            calls.set_current(0)

    def _lives(self, handle: int, identity: int | None) -> bool:
        """Whether a handle still means the context with this number."""
        backend = self._backend
        if identity is None or identity in backend.destroyed:
            return False
        return backend.calls.context_id(handle) == identity

    def _leave_out_of_order(self, entries: list[_Entry]) -> NoReturn:
        """Take this scope out of the stack, so that the others still restore right; then raise."""
        for place in range(len(entries) - 1, -1, -1):
            if entries[place].scope is self:
                above = entries[place + 1]
                entries[place + 1] = entries[place]._replace(scope=above.scope)
                del entries[place]
                raise DeviceScopeError(
                    self,
                    f"was left while that of {above.scope!r}, entered after it, is open. Scopes "
                    "that interleave come from a 'with' around an 'await' or a 'yield': use "
                    "on_device(...), which leaves the device at each of them",
                )
        raise DeviceScopeError(
            self,
            f"was left on the thread {threading.current_thread().name!r}, which did not enter it. "
            "Leave a scope on the thread that entered it; nothing was changed",
        )


def raise_or_note(error: Exception, body: BaseException | None) -> None:
    """Raise what went wrong on leaving a scope, or note it on the body's own exception."""
    if body is None:
        raise error
    body.add_note(f"While leaving the device scope: {type(error).__name__}: {error}")
    logger.warning("%s, while %r was on its way out", error, body)
