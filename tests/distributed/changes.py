"""Finds the changes on a worker, in its process and on its machine since some moment."""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

from distributed import Worker
from distributed.shuffle import _rechunk
from distributed.threadpoolexecutor import ThreadPoolExecutor
from tornado.ioloop import PeriodicCallback

from dask_devctx import driver

_PROCESS_WIDE = (ThreadPoolExecutor, _rechunk)


def changes_of(worker: Worker) -> Callable[[], dict[str, tuple[Any, Any]]]:
    """Return a function that tells what has changed of a worker, by name: before and now."""
    before = _state(worker)

    def changes() -> dict[str, tuple[Any, Any]]:
        now = _state(worker)
        return {name: (was, now[name]) for name, was in before.items() if was != now[name]}

    return changes


def _state(worker: Worker) -> dict[str, Any]:
    state = {
        "handlers": dict(worker.handlers),
        "stream handlers": dict(worker.stream_handlers),
        "executors": dict(worker.executors),
        "what the executors do with a task": {
            name: getattr(executor, "submit", None) for name, executor in worker.executors.items()
        },
        "metrics": dict(worker.metrics),
        "logs": list(logging.getLogger("dask_devctx").handlers),
        "extensions": dict(worker.extensions),
        "nanny": worker.nanny,
        "periodic callbacks": dict(worker.periodic_callbacks),
        "bytes of a message": worker.state.transfer_message_bytes_limit,
        "actors": (type(worker.state.actors), dict(worker.state.actors)),
        "tasks": {
            key: (type(ts.run_spec), ts.annotations) for key, ts in worker.state.tasks.items()
        },
        "plugins": {name: vars(plugin).copy() for name, plugin in worker.plugins.items()},
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("devctx")),
        "current context": driver.backend().current_context(),
        "switch interval": sys.getswitchinterval(),
        "classes": {
            (kind, name): value
            for kind in (*type(worker).__mro__, type(worker.state), *_PROCESS_WIDE, *_frames())
            for name, value in vars(kind).items()
            if callable(value)
        },
        "running callbacks": sum(
            isinstance(thing, PeriodicCallback)
            and thing.is_running()
            and "dask_devctx" in (getattr(thing.callback, "__module__", None) or "")
            for thing in gc.get_referrers(PeriodicCallback)  # its instances among them
        ),
    }
    data = worker.data
    state["data"] = type(data), type(worker.state.data)
    for name in ("weight", "slow_to_fast_callbacks"):
        state[f"data.{name}"] = _copied(getattr(data, name, None))
    fast = getattr(data, "fast", None)
    for name in ("weight", "on_evict"):
        state[f"data.fast.{name}"] = _copied(getattr(fast, name, None))
    return state


def _frames() -> tuple[type, ...]:
    module = sys.modules.get("dask.dataframe.dask_expr._collection")
    return () if module is None else (module.FrameBase,)


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value
