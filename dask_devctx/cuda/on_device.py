"""``on_device``: a function that runs on one device, wherever it is called. It needs no dask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, ParamSpec, TypeVar

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.naming import refuse_no_name
from dask_devctx.cuda.several import Together
from dask_devctx.cuda.suspending import ScopedFunction, call
from dask_devctx.cuda.synchronized import Synchronized

P = ParamSpec("P")
T = TypeVar("T")


def on_device(
    which: object, *, synchronize: bool = False
) -> Callable[[Callable[P, T]], DeviceFunction[P, T]]:
    """Decorate a function to run on a device, wherever it is called.

    Parameters
    ----------
    which
        Anything that :class:`~dask_devctx.Device` accepts, or a list of several: then the first is
        current, and :func:`~dask_devctx.task_devices` returns all. The calling process looks it up
        at each call, so a machine without that GPU can pass the function on.
    synchronize
        Whether to wait for the device's work before a function or coroutine returns its result, and
        before a generator yields an item.

    Returns
    -------
    callable
        A decorator. It takes a function, coroutine function, generator function or asynchronous
        generator function, and returns one of the same kind that runs on the device.

    Raises
    ------
    TypeError
        The decorated object cannot be called, the device is missing, or ``which`` is of a type
        that names no device.
    ValueError
        The list is empty. On calling: the list names a device twice.
    DeviceNotFoundError
        ``which`` is a text that names no device on any machine; the error is a ``ValueError``, too.
        On calling: this process does not have the device.

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
    import inspect  # imported late: see dask_devctx.cuda.suspending

    if inspect.isroutine(which) or isinstance(which, type):
        raise TypeError(f"on_device needs a device: write @on_device(1) above {which!r}")
    if isinstance(which, list | tuple):
        which = list(which)  # the caller may change its own
        if not which:
            raise ValueError("on_device([]) names no device: give at least one, on_device([0, 1])")
        for one in which:
            refuse_no_name(one)
    elif which is not None:
        refuse_no_name(which)

    def decorate(fn: Callable[P, T]) -> DeviceFunction[P, T]:
        return DeviceFunction(which, fn, synchronize)

    return decorate


class DeviceFunction(ScopedFunction[P, T]):
    """A function that runs on a device: :func:`on_device` makes it.

    Attributes
    ----------
    which
        The device, as the caller named it, or the list of several.
    synchronize
        Whether it waits for the device's work.
    __wrapped__
        The function itself.
    """

    # A worker and a scheduler recognise it by this attribute, without importing the class.
    carries_device: ClassVar = True

    which: object

    def __init__(self, which: object, fn: Callable[P, T], synchronize: bool = False) -> None:
        super().__init__(fn, f"on_device({which!r}{', synchronize=True' * synchronize})")
        self.which = which
        self.synchronize = synchronize

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.which.__class__ is list:
            return self._on_all(*args, **kwargs)
        device = Device(self.which)
        if self.synchronize:
            return device.synchronized().run(self.__wrapped__, *args, **kwargs)
        result: T = call(device, self.__wrapped__, *args, **kwargs)
        return result

    def _on_all(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        named: Any = self.which
        scope: Any = Together([Device(one) for one in named])
        if self.synchronize:
            result: T = Synchronized[Any](scope).run(self.__wrapped__, *args, **kwargs)
        else:
            result = call(scope, self.__wrapped__, *args, **kwargs)
        return result

    def _rebuilt(self) -> tuple[Any, ...]:
        return DeviceFunction, (self.which, self.__wrapped__, self.synchronize)
