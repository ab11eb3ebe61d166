"""Values that could not be read when they arrived: the tasks that need them fail with the error.

With dask alone, such a task waits without end (distributed's issue 6705).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from distributed import Worker
from distributed.comm import CommClosedError

from dask_devctx.dask_internals.connections import drop_replicas


class Unreadable:
    """Stands for a value that could not be read.

    Parameters
    ----------
    error
        The error of reading it.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return Unreadable, (self.error,)

    def __repr__(self) -> str:
        return f"<a value that could not be read: {self.error!r}>"


class UnreadableValues:
    """The unreadable values of one worker; fails the tasks that need them.

    Parameters
    ----------
    worker
        The worker.
    has_failed
        Returns whether a device of the worker has failed, so that the worker ends.
    """

    def __init__(self, worker: Worker, has_failed: Callable[[], bool] = lambda: False) -> None:
        self._worker = worker
        self._has_failed = has_failed
        self._errors: dict[Hashable, Exception] = {}

    def __bool__(self) -> bool:
        return bool(self._errors)

    def add(self, key: Hashable, error: Exception, sender: str) -> Unreadable:
        """Note that a value could not be read; return an object that stands for it.

        Raises
        ------
        CommClosedError
            A device here failed. The value is well, and another worker can read it.
        """
        error = error.with_traceback(None)
        if self._has_failed():
            raise CommClosedError(f"{key!r} from {sender} could not be read: {error}") from error
        error.add_note(f"{key!r} could not be read when it arrived from {sender}")
        self._errors[key] = error
        return Unreadable(error)

    def check(self, ts: Any) -> None:
        """Raise the error of a task's unreadable input, if there is one."""
        for dep in ts.dependencies:
            error = self._errors.get(dep.key)
            if error is not None and isinstance(self._worker.data.get(dep.key), Unreadable):
                raise error

    def forget(self, key: Hashable) -> None:
        """Forget the unreadable value of a key."""
        self._errors.pop(key, None)

    def let_go(self, ts: Any) -> None:
        """Drop the unreadable inputs of a task that failed, so that the worker asks again later."""
        keys = [dep.key for dep in ts.dependencies if dep.key in self._errors]
        if keys:
            drop_replicas(self._worker, keys)


def without_unreadable(data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
    """Return the readable values of an answer; for the rest, the receiver asks other workers."""
    return {
        key: value
        for key, value in data.items()
        if not isinstance(getattr(value, "data", None), Unreadable)
    }
