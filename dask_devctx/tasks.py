"""Running a function on a device: functions, coroutines and generators, however they suspend.

Nothing here knows dask. What suspends is entered at each resume and left at each suspend, so that
the device is current for the function's own code and for nobody who runs in between.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
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
        What is decorated cannot be called. On calling: ``which`` names no device.
    DeviceNotFoundError
        On calling: this process does not have the device.

    Notes
    -----
    The decorated function can be pickled wherever the function itself can. What suspends enters
    the device at each resume and leaves it at each suspend: many of them, interleaved on one
    event loop, never see each other's device, and neither does the loop.

    Examples
    --------
    >>> @on_device("cuda:2")
    ... def where(x):
    ...     return x, Device.current().device_id
    >>> where("here")
    ('here', 2)
    """

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
            raise TypeError(f"on_device({which!r}) decorates something callable, got {fn!r}")
        functools.update_wrapper(self, fn)
        self.which = which

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = call(Device(self.which), self.__wrapped__, *args, **kwargs)
        return result

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., T]:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        # inspect, and with it asyncio and dask, tells what kind of function this is by its code.
        if name in ("__code__", "__defaults__", "__kwdefaults__"):
            return getattr(self.__wrapped__, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> Any:
        # Decorated in place, the module's name is this object and not the function any more.
        name = getattr(self, "__qualname__", "")
        found: object = sys.modules.get(getattr(self, "__module__", ""))
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
    """Return what runs inside the scope, where ``result`` is still to run; else ``result``."""
    if inspect.iscoroutine(result):
        return _coroutine(scope, result)
    if inspect.isgenerator(result):
        return drive(scope, result)
    if inspect.isasyncgen(result):
        return _asynchronous_generator(scope, result)
    return result


def drive(scope: AbstractContextManager[Any], inner: _Suspending) -> Generator[Any, Any, Any]:
    """Run what suspends, with the scope entered at each resume and left at each suspend.

    Yields what ``inner`` yields, passes on what is sent and thrown, and returns what it returns.
    """
    resume: Callable[[], Any] = functools.partial(inner.send, None)
    while True:
        try:
            with scope:
                yielded = resume()
        except StopIteration as stop:
            return stop.value
        try:
            sent = yield yielded
        except GeneratorExit:
            with scope:
                inner.close()
            raise
        except BaseException as error:
            resume = functools.partial(inner.throw, error)
        else:
            resume = functools.partial(inner.send, sent)


@types.coroutine
def awaiting(scope: AbstractContextManager[Any], inner: Any) -> Generator[Any, Any, Any]:
    """Return an awaitable that awaits ``inner`` with the scope entered at each resume."""
    return (yield from drive(scope, inner))


async def _coroutine(scope: Scope, inner: Coroutine[Any, Any, T]) -> T:
    result: T = await awaiting(scope, inner)
    return result


async def _asynchronous_generator(
    scope: Scope, inner: AsyncGenerator[T, Any]
) -> AsyncGenerator[T, Any]:
    step: Awaitable[T] = inner.__anext__()
    while True:
        try:
            item = await awaiting(scope, step)
        except StopAsyncIteration:
            return
        try:
            sent = yield item
        except GeneratorExit:
            await awaiting(scope, inner.aclose())
            raise
        except BaseException as error:
            step = inner.athrow(error)
        else:
            step = inner.asend(sent)
