"""A scheduler's own parts: its messages, a task's restrictions and annotations, its transitions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from typing import Any

from distributed import Scheduler, SchedulerPlugin, WorkerPlugin
from distributed.metrics import time
from distributed.protocol.pickle import dumps


async def add_plugin(scheduler: Scheduler, plugin: SchedulerPlugin) -> None:
    """Give a scheduler of this process a plugin, in the place of one of its name."""
    await scheduler.register_scheduler_plugin(plugin, idempotent=False)


async def add_worker_plugin(scheduler: Scheduler, plugin: WorkerPlugin) -> None:
    """Give a plugin to all workers of a scheduler of this process, now and while they join."""
    await scheduler.register_worker_plugin(None, dumps(plugin), name=plugin.name, idempotent=False)


def answer(scheduler: Scheduler, handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer further messages."""
    scheduler.handlers.update(handlers)


def answer_no_more(scheduler: Scheduler, ops: Iterable[str]) -> None:
    """Answer these messages no more."""
    for op in ops:
        scheduler.handlers.pop(op, None)


def resolved(scheduler: Scheduler, address: str) -> str:
    """Return an address as the scheduler writes it."""
    return scheduler.coerce_address(address)  # type: ignore[no-any-return]


def addresses_at(scheduler: Scheduler, host: str) -> set[str]:
    """Return the addresses of the workers on a host."""
    found = scheduler.host_info.get(scheduler.coerce_hostname(host))
    return set(found["addresses"]) if found else set()


def restrict(
    ts: Any, workers: set[str] | None, hosts: Set[str] | None, *, loose: bool = False
) -> None:
    """Let a task run on certain workers and hosts only; ``loose`` makes that a preference.

    dask never changes the set of workers, and an empty one restricts nothing: many tasks may share
    one, and what is changed in it holds for all of them.
    """
    ts.worker_restrictions, ts.host_restrictions = workers, hosts
    ts.loose_restrictions = loose


def restrictions(ts: Any) -> tuple[set[str] | None, set[str] | None, bool]:
    """Return the workers and the hosts that a task is restricted to, and whether loosely."""
    return ts.worker_restrictions, ts.host_restrictions, bool(ts.loose_restrictions)


def set_annotations(ts: Any, annotations: Mapping[str, Any] | None) -> None:
    """Give a task other annotations."""
    ts.annotations = annotations


def annotate(ts: Any, name: str, value: object) -> None:
    """Add an annotation to a task."""
    # Another dictionary: one may belong to many tasks.
    ts.annotations = {**(ts.annotations or {}), name: value}


def schedule_again(scheduler: Scheduler, tasks: Iterable[Any]) -> None:
    """Look for workers again for those tasks that wait for one, the most urgent first."""
    moves: dict[Hashable, str] = {}
    for ts in sorted(tasks, key=_priority, reverse=True):  # dask takes the last first
        if ts.state == "no-worker":
            moves[ts.key] = "processing"
        elif ts.state == "queued" and (ts.worker_restrictions or ts.host_restrictions):
            moves[ts.key] = "released"  # only tasks without restrictions may be queued
    if moves:
        scheduler.transitions(moves, stimulus_id=f"devctx-{time()}")


def _priority(ts: Any) -> Any:
    return ts.priority
