"""Several devices for one task or function: the first is current, and ``task_devices`` has all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

from dask_devctx.cuda.device import Device

# A task of one device sets the device itself: a tuple for each task would cost as much again.
Noted = Device | tuple[Device, ...] | None

_of_this_task: ContextVar[Noted] = ContextVar("devices_of_this_task", default=None)
# A task without a device notes nothing. These functions tell it from code outside of tasks.
_tell_tasks: list[Callable[[], bool]] = []


def task_devices() -> tuple[Device, ...]:
    """Return the devices of the running task; the first one is current.

    Returns
    -------
    tuple of Device
        One device for most tasks, several for a task with the annotation ``devices``, none for a
        task with ``device=None``. Also the devices of a function that ``on_device([0, 1])``
        decorates, wherever it is called.

    Raises
    ------
    RuntimeError
        No task of a worker with the plugin runs here.

    Notes
    -----
    A task knows its devices on its own thread and in its own coroutine. Give them to threads that
    it starts as an argument.

    Examples
    --------
    >>> from dask_devctx import on_device
    >>> @on_device([2, 3])
    ... def where():
    ...     return [device.device_id for device in task_devices()]
    >>> where()
    [2, 3]
    """
    found = _of_this_task.get()
    if found is None:
        if any(is_task() for is_task in _tell_tasks):
            return ()
        raise RuntimeError(
            "task_devices() works inside a task of a worker with DevicePlugin, on the task's own "
            "thread, and inside a function of on_device([0, 1]). Here is neither. "
            "Device.current() returns the current device anywhere"
        )
    return found if isinstance(found, tuple) else (found,)


@contextmanager
def tasks_told(is_task: Callable[[], bool]) -> Iterator[None]:
    """While it is open, :func:`task_devices` is empty where a task without a device runs.

    Parameters
    ----------
    is_task
        Returns whether the caller is a task.
    """
    _tell_tasks.append(is_task)
    try:
        yield
    finally:
        _tell_tasks.remove(is_task)


def note_devices(devices: Noted) -> Noted:
    """Let :func:`task_devices` return these devices from now on; return those before."""
    before = _of_this_task.get()
    _of_this_task.set(devices)
    return before


@contextmanager
def known_as_the_tasks(devices: Noted) -> Iterator[None]:
    """While it is open, :func:`task_devices` returns these devices on this thread."""
    before = note_devices(devices)
    try:
        yield
    finally:
        note_devices(before)


class Together:
    """A scope of several devices for one call: the first is current, the others are known.

    Parameters
    ----------
    devices
        The devices; not empty. Each is named once.

    Raises
    ------
    ValueError
        A device is named twice.

    Notes
    -----
    Not reentrant: each call makes its own. A coroutine enters it at each resume.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        refuse_twice(self.devices)
        self._before: Noted = None

    def __enter__(self) -> Self:
        self.devices[0].__enter__()
        self._before = note_devices(self.devices)
        return self

    def __exit__(self, *error: Any) -> bool | None:
        note_devices(self._before)
        return self.devices[0].__exit__(*error)

    def synchronize(self) -> None:
        """Wait for the work of all of them."""
        for device in self.devices:
            device.synchronize()


def refuse_twice(devices: Sequence[Device]) -> None:
    """Refuse a list that names a device twice."""
    if len(set(devices)) < len(devices):
        named = ", ".join(map(str, devices))
        raise ValueError(f"each of several devices is named once, got {named}")
