"""Running a function inside a scope: functions, coroutines and generators, however they suspend.

What suspends is entered at each resume and left at each suspend, so that the device is current for
the function's own code and for nobody who runs in between.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from dask_devctx.cuda.scope import Scope

T = TypeVar("T")


class _Suspending(Protocol):
    """What coroutines, generators and the steps of asynchronous generators have in common."""

    def send(self, value: Any, /) -> Any: ...
    def throw(self, error: BaseException, /) -> Any: ...
    def close(self) -> Any: ...


def call(scope: Scope, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return ``fn(*args, **kwargs)``, run inside the scope whatever kind of function it is.

    Parameters
    ----------
    scope
        A device or a context.
    fn
        A coroutine function gives a coroutine, a generator function a generator; these enter the
        scope as often as they are resumed.
    """
    with scope:
        result = fn(*args, **kwargs)
    return within(scope, result)


def within(scope: Scope, result: Any) -> Any:
    """Return what runs inside the scope, where ``result`` is still to run; else ``result``.

    A coroutine, generator or asynchronous generator gives one of the same kind and name.
    """
    outer: Any
    if isinstance(result, types.CoroutineType):
        outer = _coroutine(scope, result)
        # Cancelled before its first step, the outer one never starts the inner one, which would
        # then complain that nobody awaited it.
        weakref.finalize(outer, _close_unstarted, result).atexit = False
    elif isinstance(result, types.GeneratorType):
        # One that types.coroutine decorates can be awaited.
        import inspect  # not with the module: it takes longer than all else that this needs

        outer = (awaiting if inspect.isawaitable(result) else drive)(scope, result)
    elif isinstance(result, types.AsyncGeneratorType):
        outer = _asynchronous_generator(scope, result)
    else:
        return result
    outer.__name__, outer.__qualname__ = result.__name__, result.__qualname__
    return outer


def _close_unstarted(inner: Coroutine[Any, Any, Any]) -> None:
    import inspect

    if inspect.getcoroutinestate(inner) == inspect.CORO_CREATED:
        inner.close()


def drive(scope: AbstractContextManager[Any], inner: _Suspending) -> Generator[Any, Any, Any]:
    """Run what suspends, with the scope entered at each resume and left at each suspend.

    Yields what ``inner`` yields, passes on what is sent and thrown, ``GeneratorExit`` included,
    and returns what it returns.
    """
    step: Callable[[Any], Any] = inner.send
    argument: Any = None
    while True:
        with scope:
            try:
                yielded = step(argument)
            except StopIteration as stop:  # a return: a failing restore must not hide behind it
                return stop.value
            finally:
                argument = None  # an exception's traceback leads to this frame: make no cycle
        try:
            step, argument = inner.send, (yield yielded)
        except BaseException as error:
            step, argument = inner.throw, error


@types.coroutine
def awaiting(scope: AbstractContextManager[Any], inner: Any) -> Generator[Any, Any, Any]:
    """Return an awaitable that awaits ``inner`` with the scope entered at each resume."""
    return (yield from drive(scope, inner))


async def _coroutine(scope: Scope, inner: Coroutine[Any, Any, T]) -> T:
    result: T = await awaiting(scope, inner)
    return result


_END: Any = object()


async def _or_end(step: Awaitable[T]) -> T:
    """Await one step of an asynchronous generator; its end is a value here, and no exception."""
    try:
        return await step
    except StopAsyncIteration:
        end: T = _END
        return end


async def _asynchronous_generator(
    scope: Scope, inner: AsyncGenerator[T, Any]
) -> AsyncGenerator[T, Any]:
    step: Any = _or_end(_first_step(inner))
    while True:
        try:
            item = await awaiting(scope, step)
        finally:
            step = None  # it may hold an exception whose traceback leads to this frame
        if item is _END:
            return
        try:
            step = _or_end(inner.asend((yield item)))
        except GeneratorExit:
            await awaiting(scope, inner.aclose().__await__())
            raise
        except BaseException as error:
            step = _or_end(inner.athrow(error))


def _first_step(inner: AsyncGenerator[T, Any]) -> Awaitable[T]:
    """Start a generator that the event loop does not come to know.

    The loop closes the generators it knows when they are dropped and when it is shut down. It knows
    the outer one, which closes this one on its device.
    """
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        return inner.__anext__()
    finally:
        sys.set_asyncgen_hooks(*hooks)
