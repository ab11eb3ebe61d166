"""The scheduler's part of a report: workers that left, and tasks that no worker may run."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from distributed import Client, Scheduler

from dask_devctx.scheduler.counts import Counts
from dask_devctx.scheduler.routing import DeviceRouting

_LOST: Final = 5


def refuse_unusable(client: object, example: str) -> None:
    """Refuse an object that is no client, and a client that is closed."""
    name = example.partition("(")[0]
    if not isinstance(client, Client):
        raise TypeError(f"{name} takes a client of the cluster, as in {example}; got {client!r}")
    if client.status in ("closing", "closed"):
        raise ValueError(f"{name}: the client is closed. Make another: client = Client(address)")


async def of_scheduler(client: Client) -> Any:
    """Return the scheduler's part of a report; an empty one where it lacks this package."""
    try:
        found: Any = await client.run_on_scheduler(_read)
    except Exception:
        found = None
    return found or ({}, {}, [], {}, [])


async def now_and_before(client: Client) -> tuple[Any, dict[str, tuple[int, int]]] | None:
    """Return the scheduler's identity, and how many tasks ended on workers that left."""
    try:
        found: Any = await client.run_on_scheduler(_now_and_before)
    except OSError:  # no scheduler answers
        raise
    except Exception:
        return None
    identity, ended = found
    return identity, ended


def _now_and_before(dask_scheduler: Scheduler) -> tuple[Any, dict[str, tuple[int, int]]]:
    counts = _counts(dask_scheduler)
    past = {} if counts is None else counts.past
    ended = {uuid: (device.counts.done, device.counts.failed) for uuid, device in past.items()}
    return dask_scheduler.identity(n_workers=-1), ended


def _counts(scheduler: Scheduler) -> Counts | None:
    return getattr(scheduler.plugins.get(DeviceRouting.name), "counts", None)


def _read(dask_scheduler: Scheduler) -> Any:
    counts = _counts(dask_scheduler)
    if counts is None:
        return None
    unplaced: Counter[tuple[str, str]] = Counter()
    for ts in dask_scheduler.unrunnable:
        if ts.resource_restrictions:
            unplaced[ts.prefix.name, f"resources={ts.resource_restrictions}"] += 1
    failures = getattr(dask_scheduler.plugins[DeviceRouting.name], "failures", ())
    return (
        *(counts.past, counts.transfers, _lost(dask_scheduler, counts), dict(unplaced)),
        [(worker, at, *fields[:3], tuple(fields[4])) for worker, at, fields in failures],
    )


def _lost(scheduler: Scheduler, counts: Counts) -> list[tuple[Any, ...]]:
    """Return the fields of the latest workers that left unexpectedly."""
    found = [
        (at, event)
        for at, event in scheduler.get_events("all")
        if isinstance(event, dict) and event.get("action") == "remove-worker"
    ]
    return [
        (
            event["worker"],
            at,
            counts.used.get(event["worker"], ()),
            len(event["processing-tasks"]),
            len(event["lost-computed-tasks"]),
        )
        for at, event in found
        if not event["expected"]
    ][-_LOST:]
