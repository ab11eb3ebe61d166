"""A scope that waits for its device's or context's work before it restores."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Literal, ParamSpec, Self, TypeVar

from dask_devctx.cuda.scope import Scope, leave_nothing_current, open_scopes, raise_or_note
from dask_devctx.cuda.suspending import SUSPENDED, ScopedFunction, call
from dask_devctx.errors import DevctxError

P = ParamSpec("P")
S = TypeVar("S", bound=Scope)
T = TypeVar("T")


class RunningScope(Scope):
    """A scope that runs functions and waits for their work: the base of devices and contexts."""

    __slots__ = ()

    @staticmethod
    def unset_current() -> None:
        """Leave no context current on this thread, no matter which code made one current.

        Raises
        ------
        DriverError
            The driver refuses.

        Notes
        -----
        The driver keeps a stack of contexts for each thread, and the top one is current. If another
        library has pushed contexts and not popped them, this takes all of them off. A later pop of
        that library finds the stack empty and fails with ``CUDA_ERROR_INVALID_CONTEXT``. When a
        scope that is open on the thread is left, it restores the context from before it. This
        initialises and destroys nothing.

        References
        ----------
        ``cuCtxSetCurrent``, with no context, repeated until no context is current.

        Examples
        --------
        >>> from dask_devctx import Device
        >>> Device(1).set_current()
        >>> Device.unset_current()
        >>> Device.current() is None
        True
        """
        leave_nothing_current()

    def synchronized(self) -> Synchronized[Self]:
        """Return a scope of the device that waits for the device's work before it restores.

        Returns
        -------
        Synchronized
            As reusable and reentrant as the device itself, and also a decorator: see
            :class:`~dask_devctx.cuda.synchronized.Synchronized`.

        Raises
        ------
        DriverError
            On leaving, if the work failed. If the body raises, its exception gets a note instead.

        Examples
        --------
        >>> from dask_devctx import Device
        >>> with Device(0).synchronized() as device:
        ...     pass  # all work that starts in here is done when the block ends
        """
        return Synchronized(self)

    def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``fn(*args, **kwargs)``, run inside the device's scope.

        Notes
        -----
        A coroutine or generator function gives a coroutine or generator, which enters the scope at
        each resume and leaves it at each suspend, as with :func:`~dask_devctx.on_device`. If the
        previous context cannot be restored, the error carries the function's result in its
        attribute ``result``.
        """
        result: T = call(self, fn, *args, **kwargs)
        return result


class Synchronized(Generic[S]):
    """A scope of a device or context that waits for its work: ``synchronized()`` returns it."""

    # Reusable and reentrant on any thread, as the device itself: it has no state. A function that
    # it decorates waits before it returns its result, a generator before it yields an item; at an
    # `await` there is no wait.

    __slots__ = ("scope",)

    def __init__(self, scope: S) -> None:
        self.scope = scope

    def __enter__(self) -> S:
        return self.scope.__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        try:
            self.wait(exc)
        except BaseException as error:
            self.scope.__exit__(type(error), error, error.__traceback__)
            raise
        return self.scope.__exit__(exc_type, exc, traceback)

    def __call__(self, fn: Callable[P, T]) -> ScopedFunction[P, T]:
        """Return a function that runs ``fn`` inside the scope, as :meth:`run` does."""
        return ScopedFunction(self, fn)

    def __repr__(self) -> str:
        return f"{self.scope!r}.synchronized()"

    def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``fn(*args, **kwargs)``, run inside the scope, after waiting for its work."""
        result: T = call(self, fn, *args, **kwargs)
        return result

    def then_wait(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return ``fn(*args, **kwargs)`` after a wait, unless its work is still to come."""
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            self.wait(error)
            raise
        if not isinstance(result, SUSPENDED):  # its work is still to come
            self.wait(None)
        return result

    def wait(self, exc: BaseException | None) -> None:
        """Wait for the work; an error is a note on the body's own exception."""
        scope = self.scope
        try:
            # The body may have left another context current, which may be destroyed by now. The
            # wait restores the current context, so it must not be that one.
            if open_scopes()[-1:] == (scope,):
                scope.set_current()
            scope.synchronize()
        except DevctxError as error:
            raise_or_note(error, exc)
