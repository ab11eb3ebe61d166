"""Access to a worker: its handlers, metrics, actors, nanny, streams, plugins and data."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Final

from distributed import Client, Future, Worker, WorkerPlugin, as_completed, wait
from distributed.core import error_message
from distributed.utils import thread_state
from distributed.worker_state_machine import SecedeEvent

from dask_devctx.dask_internals import unsupported

_MISSING = object()
_patching = threading.RLock()  # a worker that was dropped may be collected meanwhile
# A child of dask's own: a worker shows its level INFO, as a line like dask's own.
workers_log = logging.getLogger("distributed.worker.dask_devctx")


@contextmanager
def replaced(entries: MutableMapping[str, Any], name: str, value: object) -> Iterator[None]:
    """While it is open, an entry has another value; one set meanwhile by others stays."""
    before = entries.get(name, _MISSING)
    entries[name] = value
    try:
        yield
    finally:
        if entries.get(name, _MISSING) == value:
            if before is _MISSING:
                del entries[name]
            else:
                entries[name] = before


@contextmanager
def patched(
    users: MutableMapping[Any, Any], key: Any, user: Any, *parts: tuple[Any, str, Any, Any]
) -> Iterator[None]:
    """While it is open, ``users`` has one more; while it has any, parts of dask are replaced.

    A part is the module or class that has it, its name, what takes its place, and dask's own.
    """
    with _patching:
        users[key] = user
        for owner, name, ours, _ in parts:
            setattr(owner, name, ours)
    try:
        yield
    finally:
        with _patching:
            if users.get(key) is user:
                del users[key]
            for owner, name, _, theirs in () if users else parts:
                setattr(owner, name, theirs)


def wrapped_handler(
    worker: Worker, op: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> AbstractContextManager[None]:
    """While it is open, a wrapper around a worker's handler answers a message.

    ``wrap`` returns a function: dask reads in the signature of the present handler what to pass.
    """
    before = worker.handlers[op]
    return replaced(worker.handlers, op, functools.update_wrapper(wrap(before), before))


@contextmanager
def metric(worker: Worker, name: str, function: Callable[[Worker], object]) -> Iterator[None]:
    """While it is open, a worker's heartbeat has a further metric."""
    # A heartbeat that is under way iterates over the dictionary, and waits in between for dask's
    # own metric of GPUs. If the dictionary changed meanwhile, dask would close the worker.
    before = {name: worker.metrics[name]} if name in worker.metrics else {}
    worker.metrics = {**worker.metrics, name: function}
    try:
        yield
    finally:
        kept = {one: value for one, value in worker.metrics.items() if value != function}
        worker.metrics = before | kept


def told_after(
    worker: Worker, op: str, call: Callable[..., object]
) -> AbstractContextManager[None]:
    """While it is open, a function gets each message of the scheduler's stream after dask.

    ``"remove-worker"`` names a worker that leaves, ``"free-keys"`` freed or cancelled keys.
    """
    before = worker.stream_handlers[op]

    def handled(**message: Any) -> None:
        before(**message)
        call(**message)

    return replaced(worker.stream_handlers, op, handled)


# -- actors


@contextmanager
def replaced_actors(worker: Worker, actors: dict[Hashable, Any]) -> Iterator[None]:
    """While it is open, a worker looks its actors up in another dictionary."""
    worker.state.actors = actors
    try:
        yield
    finally:
        worker.state.actors = dict(actors)


_CALL_ACTORS: Final = {
    inspect.unwrap(one).__code__ for one in (Worker.actor_execute, Worker.actor_attribute)
}


def calls_an_actor(frame: FrameType) -> bool:
    """Return whether the code in a frame calls an actor, or a method of an actor runs there."""
    return frame.f_code in _CALL_ACTORS or bool(getattr(thread_state, "actor", False))


# -- start


def set_up_at_start(worker: Worker, plugin: WorkerPlugin) -> None:
    """Set a plugin up while a worker starts; if that fails, the worker does not start."""
    if not hasattr(worker, "_pending_plugins"):
        raise unsupported("distributed.Worker._pending_plugins")
    # If the preload itself raised, dask would log the exception and continue.
    worker._pending_plugins = (*worker._pending_plugins, plugin)


def is_joining(worker: Worker) -> bool:
    """Return whether a worker has not joined its scheduler yet."""
    return not worker.periodic_callbacks["heartbeat"].is_running()


# -- end


def leave_nanny(worker: Worker) -> str | None:
    """Detach a worker from its nanny, which starts another one; return its address, or None."""
    # A scheduler tells a worker that it has removed to close, and that closes the nanny, too.
    nanny: str | None = worker.nanny
    worker.nanny = None
    worker.stream_handlers["close"] = ignored  # it is ending already
    worker.periodic_callbacks["heartbeat"].stop()
    return nanny


async def ignored(**message: object) -> None:
    """Answer a message with None."""


async def no_more_heartbeats(worker: Worker) -> None:
    """Stop a closing worker's heartbeats, and wait for the one under way: it would log an error."""
    heartbeat = worker.periodic_callbacks["heartbeat"]
    heartbeat.stop()
    file = inspect.getfile(type(heartbeat))  # of no other frame: `f_locals` keeps values alive
    frames = {task: getattr(task.get_coro(), "cr_frame", None) for task in asyncio.all_tasks()}
    beats = {task: f for task, f in frames.items() if f and f.f_code.co_filename == file}
    under_way = [task for task, f in beats.items() if f.f_locals.get("self") is heartbeat]
    if under_way:
        await asyncio.wait(under_way, timeout=1.0)  # one that closes the worker waits for this


async def unsettled(worker: Worker, keys: Collection[Hashable]) -> set[Hashable]:
    """Return the tasks, among ``keys``, that the scheduler still expects from a worker."""
    address = worker.contact_address
    processing = await worker.scheduler.processing(workers=[address])
    return set(keys) & set(processing.get(address, ()))


def report_error(worker: Worker, key: Hashable, error: Exception) -> None:
    """Tell the scheduler that a task erred, although the task's thread still runs."""
    ts = worker.state.tasks.get(key)
    if ts is not None and ts.state in ("executing", "long-running"):
        worker.batched_send(
            {
                **error_message(error),
                "op": "task-erred",
                "key": key,
                "run_id": ts.run_id,
                "thread": None,
                "startstops": (),
                "stimulus_id": _stimulus(),
            }
        )


async def leave_scheduler(worker: Worker, *, expected: bool) -> None:
    """Unregister a worker; unless ``expected``, dask counts the loss against the tasks there."""
    await worker.scheduler.unregister(
        address=worker.contact_address, expected=expected, stimulus_id=_stimulus()
    )


def _stimulus() -> str:
    return f"devctx-device-failed-{time.time()}"


# -- tasks that wait for tasks

_WAITS: Final = {
    one.__code__
    for one in (wait, as_completed.__next__, Client.gather, Future.result, Future.exception)
}


def waits_for_tasks(thread: int) -> bool:
    """Return whether a thread waits for results of tasks."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code not in _WAITS:
        frame = frame.f_back
    return frame is not None


def let_secede(worker: Worker, key: Hashable, ran_s: float) -> None:
    """Let a task secede for dask, which then gives the worker another one."""
    worker.handle_stimulus(SecedeEvent(key=key, compute_duration=ran_s, stimulus_id=_stimulus()))


# -- data


@contextmanager
def replaced_data(
    worker: Worker,
    data: MutableMapping[Any, Any],
    unwrap: Callable[[], MutableMapping[Any, Any]],
) -> Iterator[None]:
    """While it is open, a worker keeps its data in another mapping."""
    worker.memory_manager.data = worker.state.data = data
    try:
        yield
    finally:
        worker.memory_manager.data = worker.state.data = unwrap()


# The value in dask's own configuration: another value is the user's.
_MESSAGE_NBYTES = 50_000_000


@contextmanager
def messages_of(worker: Worker, nbytes: int) -> Iterator[None]:
    """While it is open, a worker asks for so many bytes at once, unless the user set a limit."""
    before = worker.state.transfer_message_bytes_limit
    if before == _MESSAGE_NBYTES:
        worker.state.transfer_message_bytes_limit = nbytes
    try:
        yield
    finally:
        worker.state.transfer_message_bytes_limit = before
