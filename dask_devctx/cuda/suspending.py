"""Running functions, coroutines and generators inside a scope.

A coroutine or generator enters the scope at each resume and leaves it at each suspend. The device
is current for the function's own code, and not for other code that runs in between.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from typing import Any, Final, Generic, ParamSpec, Protocol, TypeVar

from dask_devctx.errors import DevctxError

P = ParamSpec("P")
T = TypeVar("T")

_NOTHING: Any = object()


class _Suspending(Protocol):
    """A coroutine, a generator, or a step of an asynchronous generator."""

    def send(self, value: Any, /) -> Any: ...
    def throw(self, error: BaseException, /) -> Any: ...
    def close(self) -> Any: ...


_Scope = Any  # a context manager; one with `then_wait` waits for its work: synchronized()


def call(scope: _Scope, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return ``fn(*args, **kwargs)``, run inside the scope, for any kind of function."""
    result, entered = _NOTHING, scope
    if hasattr(scope, "then_wait"):
        entered, fn, args = scope.scope, scope.then_wait, (fn, *args)
    try:
        with entered:
            result = fn(*args, **kwargs)
    except DevctxError as error:
        _keep_result(error, result)
        raise
    return within(scope, result)


def _keep_result(error: DevctxError, result: Any) -> None:
    """Attach the function's result to an error of leaving the scope, which would hide it."""
    if result is not _NOTHING:
        error.result = result  # type: ignore[attr-defined]
        error.add_note(
            f"The function had returned a {type(result).__name__}: it is this error's attribute "
            "'result'"
        )


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
        # A generator that types.coroutine decorates can be awaited.
        import inspect  # imported late: it takes longer than all other imports here together

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


def drive(scope: _Scope, inner: _Suspending) -> Generator[Any, Any, Any]:
    """Run ``inner``, entering the scope at each resume and leaving it at each suspend."""
    # This yields its items, passes on all that is sent and thrown, GeneratorExit included, and
    # returns its result.
    step: Callable[[Any], Any] = inner.send
    argument: Any = None
    result = _NOTHING
    while True:
        try:
            with scope:
                try:
                    yielded = step(argument)
                except StopIteration as stop:  # a return: it must not hide a failing restore
                    result = stop.value
                finally:
                    argument = None  # an exception's traceback refers to this frame: avoid a cycle
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
def awaiting(scope: _Scope, inner: Any) -> Generator[Any, Any, Any]:
    """Return an awaitable that awaits ``inner`` with the scope entered at each resume."""
    if hasattr(scope, "then_wait"):  # it waits at the end alone, not at each `await`
        inner = _and_wait(scope, inner)
        scope = scope.scope
    return (yield from drive(scope, inner))


@types.coroutine
def _and_wait(scope: Any, inner: Any) -> Generator[Any, Any, Any]:
    try:
        result = yield from inner
    except BaseException as error:
        scope.wait(error)
        raise
    scope.wait(None)
    return result


async def _coroutine(scope: _Scope, inner: Coroutine[Any, Any, T]) -> T:
    result: T = await awaiting(scope, inner)
    return result


_END: Any = object()


async def _or_end(step: Awaitable[T]) -> T:
    """Await one step of an asynchronous generator; its end is a value here, not an exception."""
    try:
        return await step
    except StopAsyncIteration:
        end: T = _END
        return end


async def _asynchronous_generator(
    scope: _Scope, inner: AsyncGenerator[T, Any]
) -> AsyncGenerator[T, Any]:
    step: Any = _or_end(_first_step(inner))
    while True:
        try:
            item = await awaiting(scope, step)
        finally:
            step = None  # it may hold an exception whose traceback refers to this frame
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
    """Start a generator without the event loop's hooks."""
    # The loop closes the generators that its hooks have seen, when they are dropped and when it
    # shuts down. It has seen the outer one, which closes this one on its device.
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        return inner.__anext__()
    finally:
        sys.set_asyncgen_hooks(*hooks)


class ScopedFunction(Generic[P, T]):
    """A function that runs inside a scope wherever it is called: ``@device.synchronized()``."""

    __wrapped__: Callable[P, T]

    def __init__(self, scope: Any, fn: Callable[P, T], decorator: str = "") -> None:
        decorator = decorator or repr(scope)
        if not callable(fn):
            hint = ". Put it below @classmethod or @property, next to the function"
            if not isinstance(fn, classmethod | property | functools.cached_property):
                hint = ""
            raise TypeError(f"{decorator} decorates something callable, got {fn!r}{hint}")
        functools.update_wrapper(self, fn)
        self._scope, self._decorator = scope, decorator

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = call(self._scope, self.__wrapped__, *args, **kwargs)
        return result

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., T]:
        if instance is None or isinstance(self.__wrapped__, staticmethod):
            return self
        return types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        # inspect reads the kind of a function from its code. asyncio and dask use inspect.
        if name in ("__code__", "__defaults__", "__kwdefaults__", "__name__"):
            fn: Any = self.__wrapped__
            while isinstance(fn, (functools.partial, staticmethod)):
                fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
            return getattr(fn, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> Any:
        # After decoration in place, the module's name means this object and not the function any
        # more. An object of __main__ goes by value, with cloudpickle: the other process has
        # another __main__.
        name, module = getattr(self, "__qualname__", ""), getattr(self, "__module__", "")
        found: object = None if module == "__main__" else sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else self._rebuilt()

    def _rebuilt(self) -> tuple[Any, ...]:
        """Return the value of :meth:`__reduce__` for a function that goes by value."""
        return type(self), (self._scope, self.__wrapped__)

    def __repr__(self) -> str:
        return f"{self._decorator}({self.__wrapped__!r})"
