"""Running a function inside a scope: functions, coroutines and generators, however they suspend.

The scope is entered at each resume and left at each suspend, so that the device is current for
the function's own code and for nobody who runs in between.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from dask_devctx.cuda.scope import Scope
from dask_devctx.errors import DevctxError

P = ParamSpec("P")
T = TypeVar("T")

_NOTHING: Any = object()


class _Suspending(Protocol):
    """A coroutine, a generator, or a step of an asynchronous generator."""

    def send(self, value: Any, /) -> Any: ...
    def throw(self, error: BaseException, /) -> Any: ...
    def close(self) -> Any: ...


class Waiting(Protocol):
    """A scope that waits for work on leaving: see :mod:`dask_devctx.cuda.synchronized`."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *exc: Any) -> Any: ...
    def at_the_end(self) -> AbstractContextManager[None]: ...


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
    return within(scope, enter_and_call(scope, fn, *args, **kwargs))


def enter_and_call(scope: Scope, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return ``fn(*args, **kwargs)``, called inside the scope."""
    result = _NOTHING
    try:
        with scope:
            result = fn(*args, **kwargs)
    except DevctxError as error:
        _keep_result(error, result)
        raise
    return result


def _keep_result(error: DevctxError, result: Any) -> None:
    """Let an error of leaving a scope, which hides what was returned inside, carry that."""
    if result is not _NOTHING:
        error.result = result  # type: ignore[attr-defined]
        error.add_note(
            f"The function had returned a {type(result).__name__}: it is this error's attribute "
            "'result'"
        )


def suspends(result: object) -> bool:
    """Return whether what a function returned is still to run."""
    return isinstance(result, (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType))


def within(scope: Scope, result: Any, waiting: Waiting | None = None) -> Any:
    """Return what runs inside the scope, where ``result`` is still to run; else ``result``.

    A coroutine, generator or asynchronous generator gives one of the same kind and name.

    Parameters
    ----------
    waiting
        What waits for the scope's work before something is handed out; None where nothing does.
    """
    outer: Any
    if isinstance(result, types.CoroutineType):
        outer = _coroutine(scope, result, waiting)
        # Cancelled before its first step, the outer one never starts the inner one, which would
        # then complain that nobody awaited it.
        weakref.finalize(outer, _close_unstarted, result).atexit = False
    elif isinstance(result, types.GeneratorType):
        # One that types.coroutine decorates can be awaited.
        import inspect  # not with the module: it takes longer than all else that this needs

        if inspect.isawaitable(result):
            outer = awaiting(scope, _waited(waiting, result))
        else:
            outer = drive(waiting or scope, result)
    elif isinstance(result, types.AsyncGeneratorType):
        outer = _asynchronous_generator(scope, result, waiting)
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
    result = _NOTHING
    while True:
        try:
            with scope:
                try:
                    yielded = step(argument)
                except StopIteration as stop:  # a return: a failing restore must not hide behind it
                    result = stop.value
                finally:
                    argument = None  # an exception's traceback leads to this frame: make no cycle
        except DevctxError as error:
            _keep_result(error, result)
            raise
        if result is not _NOTHING:
            return result
        try:
            step, argument = inner.send, (yield yielded)
        except BaseException as error:
            step, argument = inner.throw, error


@types.coroutine
def awaiting(scope: AbstractContextManager[Any], inner: Any) -> Generator[Any, Any, Any]:
    """Return an awaitable that awaits ``inner`` with the scope entered at each resume."""
    return (yield from drive(scope, inner))


def _waited(waiting: Waiting | None, inner: Any) -> Any:
    """Return what suspends as ``inner`` does, and waits for its work before it returns."""
    return inner if waiting is None else _with_wait(waiting, inner)


@types.coroutine
def _with_wait(waiting: Waiting, inner: Any) -> Generator[Any, Any, Any]:
    with waiting.at_the_end():
        return (yield from inner)


async def _coroutine(scope: Scope, inner: Coroutine[Any, Any, T], waiting: Waiting | None) -> T:
    result: T = await awaiting(scope, _waited(waiting, inner))
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
    scope: Scope, inner: AsyncGenerator[T, Any], waiting: Waiting | None
) -> AsyncGenerator[T, Any]:
    step: Any = _or_end(_first_step(inner))
    while True:
        try:
            item = await awaiting(scope, _waited(waiting, step))
        finally:
            step = None  # it may hold an exception whose traceback leads to this frame
        if item is _END:
            return
        try:
            step = _or_end(inner.asend((yield item)))
        except GeneratorExit:
            await awaiting(scope, _waited(waiting, inner.aclose().__await__()))
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


class ScopedFunction(Generic[P, T]):
    """A function that runs inside a scope wherever it is called; a subclass knows which one.

    Parameters
    ----------
    fn
        The function itself.
    decorator
        How the decorator is written, for messages.
    """

    __wrapped__: Callable[P, T]

    def __init__(self, fn: Callable[P, T], decorator: str) -> None:
        if not callable(fn):
            hint = ". Put it below @classmethod or @property, next to the function"
            if not isinstance(fn, classmethod | property | functools.cached_property):
                hint = ""
            raise TypeError(f"{decorator} decorates something callable, got {fn!r}{hint}")
        functools.update_wrapper(self, fn)
        self._decorator = decorator

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        raise NotImplementedError

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., T]:
        if instance is None or isinstance(self.__wrapped__, staticmethod):
            return self
        return types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        # inspect, and with it asyncio and dask, tells what kind of function this is by its code.
        if name in ("__code__", "__defaults__", "__kwdefaults__", "__name__"):
            fn: Any = self.__wrapped__
            while isinstance(fn, (functools.partial, staticmethod)):
                fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
            return getattr(fn, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> Any:
        # Decorated in place, the module's name is this object and not the function any more. What
        # lives in __main__ goes by value, which takes cloudpickle: the other end has another one.
        name, module = getattr(self, "__qualname__", ""), getattr(self, "__module__", "")
        found: object = None if module == "__main__" else sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else self._rebuilt()

    def _rebuilt(self) -> tuple[Any, ...]:
        """Return what :meth:`__reduce__` does where the function goes by value."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{self._decorator}({self.__wrapped__!r})"
