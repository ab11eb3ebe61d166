"""What a pinned task calls so that it is watched over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from dask_devctx.device import Device
from dask_devctx.errors import DeviceFailedError, DeviceOutOfMemoryError
from dask_devctx.failures.charge import Charge
from dask_devctx.failures.guard import Guard


class GuardedTask:
    """What a pinned task calls in the place of :func:`dask_devctx.tasks.call`.

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
        try:
            result = self._guard.run(self._charge, device, fn, data)
        except (DeviceFailedError, DeviceOutOfMemoryError) as error:
            failure: Exception = error
        else:
            return self._awaited(result) if inspect.iscoroutine(result) else result
        raise _alone(failure)

    async def _awaited(self, running: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await running
        except (DeviceFailedError, DeviceOutOfMemoryError) as error:
            failure: Exception = error
        raise _alone(failure)


def _alone(failure: Exception) -> Exception:
    """Take from an error what it was raised in the middle of: its cause says it, and is sent."""
    failure.__context__ = None
    return failure
