"""One task of dask's on its device: what the worker calls in the task's place."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dask_devctx import driver
from dask_devctx.cuda import suspending
from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.tasks import TaskStandIn
from dask_devctx.dask_internals.threads import TaskThreadPoolExecutor

if TYPE_CHECKING:
    from dask_devctx.transfer import Stamp
    from dask_devctx.transfer.lifetime import Lifetime
    from dask_devctx.worker.inputs import Copies, Inputs

logger = logging.getLogger(__name__)

_NONE: Mapping[Hashable, Lifetime] = MappingProxyType({})


class DeviceTask(TaskStandIn):
    """A task that enters its device, runs, and leaves it.

    Parameters
    ----------
    task
        The task itself, a callable of its inputs' values by key.
    device
        Its device, or the error with which it is to fail.
    executor
        The device's threads; None leaves it on those that dask chose.
    priority
        Its place among the tasks that wait for them; the least runs first.
    asked_for
        Whether somebody asked for this device; else any would have done.
    inputs
        Brings the inputs to the device; None leaves them where they are.
    call
        Calls it on the device; whatever watches over the task is in here, and watches over its
        inputs' way too. It stays behind where the task is sent to another process.

    Attributes
    ----------
    lifetimes
        The lifetimes of the inputs' values, by key; set where it has any.
    made
        Stamp of the work that makes its result, when it has returned one that is on a device.

    Notes
    -----
    It can be pickled, so that it runs in another process on a device of the same UUID there. In a
    process forked after CUDA was initialised no device can be used: a task that asked for none runs
    there without one, any other fails.
    """

    __slots__ = ("asked_for", "call", "device", "inputs", "lifetimes", "made")

    def __init__(
        self,
        task: Callable[[Any], Any],
        device: Device | Exception,
        *,
        executor: TaskThreadPoolExecutor | None = None,
        priority: tuple[int, ...] | None = None,
        asked_for: bool = True,
        inputs: Inputs | None = None,
        call: Callable[[Device, Callable[[Any], Any], Any], Any] = suspending.call,
    ) -> None:
        super().__init__(task, executor, priority)
        self.call = call
        self.inputs = inputs
        self.lifetimes = _NONE
        self.made: Stamp | None = None
        self.device = device
        self.asked_for = asked_for

    def __call__(self, data: Any = ()) -> Any:
        device = self.device
        if isinstance(device, Exception):
            raise device
        return self.call(device, self.task if self.inputs is None else self._with_inputs, data)

    def _with_inputs(self, data: Any) -> Any:
        """Call the task on its device, which is current, with what it needs brought there."""
        inputs, device = self.inputs, self.device
        assert inputs is not None
        assert isinstance(device, Device)
        brought, copies = inputs.bring(data, self.lifetimes, device) if data else (data, [])
        if self.task.is_coro:  # type: ignore[attr-defined]
            return self._awaited(brought, copies)
        try:
            result = self.task(brought)
        except BaseException:
            inputs.gave_up(copies, device)
            raise
        self.made = inputs.made(result, copies, device)
        return result

    async def _awaited(self, brought: Any, copies: Copies) -> Any:
        inputs, device = self.inputs, self.device
        assert inputs is not None
        assert isinstance(device, Device)
        try:
            result = await self.task(brought)
        except BaseException:
            inputs.gave_up(copies, device)
            raise
        self.made = inputs.made(result, copies, device)
        return result

    def __reduce__(self) -> Any:
        return _elsewhere, (self.task, self.device, self.asked_for)


def _elsewhere(
    task: Callable[[Any], Any], device: Device | Exception, asked_for: bool
) -> Callable[[Any], Any]:
    """Return the task to run in the process that unpickles it."""
    backend = driver.current_backend()
    if not asked_for and backend is not None and backend.calls.checked.forked:
        _warn_forked()
        return task
    return DeviceTask(task, device, asked_for=asked_for)


@functools.cache
def _warn_forked() -> None:
    logger.warning(
        "This process was forked after CUDA was initialised and can use no device: tasks that ask "
        "for none run without one. Make the pool with multiprocessing's 'spawn' context"
    )
