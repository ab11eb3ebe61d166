"""``on_device``: a function that runs on a device, wherever it is called; without dask."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.suspending import call

P = ParamSpec("P")
T = TypeVar("T")


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
    import inspect  # not with the module: see dask_devctx.cuda.suspending

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

    # What a worker and a scheduler know it by, without importing it.
    carries_device: ClassVar = True

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

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
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
