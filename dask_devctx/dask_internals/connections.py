"""The connections on which a worker asks others, and what it asks for data on them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from distributed import Worker
from distributed.worker import get_data_from_worker
from distributed.worker_state_machine import RemoveReplicasEvent

Connect = Callable[..., Awaitable[Any]]


@contextmanager
def wrapped_connect(worker: Worker, wrap: Callable[[Connect], Connect]) -> Iterator[None]:
    """While it is open, a worker gets its connections to others by a function around its own."""
    pool = worker.rpc
    before = pool.connect
    pool.connect = ours = wrap(before)
    try:
        yield
    finally:
        if pool.connect is ours:
            pool.connect = before


@contextmanager
def answering(worker: Worker, handlers: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """While it is open, a worker answers messages that dask does not know."""
    worker.handlers.update(handlers)
    try:
        yield
    finally:
        for op, handler in handlers.items():
            if worker.handlers.get(op) == handler:
                del worker.handlers[op]


async def data_of(
    worker: Worker, address: str, keys: Sequence[Hashable], who: str | None
) -> Mapping[Hashable, Any]:
    """Ask another worker for values; what it does not have, or not now, is left out."""
    answer = await get_data_from_worker(worker.rpc, keys=keys, worker=address, who=who)
    found: Mapping[Hashable, Any] = answer.get("data", {})
    return found


def drop_replicas(worker: Worker, keys: Iterable[Hashable]) -> None:
    """Have a worker drop values that others have too, when no task needs them; not at once."""
    event = RemoveReplicasEvent(keys=list(keys), stimulus_id=f"devctx-{time.time()}")
    worker.loop.add_callback(worker.handle_stimulus, event)
