"""One task of dask's on its device: what the worker calls in the task's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dask_devctx import tasks
from dask_devctx.device import Device
from dask_devctx.pools import submitting


class PinnedTask:
    """A task that enters its device, runs, and leaves it.

    Parameters
    ----------
    task
        The task itself, a callable of its inputs' values by key.
    device
        Its device, or the error with which it is to fail.
    priority
        Dask's priority of it; the least runs first.
    call
        Calls it on the device; whatever watches over the task is in here. It stays behind where the
        task is sent to another process.

    Notes
    -----
    Stands in for dask's ``GraphNode`` while the worker executes it, and has its attributes. It can
    be pickled, so that it runs in another process on a device of the same UUID there.
    """

    def __init__(
        self,
        task: Callable[[Any], Any],
        device: Device | Exception,
        priority: tuple[int, ...] | None = None,
        call: Callable[[Device, Callable[[Any], Any], Any], Any] = tasks.call,
    ) -> None:
        self.task = task
        self.device = device
        self.priority = priority
        self.call = call

    def __call__(self, data: Any = ()) -> Any:
        if isinstance(self.device, Exception):
            raise self.device
        return self.call(self.device, self.task, data)

    @property
    def is_coro(self) -> bool:
        """Whether the task is a coroutine function's.

        The worker asks this in the context in which it then submits the task to a pool, which is
        how the pool learns of its priority.
        """
        submitting.set(self.priority)
        return bool(self.task.is_coro)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.task, name)

    def __repr__(self) -> str:
        return repr(self.task)

    def __reduce__(self) -> Any:
        return PinnedTask, (self.task, self.device)
