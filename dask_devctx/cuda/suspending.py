"""Running functions, coroutines and generators inside a scope.

A coroutine or generator enters the scope at each resume and leaves it at each suspend. The device
is current for the function's own code, and not for other code that runs in between.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Generic, Literal, ParamSpec, Self, TypeVar

from dask_devctx.cuda.scope import Scope, leave_nothing_current, open_scopes, raise_or_note
from dask_devctx.errors import DevctxError

P = ParamSpec("P")
S = TypeVar("S", bound="RunningScope")
T = TypeVar("T")


_Scope = AbstractContextManager[Any]


def call(scope: _Scope, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return ``fn(*args, **kwargs)``, run inside the scope, for any kind of function."""
    with scope:
        result = fn(*args, **kwargs)
    return within(scope, result)


# The results of functions that have still to run: coroutines and generators.
SUSPENDED: Final = types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType


def within(scope: _Scope, result: Any) -> Any:
    """Return a wrapper of a coroutine or generator that runs it inside the scope."""
    # It has the same kind and name. Any other result is returned unchanged.
    outer: Any
    if isinstance(result, types.CoroutineType):
        outer = _coroutine(scope, result)
        # An outer one that is cancelled before its first step never starts the inner one. Python
        # would then warn that the inner one was never awaited.
        weakref.finalize(outer, _close_unstarted, result).atexit = False
    elif isinstance(result, types.GeneratorType):
        outer = drive(scope, result)
    elif isinstance(result, types.AsyncGeneratorType):
        raise TypeError(
            f"the asynchronous generator {result.__qualname__} cannot run in {scope!r}. Decorate a "
            "coroutine function that makes one item, and await it for each"
        )
    else:
        return result
    outer.__name__, outer.__qualname__ = result.__name__, result.__qualname__
    return outer


def _close_unstarted(inner: types.CoroutineType[Any, Any, Any]) -> None:
    if not inner.cr_suspended:  # else the outer one ends it, in the scope
        inner.close()


def drive(scope: _Scope, inner: Any) -> Generator[Any, Any, Any]:
    """Run ``inner``, entering the scope at each resume and leaving it at each suspend."""
    # This yields its items, passes on all that is sent and thrown, GeneratorExit included, and
    # returns its result.
    step: Callable[[Any], Any] = inner.send
    argument: Any = None
    while True:
        with scope:
            try:
                yielded = step(argument)
            except StopIteration as stop:
                return stop.value  # of the function; a failing restore is raised in its place
            finally:
                argument = None  # an exception's traceback refers to this frame: avoid a cycle
        try:
            step, argument = inner.send, (yield yielded)
        except BaseException as error:
            step, argument = inner.throw, error


@types.coroutine
def awaiting(scope: _Scope, inner: Any) -> Generator[Any, Any, Any]:
    """Return an awaitable that awaits ``inner`` with the scope entered at each resume."""
    return (yield from drive(scope, inner))


async def _coroutine(scope: _Scope, inner: Coroutine[Any, Any, T]) -> T:
    result: T = await awaiting(scope, inner)
    return result


class RunningScope(Scope):
    """A scope that runs functions and waits for their work: the base of devices and contexts."""

    __slots__ = ()

    set_current: Callable[[], None]
    synchronize: Callable[[], None]

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
        """
        leave_nothing_current()

    def synchronized(self) -> Synchronized[Self]:
        """Return a scope of the device that waits for the device's work before it restores.

        It is as reusable and reentrant as the device itself.

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
        each resume and leaves it at each suspend, as with :func:`~dask_devctx.on_device`.
        """
        result: T = call(self, fn, *args, **kwargs)
        return result


class Synchronized(Generic[S]):
    """A scope of a device or context that waits for its work: ``synchronized()`` returns it."""

    # Reusable and reentrant on any thread, as the device itself: it has no state.

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
        scope = self._scope
        try:
            # The body may have left another context current, which may be destroyed by now. The
            # wait restores the current context, so it must not be that one.
            if open_scopes()[-1:] == (scope,):
                scope.set_current()
            scope.synchronize()
        except BaseException as error:
            if exc is None or not isinstance(error, DevctxError):
                scope.__exit__(type(error), error, error.__traceback__)
                raise
            raise_or_note(error, exc)
        return scope.__exit__(exc_type, exc, traceback)
