"""Functions that run on a device, and which devices a task has. It needs no dask."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Final, Generic, ParamSpec, TypeVar

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.naming import refuse_no_name
from dask_devctx.cuda.suspending import call

P = ParamSpec("P")
T = TypeVar("T")


def on_device(
    which: object, *, synchronize: bool = False
) -> Callable[[Callable[P, T]], DeviceFunction[P, T]]:
    """Decorate a function to run on a device, wherever it is called.

    Parameters
    ----------
    which
        Anything that :class:`~dask_devctx.Device` accepts. The calling process looks it up at each
        call, so a machine without that GPU can pass the function on.
    synchronize
        Whether to wait for the device's work before a function returns its result, a generator
        yields an item, and a coroutine waits for something else or returns.

    Returns
    -------
    callable
        A decorator. It takes a function, coroutine function or generator function, and returns one
        of the same kind that runs on the device.

    Raises
    ------
    TypeError
        The decorated object cannot be called, the device is missing, or ``which`` is of a type
        that names no device.
    DeviceNotFoundError
        ``which`` is a text that names no device on any machine. On calling: this process
        does not have the device.

    Notes
    -----
    The decorated function can be pickled if the function itself can. A coroutine or generator
    enters the device at each resume and leaves it at each suspend. Many of them can share one event
    loop: they never see each other's device, and the loop sees none.

    Any other result is returned unchanged. An iterator of ``map``, or the context manager of
    ``@contextmanager``, runs on the device that is current where it is used. ``@on_device`` below
    ``@contextmanager`` runs the generator's own lines on the device, and the body of the ``with``
    block on its caller's. For a body on the device, write ``with Device(1): yield`` in the
    generator instead.

    Examples
    --------
    >>> @on_device("cuda:2")
    ... def where(x):
    ...     return x, Device.current().device_id
    >>> where("here")
    ('here', 2)
    """
    if isinstance(which, types.FunctionType):
        raise TypeError(f"write @on_device(0) above {which.__name__}, with the device")
    if which is not None:
        refuse_no_name(which)

    def decorate(fn: Callable[P, T]) -> DeviceFunction[P, T]:
        return DeviceFunction(which, fn, synchronize)

    return decorate


class DeviceFunction(Generic[P, T]):
    """A function that runs on a device wherever it is called: :func:`on_device` makes it."""

    # A worker and a scheduler recognise it by this attribute, without importing the class.
    carries_device: ClassVar = True

    __wrapped__: Callable[P, T]

    def __init__(self, which: object, fn: Callable[P, T], synchronize: bool = False) -> None:
        if not callable(fn) or isinstance(fn, staticmethod):
            raise TypeError(
                f"{_decorator(which, synchronize)} decorates something callable, got {fn!r}. Put "
                "it below @staticmethod, @classmethod and @property, next to the function"
            )
        functools.update_wrapper(self, fn)
        self.which = which
        self.synchronize = synchronize

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        device = Device(self.which)
        scope = device.synchronized() if self.synchronize else device
        result: T = call(scope, self.__wrapped__, *args, **kwargs)
        return result

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., T]:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        # inspect reads the kind of a function from its code. asyncio and dask use inspect.
        if name in ("__code__", "__defaults__", "__kwdefaults__", "__name__"):
            fn: Any = self.__wrapped__
            while isinstance(fn, functools.partial):
                fn = fn.func
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
        by_value = DeviceFunction, (self.which, self.__wrapped__, self.synchronize)
        return name if found is self else by_value

    def __repr__(self) -> str:
        return f"{_decorator(self.which, self.synchronize)}({self.__wrapped__!r})"


def _decorator(which: object, synchronize: bool) -> str:
    return f"on_device({which!r}{', synchronize=True' * synchronize})"


# -- the devices of a task

# A task of one device sets the device itself: a tuple for each task would cost as much again.
Noted = Device | tuple[Device, ...] | None

# The answer of :func:`task_devices`, in the context of the running task.
OF_THIS_TASK: Final[ContextVar[Noted]] = ContextVar("devices_of_this_task", default=None)


def task_devices() -> tuple[Device, ...]:
    """Return the devices of the running task; the first one is current.

    Returns
    -------
    tuple of Device
        One device for most tasks, several for a task with the annotation ``devices``, none for a
        task with ``device=None``.

    Raises
    ------
    RuntimeError
        No task of a worker with the plugin runs here.

    Notes
    -----
    A task knows its devices on its own thread and in its own coroutine. Give them to threads that
    it starts as an argument.
    """
    found = OF_THIS_TASK.get()
    if found is None:
        raise RuntimeError(
            "task_devices() works inside a task of a worker with DevicePlugin, on the task's own "
            "thread. Device.current() returns the current device anywhere"
        )
    return found if isinstance(found, tuple) else (found,)


@contextmanager
def known_as_the_tasks(devices: Noted) -> Iterator[None]:
    """While it is open, :func:`task_devices` returns these devices on this thread."""
    before = OF_THIS_TASK.get()
    OF_THIS_TASK.set(devices)
    try:
        yield
    finally:  # no token: a coroutine may be closed in another context
        OF_THIS_TASK.set(before)
