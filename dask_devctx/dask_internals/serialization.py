"""Serializers in distributed's registries, and tasks that are unpickled on their own thread.

dask unpickles a task with its arguments as it reads the scheduler's message. An error there, such
as one of device memory, ends the stream, and the worker with it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

from distributed import Worker
from distributed.protocol import core, pickle

from dask_devctx.dask_internals.worker import replaced

# The module of a task's class is the first name in its pickle.
_OF_A_TASK: Final = b"dask._task_spec"
_lock = threading.Lock()
_users: list[Callable[[BaseException], bool]] = []


class LateTask:
    """A pickled task in the place of the task: each call unpickles it first."""

    __slots__ = ("buffers", "key", "pickled")

    is_coro = False
    func = None

    def __init__(self, pickled: Any, buffers: Any) -> None:
        self.key: Hashable = None
        self.pickled = bytes(pickled)
        self.buffers = [bytes(buffer) for buffer in buffers]

    def __call__(self, data: Any = ()) -> Any:
        task = _unpickled(self.pickled, self.buffers)
        return asyncio.run(task(data)) if task.is_coro else task(data)

    def __reduce__(self) -> Any:
        return _unpickled, (self.pickled, self.buffers)

    def __repr__(self) -> str:
        return f"<LateTask {self.key!r}>"


def _unpickled(pickled: bytes, buffers: list[bytes]) -> Any:
    return pickle.loads(pickled, buffers=buffers)


@contextmanager
def unpickled_later(
    worker: Worker, is_out_of_memory: Callable[[BaseException], bool]
) -> Iterator[None]:
    """While it is open, a task whose arguments find no memory arrives at a worker as a LateTask."""
    compute = worker.stream_handlers["compute-task"]

    def named(*, key: Hashable, run_spec: Any = None, **message: Any) -> None:
        if isinstance(run_spec, LateTask):
            run_spec.key = key
        compute(key=key, run_spec=run_spec, **message)

    with replaced(worker.stream_handlers, "compute-task", named):
        with _lock:
            _users.append(is_out_of_memory)
            core.pickle = SimpleNamespace(dumps=pickle.dumps, loads=_loads)
        try:
            yield
        finally:
            with _lock:
                _users.remove(is_out_of_memory)
                if not _users:
                    core.pickle = pickle


def _loads(pickled: Any, *, buffers: Any = ()) -> Any:
    try:
        return pickle.loads(pickled, buffers=buffers)
    except Exception as error:
        if _OF_A_TASK in bytes(pickled[:100]) and any(ours(error) for ours in _users):
            return LateTask(pickled, buffers)
        raise


def register_instead(registry: Any, kind: type, serialize: Callable[..., Any]) -> None:
    """Register a function for a type, and for its subclasses that used the type's old function."""
    found = registry._lookup  # dispatching runs lazy registrations, and this may be one
    theirs = found[kind]
    for each in [each for each, known in found.items() if known is theirs]:
        registry.register(each, serialize)
