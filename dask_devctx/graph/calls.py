"""A client's warnings of annotations that go astray.

The calls are watched wherever this package is imported after distributed.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakSet

import dask
from distributed import Client, get_worker

from dask_devctx.annotations import NAMES, about_no_plugin
from dask_devctx.cuda.scope import open_scopes

_NOT_THE_USERS: Final = frozenset({"contextlib", "dask", "dask_devctx", "distributed", "functools"})

_asked: WeakSet[Client] = WeakSet()


def users_level() -> int:
    """Return the ``stacklevel`` with which a warning of the caller points at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    return level


def _watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Client, *args: Any, **kwargs: Any) -> Any:
        _before(self, name, args)
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


def _before(client: Client, name: str, args: tuple[Any, ...]) -> None:
    """Warn of an open scope, which the tasks of a call know nothing of."""
    scopes = open_scopes()
    if not scopes or not NAMES.isdisjoint(dask.get_annotations()) or _in_a_task():
        return
    device = getattr(getattr(scopes[-1], "device", scopes[-1]), "device_id", None)
    if device is None or (args and getattr(type(args[0]), "carries_device", False)):
        return
    warnings.warn(
        f"the scope of cuda:{device} is open, but client.{name} runs its tasks on any device: a "
        f"scope is for code that runs here. Write with dask.annotate(device={device}): "
        f'client.{name}(...), or device="auto" where any device is right',
        stacklevel=users_level(),
    )


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
    setattr(Client, _name, _watched(_name, getattr(Client, _name)))
