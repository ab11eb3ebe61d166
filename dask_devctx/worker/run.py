"""One execution of a task: what the worker calls in the task's place."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

from distributed import Reschedule

from dask_devctx import driver
from dask_devctx.cuda import suspending
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.on_device import known_as_the_tasks, note_devices
from dask_devctx.dask_internals.tasks import TaskStandIn
from dask_devctx.errors import DeviceFailedError, DeviceOutOfMemoryError
from dask_devctx.transfer import Stamp
from dask_devctx.worker.failures import guard
from dask_devctx.worker.failures.guard import Guard
from dask_devctx.worker.placement.admission import Claim
from dask_devctx.worker.tracebacks import begins_with_the_task, of_the_task, place_of
from dask_devctx.worker.values.use import Use

if TYPE_CHECKING:
    from dask_devctx.worker.runs import Runs

logger = logging.getLogger(__name__)


class Refused(TaskStandIn):
    """A task that got no device: it raises the reason."""

    __slots__ = ("error", "is_coro", "task")

    def __init__(self, task: Any, error: Exception) -> None:
        self.task = task
        self.error = error
        self.is_coro = False

    def __call__(self, data: Any = ()) -> Any:
        with begins_with_the_task:
            raise self.error

    def __reduce__(self) -> Any:
        return Refused, (self.task, self.error)


class DeviceRun(TaskStandIn, Claim):
    """A run of a task on its devices, which is its own claim on them; the first is current.

    It can be pickled, unless it asks for more than a slot. In another process, it runs on the
    device of the same UUID, unguarded, and its inputs stay as they are. A process that was forked
    after CUDA was initialized can use no device: there a task that asked for no device runs without
    one, and any other fails.
    """

    __slots__ = (
        *("asked_for", "began_at", "inputs_s", "is_again", "is_coro", "is_plain", "known"),
        *("left_devices", "made", "makes_actor", "memory_s", "once", "placed_at"),
        *("prefix", "queued", "reserved", "runs", "slots", "task", "thread", "ts", "watched"),
    )

    def __init__(
        self,
        runs: Runs,
        ts: Any,
        devices: tuple[Device, ...],
        share: int,
        nbytes: int,
        priority: tuple[Any, ...],
    ) -> None:
        # as Claim.__init__, which would be another call for each task
        self.key = ts.key
        self.devices = devices
        self.share = share
        self.nbytes = nbytes
        self.priority = priority
        self.any_device = self.held = self.waits = self.void = self.for_life = False
        self.call = self.granted = None
        self.runs = runs
        self.ts = ts
        self.task = ts.run_spec
        self.is_coro = self.task.is_coro
        self.prefix = ts.prefix
        # The answer of task_devices() inside.
        self.known = devices[0] if len(devices) == 1 else devices
        self.slots = 1.0  # of each device, for the choice of the next task's device
        self.is_plain = True  # it takes one slot, and none on other threads than the device's
        self.asked_for = False  # whether the user named the device
        self.watched = 0  # the number of its isolated run; 0 for any other
        self.once = ""  # why it does not run again after a device failed; "" if it may
        self.makes_actor = False
        # Whether it has to wait for its slot. If not, it has begun for dask, and runs although it
        # may have been cancelled a moment ago.
        self.queued = True
        self.made: Stamp | None = None
        self.is_again = False  # an attempt ran out of memory
        self.left_devices = False  # it seceded
        self.reserved: list[Device] = []
        self.placed_at = self.began_at = perf_counter()
        self.inputs_s = self.memory_s = 0.0
        self.thread: int | None = None

    def is_cancelled(self) -> bool:
        """Return whether dask has cancelled it; on any thread."""
        return bool(self.ts.state == "cancelled")

    def seceded(self) -> None:
        self.runs.seceded(self)

    def __call__(self, data: Any = ()) -> Any:
        if self.is_coro:
            return self._await(data)
        # On threads of the user's, a claim waits for its turn here.
        waits = not self.is_plain and not (self.held or self.void)
        try:
            if waits:
                there = threading.Event()
                self.granted = there.set
                self.runs.admission.submit(self)
                there.wait()
            steps = self._begin(inside=True)
            if self.nbytes:
                self._reserve()
            result = guard.run(steps, self.runs.monitor, functools.partial(self._call, data))
            self.for_life = self.makes_actor and self.held
        except BaseException as error:
            if isinstance(error, DeviceFailedError | DeviceOutOfMemoryError):
                self._name_place(error)
            error.__traceback__ = of_the_task(error)
            raise
        finally:
            if waits and not self.for_life:
                self.runs.admission.release(self)
        if isinstance(result, suspending.SUSPENDED):
            return suspending.within(self.devices[0], result)
        return result

    async def _await(self, data: Any) -> Any:
        with begins_with_the_task:
            if self.is_plain:
                return await self._guarded_coroutine(data)
            there, loop = asyncio.Event(), asyncio.get_running_loop()

            def grant() -> None:
                with suppress(RuntimeError):  # the loop is closed, so no task waits
                    loop.call_soon_threadsafe(there.set)

            self.granted = grant
            admission = self.runs.admission
            try:
                admission.submit(self)
                await there.wait()
                return await self._guarded_coroutine(data)
            finally:
                admission.withdraw(self)
                if not self.for_life:
                    admission.release(self)

    async def _guarded_coroutine(self, data: Any) -> Any:
        steps = self._begin(inside=False)
        if self.nbytes:
            await asyncio.to_thread(self._reserve)
        device, key = self.devices[0], self.key

        async def body() -> Any:
            ranges = self.runs.monitor.ranges
            with nullcontext() if ranges is None else ranges.of_process(key):
                return await suspending.within(device, self._call_coroutine(data))

        try:
            result = await guard.run_coroutine(steps, body)
        except (DeviceFailedError, DeviceOutOfMemoryError) as error:
            self._name_place(error)
            raise
        self.for_life = self.makes_actor and self.held
        return result

    def _begin(self, *, inside: bool) -> guard.Steps:
        """Return the steps around its call, which begins now."""
        if self.void or (self.queued and self.ts.state == "cancelled"):
            raise Reschedule  # dask ignores this, unless the task was requested again just now
        self.began_at, self.thread = perf_counter(), get_ident()
        return Guard(
            self.runs.monitor,
            self.key,
            self.devices,
            inside=inside,
            movable=not self.asked_for,
            watched=self.watched,
            once=self.once,
            is_cancelled=self.is_cancelled,
        ).steps()

    def _call(self, data: Any) -> Any:
        use = self._use(data)
        if use.away or use.wanted:
            use.wait()
        ranges = self.runs.monitor.ranges
        before = note_devices(self.known)
        try:
            with nullcontext() if ranges is None else ranges.on_thread(self.key), use:
                result = use.task(use.data)
                use.returned(result)
                self.made = use.made
        finally:
            note_devices(before)
            self.inputs_s = use.brought_s
            self.memory_s += use.waited_s
        return result

    async def _call_coroutine(self, data: Any) -> Any:
        use = self._use(data)
        await use.wait_elsewhere()
        before = note_devices(self.known)
        try:
            with use:
                result = await use.task(use.data)
                use.returned(result)
                self.made = use.made
        finally:
            note_devices(before)
            self.inputs_s = use.brought_s
            self.memory_s += use.waited_s
        return result

    def _use(self, data: Any) -> Use:
        runs = self.runs
        if self.is_again:
            self.memory_s = perf_counter() - self.began_at  # for the attempt before
        self.is_again = True
        return Use(runs.store, self.task, self.key, self.prefix, data, self.devices)

    def _reserve(self) -> None:
        """Spill values of others, until the bytes that it reserves are free on its devices."""
        store = self.runs.store
        if store is not None:
            for device in self.devices:
                store.spill.make_room(device, self.nbytes)
                self.reserved.append(device)

    def released(self) -> None:
        while self.reserved:
            self.runs.store.spill.give_room(self.reserved.pop(), self.nbytes)  # type: ignore[union-attr]

    def _name_place(self, error: Exception) -> None:
        place = place_of(getattr(self.task, "func", None))
        if place:
            error.add_note(f"This task calls {place}")

    def __reduce__(self) -> Any:
        if not self.is_plain:
            raise TypeError(
                "a task with the annotation devices, device_share or device_memory runs in its "
                "worker's process, and its executor is of other processes. Leave out the "
                "annotation 'executor', or name one device with dask.annotate(device=1)"
            )
        return functools.partial, (_run_elsewhere, self.task, self.devices[0], self.asked_for)


def _run_elsewhere(
    task: Callable[[Any], Any], device: Device, asked_for: bool, data: Any = ()
) -> Any:
    """Run a task in the process that unpickled it; return its result."""
    with begins_with_the_task:
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
