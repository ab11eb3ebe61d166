"""A scope that waits for its device's or context's work before it restores."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from dask_devctx.cuda.scope import Scope, open_scopes, raise_or_note
from dask_devctx.cuda.suspending import SUSPENDED, ScopedFunction, enter_and_call, within
from dask_devctx.errors import DevctxError

P = ParamSpec("P")
S = TypeVar("S", bound=Scope)
T = TypeVar("T")


class Synchronized(Generic[S]):
    """A scope of a device or context that waits for its work: ``synchronized()`` returns it."""

    # Reusable and reentrant on any thread, as the device itself: it has no state. A function that
    # it decorates waits before it returns its result, a generator before it yields an item; at an
    # `await` there is no wait.

    __slots__ = ("_scope",)

    def __init__(self, scope: S) -> None:
        self._scope = scope

    def __enter__(self) -> S:
        return self._scope.__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        try:
            self._wait(exc)
        except BaseException as error:
            self._scope.__exit__(type(error), error, error.__traceback__)
            raise
        return self._scope.__exit__(exc_type, exc, traceback)

    def __call__(self, fn: Callable[P, T]) -> SynchronizedFunction[P, T]:
        """Return a function that runs ``fn`` inside the scope, as :meth:`run` does."""
        return SynchronizedFunction(self, fn)

    def __repr__(self) -> str:
        return f"{self._scope!r}.synchronized()"

    def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``fn(*args, **kwargs)``, run inside the scope, after waiting for its work."""

        def and_wait() -> Any:
            with ExitStack() as stack:
                stack.enter_context(self.at_the_end())
                result = fn(*args, **kwargs)
                if isinstance(result, SUSPENDED):  # its work is still to come
                    stack.pop_all()
            return result

        result: T = within(self._scope, enter_and_call(self._scope, and_wait), self)
        return result

    def at_the_end(self) -> AbstractContextManager[None]:
        """Return a context manager that waits at its end, and does not enter the scope."""
        return _Wait(self._wait)

    def _wait(self, exc: BaseException | None) -> None:
        scope = self._scope
        try:
            # The body may have left another context current, which may be destroyed by now. The
            # wait restores the current context, so it must not be that one.
            if open_scopes()[-1:] == (scope,):
                scope.set_current()
            scope.synchronize()
        except DevctxError as error:
            raise_or_note(error, exc)


class _Wait:
    __slots__ = ("_wait",)

    def __init__(self, wait: Callable[[BaseException | None], None]) -> None:
        self._wait = wait

    def __enter__(self) -> None:
        pass

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        self._wait(exc)


class SynchronizedFunction(ScopedFunction[P, T]):
    """A function that runs inside a scope and waits for its work: ``@device.synchronized()``."""

    def __init__(self, scope: Synchronized[Any], fn: Callable[P, T]) -> None:
        super().__init__(fn, repr(scope))
        self._scope = scope

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._scope.run(self.__wrapped__, *args, **kwargs)

    def _rebuilt(self) -> tuple[Any, ...]:
        return type(self), (self._scope, self.__wrapped__)
