"""A warning where tasks ask for devices and no worker of the cluster uses any.

It is there wherever this package is imported after distributed: nobody may have made a plugin.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import dask
from distributed import Client

from dask_devctx.annotations.names import NAMES, about_no_plugin
from dask_devctx.dask_internals.submits import around_each_call, in_a_task

_asked: WeakSet[Client] = WeakSet()


@contextmanager
def _asked_whether_heeded(
    client: Client, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Ask the workers for the plugin, once for each client, after a call with an annotation."""
    yield
    named = NAMES & dask.get_annotations().keys()
    if named and client not in _asked and not in_a_task():
        _asked.add(client)
        client.loop.add_callback(_ask, client, min(named))


async def _ask(client: Client, name: str) -> None:
    try:
        answers = await client.run(_has_plugin, on_error="ignore")
    except Exception:  # of a client or a scheduler that is closing
        return
    if answers and not any(answers.values()):
        warnings.warn(about_no_plugin(name), stacklevel=1)
    elif not answers:  # there are no workers yet: ask again after the next call
        _asked.discard(client)


def _has_plugin(dask_worker: Any) -> bool:
    return any(type(one).__name__ == "DevicePlugin" for one in dask_worker.plugins.values())


_has_plugin.__module__ = "__main__"  # sent by value, to workers without this package too
_watch = around_each_call(_asked_whether_heeded)
_watch.__enter__()
