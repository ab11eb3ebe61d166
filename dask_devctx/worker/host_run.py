"""One execution of a task without a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from distributed import Reschedule

from dask_devctx.cuda import suspending
from dask_devctx.cuda.scope import NothingCurrent, Restored, is_any_current
from dask_devctx.dask_internals.tasks import TaskStandIn
from dask_devctx.worker.tracebacks import begins_with_the_task
from dask_devctx.worker.values.use import Use
from dask_devctx.worker.values.value import Value

if TYPE_CHECKING:
    from dask_devctx.worker.runs import Runs


class HostRun(TaskStandIn):
    """A run of a task without a device: nothing is current while it runs, and nothing stays so.

    Libraries that copy an input to the host begin to use CUDA's first device where none is current.
    So a task whose inputs are on devices has the device ``landing``; None where the worker uses the
    first device anyway.
    """

    __slots__ = ("is_coro", "key", "landing", "runs", "task", "theirs")

    def __init__(self, runs: Runs, ts: Any, *, theirs: bool) -> None:
        self.runs = runs
        self.key = ts.key
        self.task = ts.run_spec
        self.is_coro = self.task.is_coro
        self.landing = runs.landing
        self.theirs = theirs  # it runs on an executor of the user's own

    def __call__(self, data: Any = ()) -> Any:
        if self.is_coro:
            return self._in_scope(data)
        with begins_with_the_task, self._scope(data):
            use = self._use(data)
            if use.away or use.wanted:
                with self._elsewhere_after_failure():
                    use.wait()
            with use:
                return self.task(use.data)

    async def _in_scope(self, data: Any) -> Any:
        with begins_with_the_task:
            return await suspending.awaiting(self._scope(data), self._await(data))

    async def _await(self, data: Any) -> Any:
        use = self._use(data)
        with self._elsewhere_after_failure():
            await use.wait_elsewhere()
        with use:
            return await self.task(use.data)

    def _scope(self, data: Any) -> AbstractContextManager[Any]:
        if self.theirs and not self.is_coro and is_any_current():
            return Restored()  # a context that is current on the user's threads stays so
        if self.landing is not None and any(one.__class__ is Value for one in dict(data).values()):
            return NothingCurrent() if self.runs.monitor.has_failed() else self.landing
        return NothingCurrent()

    def _use(self, data: Any) -> Use:
        return Use(self.runs.store, self.task, self.key, "", data, ())

    @contextmanager
    def _elsewhere_after_failure(self) -> Iterator[None]:
        """If an input cannot be restored since a device failed, run the task on another worker."""
        try:
            yield
        except Exception as error:
            if self.runs.monitor.has_failed():
                raise Reschedule from error
            raise

    def __reduce__(self) -> Any:
        return _itself, (self.task,)


def _itself(task: Any) -> Any:
    return task
