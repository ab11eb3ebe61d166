"""A client's warning of annotations that nobody heeds.

The calls are watched wherever this package is imported after distributed.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import dask
from distributed import Client, get_worker

from dask_devctx.annotations import NAMES, about_no_plugin

_asked: WeakSet[Client] = WeakSet()


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Client, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        _after(self)
        return found

    return call


def _in_a_task() -> bool:
    """Return whether a task, an actor's method or a function of ``client.run`` runs here."""
    try:
        get_worker()
    except ValueError:
        return False
    return True


def _after(client: Client) -> None:
    given = NAMES & dask.get_annotations().keys()
    if given and client not in _asked and not _in_a_task():
        _asked.add(client)
        client.loop.add_callback(_ask, client, min(given))


async def _ask(client: Client, name: str) -> None:
    """Warn if no worker has the plugin; asked once for each client that has workers."""
    try:
        heeded = await client.run_on_scheduler(_is_heeded)
    except Exception:  # of a client or a scheduler that is closing
        return
    if heeded is None:
        _asked.discard(client)
    elif not heeded:
        warnings.warn(about_no_plugin(name), stacklevel=1)


def _is_heeded(dask_scheduler: Any) -> bool | None:
    known = {*dask_scheduler.plugins, *dask_scheduler.worker_plugins}
    for worker in dask_scheduler.workers.values():
        known.update(worker.metrics)
    # The routing warns by itself.
    return not known.isdisjoint({"devctx", "devctx-routing"}) if dask_scheduler.workers else None


_is_heeded.__module__ = "__main__"  # sent by value, to a scheduler without this package too
for _name in ("submit", "map", "compute", "persist", "get"):
    setattr(Client, _name, _watched(getattr(Client, _name)))
