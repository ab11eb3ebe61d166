"""One call on its device: a task, or an actor's method, as the worker calls it.

The steps are the same for both: copy the inputs to the device, call, and note the work that makes
the result. The device is current meanwhile, inside a
:class:`~dask_devctx.worker.failures.calls.MonitoredCall`, which decides the outcome.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from threading import get_ident
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from distributed import Reschedule

from dask_devctx import driver
from dask_devctx.cuda import suspending
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.on_device import DeviceFunction, known_as_the_tasks, note_devices
from dask_devctx.dask_internals.tasks import TaskStandIn
from dask_devctx.dask_internals.threads import Submits
from dask_devctx.errors import DeviceFailedError, DeviceOutOfMemoryError
from dask_devctx.worker.failures.calls import MonitoredCall
from dask_devctx.worker.failures.others import Others
from dask_devctx.worker.tracebacks import begins_with_the_task, place_of
from dask_devctx.worker.values.use import Use

if TYPE_CHECKING:
    from dask_devctx.transfer import Stamp
    from dask_devctx.transfer.lifetime import Lifetime
    from dask_devctx.worker.failures.monitor import Monitor
    from dask_devctx.worker.inputs.inputs import Inputs
    from dask_devctx.worker.memory.manager import DeviceMemory

logger = logging.getLogger(__name__)

_NONE: Mapping[Hashable, Lifetime] = MappingProxyType({})

_METHODS_RUN_ONCE: Final = (
    "calls of actors run once, and this actor's state is lost with its worker. Make a new actor"
)

# The positional and the named arguments of a method, and a function that copies them to the first
# of some devices.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Bring = Callable[[Arguments, tuple[Device, ...]], Arguments]


class DeviceTask(TaskStandIn):
    """A task that enters its device, runs, and leaves it.

    Parameters
    ----------
    task
        The task itself, a callable of its inputs' values by key.
    device
        Its device, or the error with which it fails.
    executor
        The device's executor; None leaves the task on the executor that dask chose.
    priority
        Its priority in the executor's queue; the smallest runs first.
    asked_for
        Whether the user asked for this device. If not, any device would do.
    watched
        The number of its watched run, since it may have broken a device before; 0 if it is not
        watched.
    once
        Why it does not run again after a device failed while it ran; "" if it may.
    inputs
        Copies the inputs to the device; None leaves them where they are.
    monitor
        Monitors the device; None only if ``device`` is an error.
    memory
        Makes room for the inputs and the result; None where devices have no limit.
    prefix
        The common name of tasks of its kind, by which the size of its result is known.

    Attributes
    ----------
    lifetimes
        The lifetimes of the inputs' values, by key; set if there are inputs.
    known
        The devices that ``task_devices`` returns inside the task.
    made
        The stamp of the work that makes its result, after it returned a result on a device.
    queued
        Whether it has to wait for its place. If not, it has begun for dask, and runs although it
        may have been cancelled a moment ago.
    waited
        The seconds that it waited for a place, for its inputs and for memory, and its thread.

    Notes
    -----
    It can be pickled. In another process, it runs on the device of the same UUID, without a
    monitor, and its inputs stay as they are. A process that was forked after CUDA was initialized
    can use no device: there a task that asked for no device runs without one, and any other fails.
    """

    __slots__ = (
        *("asked_for", "device", "inputs", "known", "lifetimes", "made", "memory", "monitor"),
        *("once", "prefix", "queued", "watched"),
        *("_began_at", "_inputs_s", "_memory_s", "_placed_at", "_thread"),
    )

    def __init__(
        self,
        task: Callable[[Any], Any],
        device: Device | Exception,
        *,
        executor: Submits | None = None,
        priority: tuple[Any, ...] | None = None,
        asked_for: bool = True,
        watched: int = 0,
        once: str = "",
        inputs: Inputs | None = None,
        monitor: Monitor | None = None,
        memory: DeviceMemory | None = None,
        prefix: str = "",
    ) -> None:
        self.task = task
        self.executor = executor
        self.priority = priority
        self.memory = memory
        self.prefix = prefix
        self.monitor = monitor
        self.inputs = inputs
        self.lifetimes = _NONE
        self.made: Stamp | None = None
        self.queued = True
        self.device = device
        self.known: Any = device
        self.asked_for = asked_for
        self.watched = watched
        self.once = once
        self._placed_at = self._began_at = perf_counter()
        self._inputs_s = self._memory_s = 0.0
        self._thread: int | None = None

    @property
    def waited(self) -> tuple[float, float, float, int | None]:
        place_s = self._began_at - self._placed_at
        return place_s, self._inputs_s, self._memory_s, self._thread

    def __call__(self, data: Any = ()) -> Any:
        with begins_with_the_task:
            device, monitor = self.device, self.monitor
            task: Any = self.task
            if isinstance(device, Exception):
                raise device
            assert monitor is not None
            if self.queued and monitor.is_cancelled(task.key):
                raise Reschedule  # dask ignores this, unless the task was requested again just now
            self._began_at, self._thread = perf_counter(), get_ident()
            call = MonitoredCall(
                monitor,
                task.key,
                device,
                movable=not self.asked_for,
                watched=self.watched,
                once=self.once,
            )
            if task.is_coro:
                return self._await(call, device, data)
            again = False
            try:
                while call.unfinished:
                    with call:
                        if again:
                            self._memory_s = perf_counter() - self._began_at
                        again = True
                        result = self._run(device, data)
            except (DeviceFailedError, DeviceOutOfMemoryError) as error:
                self._name_place(error)
                raise
            return suspending.within(device, result)

    async def _await(self, call: MonitoredCall, device: Device, data: Any) -> Any:
        with begins_with_the_task:
            again = False
            try:
                while call.unfinished:
                    async with call:
                        if again:
                            self._memory_s = perf_counter() - self._began_at
                        again = True
                        result = await suspending.within(device, self._run_in_range(device, data))
            except (DeviceFailedError, DeviceOutOfMemoryError) as error:
                self._name_place(error)
                raise
            return result

    def _name_place(self, error: Exception) -> None:
        place = place_of(getattr(self.task, "func", None))
        if place:
            error.add_note(f"This task calls {place}")

    async def _run_in_range(self, device: Device, data: Any) -> Any:
        ranges = self.monitor.ranges  # type: ignore[union-attr]
        with nullcontext() if ranges is None else ranges.of_process(self.task.key):  # type: ignore[attr-defined]
            return await self._run_coroutine(device, data)

    def _run(self, device: Device, data: Any) -> Any:
        use = self._use(data)
        if use.waits:
            use.wait()
        ranges = self.monitor.ranges  # type: ignore[union-attr]
        if ranges is None:
            return self._run_function(use)
        with ranges.on_thread(self.task.key):  # type: ignore[attr-defined]
            return self._run_function(use)

    def _use(self, data: Any) -> Use:
        devices = self.known if self.known.__class__ is tuple else (self.known,)
        return Use(
            self.inputs,
            self.memory,
            self.task,
            self.task.key,  # type: ignore[attr-defined]
            self.prefix,
            data,
            self.lifetimes,
            devices,
        )

    def _run_function(self, use: Use) -> Any:
        before = note_devices(self.known)
        try:
            with use:
                result = use.task(use.data)
                self._returned(use, result)
        finally:
            note_devices(before)
        return result

    async def _run_coroutine(self, device: Device, data: Any) -> Any:
        use = self._use(data)
        if use.waits:  # on another thread: this one runs the worker's event loop
            await asyncio.to_thread(use.wait)
        before = note_devices(self.known)
        try:
            with use:
                result = await use.task(use.data)
                self._returned(use, result)
        finally:
            note_devices(before)
        return result

    def _returned(self, use: Use, result: Any) -> None:
        use.returned(result)
        self.made = use.made
        self._inputs_s = use.brought_s
        self._memory_s += use.waited_s

    def __reduce__(self) -> Any:
        given = (_run_elsewhere, self.task, self.device, self.asked_for)
        return functools.partial, given


def _run_elsewhere(
    task: Callable[[Any], Any], device: Device | Exception, asked_for: bool, data: Any = ()
) -> Any:
    """Run a task in the process that unpickled it; return its result."""
    with begins_with_the_task:
        if isinstance(device, Exception):
            raise device
        backend = driver.current_backend()
        if not asked_for and backend is not None and backend.calls.checked.forked:
            _warn_forked()
            return task(data)
        with known_as_the_tasks(device):
            return suspending.call(device, task, data)


@functools.cache
def _warn_forked() -> None:
    logger.warning(
        "This process was forked after CUDA was initialised and can use no device: tasks that name "
        "no device run without one. Create the pool with multiprocessing's 'spawn' context"
    )


def monitored_method(monitor: Monitor, key: Hashable, device: Device) -> MonitoredCall:
    """Return a call of an actor's method or property, on the actor's device."""
    return MonitoredCall(monitor, key, device, once=_METHODS_RUN_ONCE, is_method=True)


class DeviceMethod(DeviceFunction[..., Any]):
    """A method of an actor, on the actor's device.

    Parameters
    ----------
    monitor
        Monitors the device.
    key
        The actor's key.
    devices
        Its devices; the first one is current.
    method
        The method.
    bring
        Called inside the device's scope, returns the method's arguments on the device; None leaves
        them where they are.
    """

    def __init__(
        self,
        monitor: Monitor,
        key: Hashable,
        devices: tuple[Device, ...],
        method: Callable[..., Any],
        bring: Bring | None,
    ) -> None:
        super().__init__(devices[0], method)
        self._monitor = monitor
        self._key = key
        self._device = devices[0]
        self._devices = devices
        self._bring = bring

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        with begins_with_the_task:
            call = monitored_method(self._monitor, self._key, self._device)
            if inspect.iscoroutinefunction(self.__wrapped__):
                return self._await(call, args, kwargs)
            with call:
                result = self._run(args, kwargs)
            return suspending.within(self._device, result)

    async def _await(
        self, call: MonitoredCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with begins_with_the_task:
            async with call:
                return await suspending.within(self._device, self._run_coroutine(args, kwargs))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._bring is not None:
            args, kwargs = self._bring((args, kwargs), self._devices)
        with Others(self._monitor, self._key, self._devices, is_method=True):
            return self.__wrapped__(*args, **kwargs)

    async def _run_coroutine(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with Others(self._monitor, self._key, self._devices, is_method=True):
            return await self._run(args, kwargs)
