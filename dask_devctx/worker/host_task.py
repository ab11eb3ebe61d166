"""A task without a device, as the worker calls it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from distributed import Reschedule

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.scope import NothingCurrent, Restored, is_any_current
from dask_devctx.cuda.suspending import awaiting
from dask_devctx.dask_internals.tasks import TaskStandIn
from dask_devctx.transfer import Stamp, nbytes_by_device
from dask_devctx.worker.memory.kept import Kept
from dask_devctx.worker.memory.manager import DeviceMemory
from dask_devctx.worker.tracebacks import begins_with_the_task
from dask_devctx.worker.values.use import Use


class HostTask(TaskStandIn):
    """A task without a device: nothing is current while it runs, and nothing stays current.

    Parameters
    ----------
    task
        The task.
    landing
        The device that is current for a task whose inputs are on devices: libraries that copy an
        input to the host begin to use CUDA's first device otherwise. None where the worker uses the
        first device anyway.
    memory
        The manager of the device memory, if values may be in host memory: the task gets the values
        themselves.
    has_failed
        Returns whether a device of the worker has failed. Where an input cannot come back for that
        reason, the task runs on another worker.
    """

    __slots__ = ("_after", "_theirs", "has_failed", "landing", "memory")

    def __init__(
        self,
        task: Callable[[Any], Any],
        landing: Device | None = None,
        memory: DeviceMemory | None = None,
        has_failed: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(task)
        self.landing = landing
        self.memory = memory
        self.has_failed = has_failed
        self._after: Sequence[Stamp] = ()
        self._theirs = False

    def reads_after(self, stamps: Sequence[Stamp], *, theirs: bool) -> None:
        """Let the task's thread read the inputs after some work; call it on the event loop.

        Parameters
        ----------
        stamps
            Stamps of the work that makes the inputs.
        theirs
            Whether the task runs on an executor of the user's own. If a context is current on its
            threads, it stays so. If it is for processes, they get inputs that this one has read.
        """
        self._after, self._theirs = stamps, theirs
        if theirs:
            self._hold_back(stamps)

    def __call__(self, data: Any = ()) -> Any:
        if self.task.is_coro:  # type: ignore[attr-defined]
            return self._in_scope(data)
        with begins_with_the_task, self._scope(data), self._use(data) as inputs:
            return self.task(inputs)

    async def _in_scope(self, data: Any) -> Any:
        with begins_with_the_task:
            return await awaiting(self._scope(data), self._await(data))

    async def _await(self, data: Any) -> Any:
        use = self._begun(data)
        if use is not None and use.waits:  # on another thread: this one runs the event loop
            with self._elsewhere_after_failure():
                await asyncio.to_thread(use.wait)
        with nullcontext() if use is None else use:
            return await self.task(data if use is None else use.data)

    def _scope(self, data: Any) -> AbstractContextManager[Any]:
        if self._theirs and not self.task.is_coro and is_any_current():  # type: ignore[attr-defined]
            return Restored()
        if self.landing is not None and any(map(self._is_on_a_device, dict(data).values())):
            return NothingCurrent() if self.has_failed() else self.landing
        return NothingCurrent()

    def _is_on_a_device(self, value: object) -> bool:
        if self.memory is not None:
            return value.__class__ is Kept
        return bool(nbytes_by_device(value))

    @contextmanager
    def _use(self, data: Any) -> Iterator[Any]:
        """While it is open, the inputs stay where they are; yields them."""
        use = self._begun(data)
        if use is None:
            yield data
            return
        with self._elsewhere_after_failure():
            use.wait()
        with use:
            yield use.data

    def _begun(self, data: Any) -> Use | None:
        # Here, and not on the event loop: the driver waits where a stream is full.
        after, self._after = self._after, ()
        self._hold_back(after)
        if self.memory is None or not data:
            return None
        return Use(None, self.memory, self.task, self.key, "", data, {}, ())

    @contextmanager
    def _elsewhere_after_failure(self) -> Iterator[None]:
        """Let the task run on another worker if its inputs cannot come back to a failed device."""
        try:
            yield
        except Exception as error:
            if self.has_failed():
                raise Reschedule from error
            raise

    @staticmethod
    def _hold_back(stamps: Sequence[Stamp]) -> None:
        for stamp in stamps:
            stamp.hold_back_readers()
