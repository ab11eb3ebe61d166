"""One execution of a task, on its devices or without one: what the worker calls in its place."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from distributed import Reschedule

from dask_devctx.cuda import suspending
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.on_device import known_as_the_tasks
from dask_devctx.cuda.out_of_memory import clear_frames
from dask_devctx.cuda.scope import Restored, is_any_current
from dask_devctx.dask_internals.tasks import TaskStandIn
from dask_devctx.transfer import walk
from dask_devctx.worker.guard import Guard
from dask_devctx.worker.placement.admission import Claim
from dask_devctx.worker.tracebacks import BeginsWithTheTask, begins_with_the_task
from dask_devctx.worker.values.use import Use
from dask_devctx.worker.values.value import Value

if TYPE_CHECKING:
    from dask_devctx.worker.execute import Runs

# NVTX ranges have the keys of tasks; Nsight Systems shows them on the devices' threads.
_DOMAIN: Final = "dask"


class Refused(TaskStandIn):
    """A task that got no device: it raises the reason."""

    is_coro = False

    def __init__(self, task: Any, error: Exception) -> None:
        self.task = task
        self.error = error

    def __call__(self, data: Any) -> Any:
        data.clear()  # dask keeps an error's frames, and what they hold, until a collection
        with begins_with_the_task:
            raise self.error


class _Run(TaskStandIn):
    """A run of a task, with its inputs.

    It can be pickled. In another process, it runs on the device of the same UUID if it has one,
    unguarded, and its inputs stay as they are.
    """

    devices: tuple[Device, ...] = ()
    known: Device | tuple[Device, ...] = ()  # the answer of task_devices() inside
    theirs = False  # whether it runs on an executor of the user's own
    inputs_s = memory_s = 0.0
    room: Mapping[Device, int] = {}  # the bytes that it has reserved for its result
    runs: Runs

    def _call(self, data: Any) -> Any:
        nvtx, use = self.runs.nvtx, Use(self, data)
        if use.away or use.wanted:
            use.wait()
        if nvtx is None:
            with use:
                return use.returned(use.task(use.data))
        with nvtx.annotate(str(self.key), domain=_DOMAIN), use:
            return use.returned(use.task(use.data))

    async def _call_coroutine(self, data: Any) -> Any:
        use = Use(self, data)
        await use.wait_elsewhere()
        with use:
            return use.returned(await use.task(use.data))

    def __reduce__(self) -> Any:
        scope = self.devices[0] if self.devices else nullcontext()
        return functools.partial, (_run_elsewhere, self.task, scope, self.known)


def _run_elsewhere(task: Any, scope: Any, known: Any, data: Any = ()) -> Any:
    """Run a task in the process that unpickled it; return its result."""
    with begins_with_the_task, known_as_the_tasks(known):
        return suspending.call(scope, task, data)


class DeviceRun(_Run, Claim, Guard):
    """A run of a task on its devices, which is its own claim on them; the first is current."""

    is_task = True
    is_plain = True  # it takes one slot, and none as a coroutine or on threads of the user's
    not_again = ""

    def __init__(
        self, runs: Runs, ts: Any, devices: tuple[Device, ...], priority: tuple[Any, ...]
    ) -> None:
        # as those of its bases, which would be another call for each task
        self.key = ts.key
        self.devices = devices
        self.share = runs.admission.slot
        self.priority = priority
        self.runs = runs
        self.monitor = runs.monitor
        self.ts = ts
        self.task = ts.run_spec
        self.may_hold_arrays = walk.few(self.task, walk.AT_MOST) != []  # beside its inputs
        self.is_coro = self.task.is_coro
        self.prefix = ts.prefix
        self.known = devices[0] if len(devices) == 1 else devices
        self.placed_at = self.began_at = perf_counter()

    def seceded(self) -> None:
        self.aside, self.until = True, 0.0  # it may wait for others, which have its turn now
        self.monitor.worker.loop.add_callback(self.runs.placement.remove, self)

    async def _await(self, data: Any) -> Any:
        admission = self.runs.admission
        with begins_with_the_task:
            try:
                if not self.is_plain:
                    there, loop = asyncio.Event(), asyncio.get_running_loop()

                    def grant() -> None:
                        with suppress(RuntimeError):  # the loop is closed, so no task waits
                            loop.call_soon_threadsafe(there.set)

                    self.granted = grant
                    admission.submit(self)
                    await there.wait()
                return await super()._await(data)
            finally:
                admission.withdraw(self)
                admission.release(self)


class HostRun(_Run, BeginsWithTheTask):
    """A run of a task without a device: nothing is current while it runs, and nothing stays so.

    Libraries that copy an input to the host begin to use CUDA's first device where none is current.
    So a task whose inputs are on devices has ``runs.landing``, unless the worker uses the first.
    """

    def __init__(self, runs: Runs, ts: Any) -> None:
        self.runs = runs
        self.key = ts.key
        self.task = ts.run_spec
        self.is_coro = self.task.is_coro

    def __call__(self, data: Any) -> Any:
        self._data = data
        if self.is_coro:
            return self._in_scope(data)
        with self, self._scope(data):
            return self._call(data)

    async def _in_scope(self, data: Any) -> Any:
        with self:
            return await suspending.awaiting(self._scope(data), self._call_coroutine(data))

    def _scope(self, data: Any) -> AbstractContextManager[Any]:
        if self.theirs and not self.is_coro and is_any_current():
            return Restored()  # a context that is current on the user's threads stays so
        landing = self.runs.landing
        if landing is None or all(one.__class__ is not Value for one in dict(data).values()):
            return Restored(empty=True)
        return Restored(empty=True) if self.runs.monitor.has_failed() else landing

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            clear_frames(error)
            self._data.clear()  # as that of a refused task
        if isinstance(error, Exception) and self.runs.monitor.has_failed():
            raise Reschedule from error  # the device that failed may have its inputs
        super().__exit__(kind, error, traceback)
