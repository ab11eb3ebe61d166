"""A coroutine that is not for a device, on an event loop where a device is current."""

from __future__ import annotations

from typing import Any

from dask_devctx.cuda import suspending
from dask_devctx.cuda.scope import NothingCurrent
from dask_devctx.dask_internals.tasks import TaskStandIn


class HostCoroutine(TaskStandIn):
    """A coroutine that is not for a device, on an event loop where a device is current.

    For its own steps, no device is current.
    """

    __slots__ = ()

    def __call__(self, data: Any = ()) -> Any:
        coroutine: Any = self.task(data)
        return suspending.awaiting(NothingCurrent(), coroutine)
