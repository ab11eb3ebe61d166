"""Running a function on a device: functions, coroutines and generators, however they suspend.

Nothing here knows dask. What suspends is entered at each resume and left at each suspend, so that
the device is current for the function's own code and for nobody who runs in between.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from dask_devctx.device import Device
from dask_devctx.scope import Scope

P = ParamSpec("P")
T = TypeVar("T")


class _Suspending(Protocol):
    """What coroutines, generators and the steps of asynchronous generators have in common."""

    def send(self, value: Any, /) -> Any: ...
    def throw(self, error: BaseException, /) -> Any: ...
    def close(self) -> Any: ...


def on_device(which: object) -> Callable[[Callable[P, T]], DeviceFunction[P, T]]:
    """Decorate a function to run on a device, wherever it is called.

    Parameters
    ----------
    which
        What :class:`~dask_devctx.Device` accepts. It is looked up when the function is called, in
        the process that calls it, so that a machine without that GPU can hand the function on.

    Returns
    -------
    callable
        Given a function, coroutine function, generator function or asynchronous generator
        function, one of the same kind that runs on the device.

    Raises
    ------
    TypeError
        What is decorated cannot be called, or the device is left out. On calling: ``which`` names
        no device.
    DeviceNotFoundError
        On calling: this process does not have the device.

    Notes
    -----
    The decorated function can be pickled wherever the function itself can. What suspends enters
    the device at each resume and leaves it at each suspend: many of them, interleaved on one
    event loop, never see each other's device, and neither does the loop.

    What else a function returns is returned as it is: an iterator of ``map``, or the context
    manager of ``@contextmanager``, runs where it is used. Put ``@on_device`` below
    ``@contextmanager``, next to the generator function.

    Examples
    --------
    >>> @on_device("cuda:2")
    ... def where(x):
    ...     return x, Device.current().device_id
    >>> where("here")
    ('here', 2)
    """

    if inspect.isroutine(which) or isinstance(which, type):
        raise TypeError(f"on_device needs a device: write @on_device(1) above {which!r}")

    def decorate(fn: Callable[P, T]) -> DeviceFunction[P, T]:
        return DeviceFunction(which, fn)

    return decorate


class DeviceFunction(Generic[P, T]):
    """A function that runs on a device: what :func:`on_device` makes.

    Attributes
    ----------
    which
        The device, as it was named.
    __wrapped__
        The function itself.
    """

    which: object
    __wrapped__: Callable[P, T]

    def __init__(self, which: object, fn: Callable[P, T]) -> None:
        if not callable(fn):
            hint = ". Put it below @classmethod or @property, next to the function"
            if not isinstance(fn, classmethod | property | functools.cached_property):
                hint = ""
            raise TypeError(f"on_device({which!r}) decorates something callable, got {fn!r}{hint}")
        functools.update_wrapper(self, fn)
        self.which = which

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = call(Device(self.which), self.__wrapped__, *args, **kwargs)
        return result

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
        return name if found is self else (DeviceFunction, (self.which, self.__wrapped__))

    def __repr__(self) -> str:
        return f"on_device({self.which!r})({self.__wrapped__!r})"


def call(scope: Scope, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
    if inspect.iscoroutine(result):
        outer = _coroutine(scope, result)
        # Cancelled before its first step, the outer one never starts the inner one, which would
        # then complain that nobody awaited it.
        weakref.finalize(outer, _close_unstarted, result).atexit = False
    elif inspect.isgenerator(result):
        # One that types.coroutine decorates can be awaited.
        outer = (awaiting if inspect.isawaitable(result) else drive)(scope, result)
    elif inspect.isasyncgen(result):
        outer = _asynchronous_generator(scope, result)
    else:
        return result
    outer.__name__, outer.__qualname__ = result.__name__, result.__qualname__
    return outer


def _close_unstarted(inner: Coroutine[Any, Any, Any]) -> None:
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
