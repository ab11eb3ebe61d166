"""A cluster of local workers with hooks for its subclasses; it closes when it cannot start."""

from __future__ import annotations

import types
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

from distributed import LocalCluster
from distributed.core import Status
from distributed.deploy.spec import SpecCluster


class WatchedCluster(LocalCluster):  # type: ignore[misc]
    """A ``LocalCluster`` whose subclasses are told when its scheduler runs and a worker leaves."""

    _names_left_out = 0

    async def _scheduler_runs(self) -> None:
        """Called when the scheduler runs and there are no workers yet."""

    def _worker_left(self) -> None:
        """Called when a worker has left the scheduler."""

    def _scaling(self) -> AbstractContextManager[None]:
        """Return a context manager that is open while workers are started and closed."""
        return nullcontext()

    def _has_closed(self) -> None:
        """Called when the whole cluster is closed."""

    def _forget(self, name: object) -> None:
        """Let scaling replace a worker that is gone by one with another name."""
        if self.worker_spec.pop(name, None):
            self._names_left_out += 1  # dask still knows this name

    # -- dask's own

    def _new_worker_name(self, worker_number: int) -> Any:
        return super()._new_worker_name(worker_number + self._names_left_out)

    def _update_worker_status(self, op: str, msg: Any) -> None:
        # Some time after a worker was lost, dask closes its nanny if no worker of this name is
        # there at that moment. But the worker may have come back and been lost again just now. A
        # nanny that runs starts another worker by itself, so it stays open.
        if op == "remove":
            self._worker_left()
            if msg not in self.scheduler_info["workers"]:
                return  # dask has newer data from the scheduler, and would stop listening here
            name = self.scheduler_info["workers"][msg]["name"]
            if getattr(self.workers.get(name), "status", None) == Status.running:
                super(SpecCluster, self)._update_worker_status(op, msg)
                return
        super()._update_worker_status(op, msg)

    async def _start(self) -> None:
        await super()._start()
        await self._scheduler_runs()

    async def _correct_state_internal(self) -> None:
        with self._scaling():
            await super()._correct_state_internal()

    async def _close(self) -> None:
        await super()._close()
        self._has_closed()

    def __await__(self) -> Generator[Any, Any, Self]:
        return self._start_or_close().__await__()

    async def _start_or_close(self) -> Self:
        starting = self.status is Status.created  # a client also awaits a cluster that runs
        try:
            return await self._start_all()
        except BaseException:
            if starting:
                await self._close()  # dask leaves the scheduler and the other workers running
            raise

    @types.coroutine
    def _start_all(self) -> Generator[Any, Any, Self]:
        started: Self = yield from super().__await__()
        return started
