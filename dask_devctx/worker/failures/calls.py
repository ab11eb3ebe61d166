"""What is called in the place of a task, or of an actor's method, so that it is watched over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Hashable
from types import TracebackType
from typing import Any

from distributed import Reschedule

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.on_device import DeviceFunction
from dask_devctx.errors import DeviceFailedError, DeviceOutOfMemoryError
from dask_devctx.worker.failures.charge import Charge
from dask_devctx.worker.failures.monitor import Guard

# What a method is called with, positional and by name; and what takes that to a device.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Bring = Callable[[Arguments, Device], Arguments]


class GuardedTask:
    """What a pinned task calls in the place of :func:`dask_devctx.cuda.suspending.call`.

    Parameters
    ----------
    guard
        Watches over it.
    charge
        The task.
    """

    __slots__ = ("_charge", "_guard")

    def __init__(self, guard: Guard, charge: Charge) -> None:
        self._guard = guard
        self._charge = charge

    def __call__(self, device: Device, fn: Callable[[Any], Any], data: Any) -> Any:
        if self._guard.is_cancelled(self._charge.key):
            raise Reschedule  # which comes to nothing, unless it was asked for again just now
        try:
            result = self._guard.run(self._charge, device, fn, data)
        except (DeviceFailedError, DeviceOutOfMemoryError) as error:
            failure: Exception = error
        except BaseException as error:
            error.__traceback__ = _of_the_task(error)
            raise
        else:
            return self._awaited(result) if inspect.iscoroutine(result) else result
        raise _alone(failure)

    async def _awaited(self, running: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await running
        except (DeviceFailedError, DeviceOutOfMemoryError) as error:
            failure: Exception = error
        except BaseException as error:
            error.__traceback__ = _of_the_task(error)
            raise
        raise _alone(failure)


class GuardedMethod(DeviceFunction[..., Any]):
    """A method of an actor, on the actor's device.

    Parameters
    ----------
    guard
        Watches over it.
    key
        The actor's key.
    device
        Its device.
    method
        The method.
    bring
        Called inside the device's scope, returns the arguments that the method is given; None
        leaves them where they are.

    Notes
    -----
    What a method did to its actor it must not do twice: unlike a task it is not run again, neither
    when memory ran out nor when another one broke the device.
    """

    def __init__(
        self,
        guard: Guard,
        key: Hashable,
        device: Device,
        method: Callable[..., Any],
        bring: Bring | None,
    ) -> None:
        super().__init__(device, method)
        self._guard = guard
        self._bring = bring
        self._charge = Charge(key, movable=False, is_method=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        device, bring = self.which, self._bring
        assert isinstance(device, Device)

        def method(_: object) -> Any:
            positional, named = (args, kwargs) if bring is None else bring((args, kwargs), device)
            return self.__wrapped__(*positional, **named)

        try:
            result = self._guard.run(self._charge, device, method, None)
        except (DeviceFailedError, Reschedule) as error:
            failure: Exception = error
        else:
            return self._awaited(result) if inspect.iscoroutine(result) else result
        raise _alone(self._not_again(failure))

    async def _awaited(self, running: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await running
        except (DeviceFailedError, Reschedule) as error:
            failure: Exception = error
        raise _alone(self._not_again(failure))

    def _not_again(self, failure: Exception) -> Exception:
        ended = self._guard.blame.failure
        return ended.error if ended is not None and isinstance(failure, Reschedule) else failure


# Through these a task is called: who reads the traceback of a task that failed looks for its own.
_ON_THE_WAY = (
    *("dask_devctx.worker.task", "dask_devctx.worker.failures", "dask_devctx.cuda.suspending"),
    *("dask_devctx.cuda.on_device", "dask._task_spec"),
)


def _of_the_task(error: BaseException) -> TracebackType | None:
    """Return the part of an error's traceback that begins with the task's own code, or all."""
    step = error.__traceback__
    while step is not None and _is_on_the_way(step):
        step = step.tb_next
    return step or error.__traceback__


def _is_on_the_way(step: TracebackType) -> bool:
    name: str = step.tb_frame.f_globals.get("__name__", "")
    return name.startswith(_ON_THE_WAY)


def _alone(failure: Exception) -> Exception:
    """Take from an error what it was raised in the middle of: its cause says it, and is sent."""
    failure.__context__ = None
    return failure
