"""A worker's connections to other workers, and its requests for data on them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from distributed import Status, Worker
from distributed.worker import get_data_from_worker
from distributed.worker_state_machine import RemoveReplicasEvent

Connect = Callable[..., Awaitable[Any]]


@contextmanager
def wrapped_connect(worker: Worker, wrap: Callable[[Connect], Connect]) -> Iterator[None]:
    """While it is open, a wrapper makes a worker's connections to other workers."""
    pool = worker.rpc
    before = pool.connect
    pool.connect = ours = wrap(before)
    try:
        yield
    finally:
        if pool.connect is ours:
            pool.connect = before


@contextmanager
def answering(
    worker: Worker, handlers: Mapping[str, Callable[..., Any]], *, to_the_end: bool = False
) -> Iterator[None]:
    """While it is open, a worker answers messages that dask does not know.

    Parameters
    ----------
    worker
        The worker.
    handlers
        Its answers.
    to_the_end
        Whether a worker that closes still gives these answers. Otherwise, it answers None then:
        others do not know yet that it leaves, and dask would log each question as a mistake.
    """
    worker.handlers.update(handlers)
    try:
        yield
    finally:
        leaving = worker.status is Status.closing
        for op, handler in handlers.items():
            if worker.handlers.get(op) != handler or (leaving and to_the_end):
                continue
            if leaving:
                worker.handlers[op] = _no_answer
            else:
                del worker.handlers[op]


async def _no_answer(**message: object) -> None:
    pass


async def data_of(
    worker: Worker, address: str, keys: Sequence[Hashable], who: str | None
) -> Mapping[Hashable, Any]:
    """Return values of another worker, without those that it cannot send or does not have."""
    answer = await get_data_from_worker(worker.rpc, keys=keys, worker=address, who=who)
    found: Mapping[Hashable, Any] = answer.get("data", {})
    return found


def drop_replicas(worker: Worker, keys: Iterable[Hashable]) -> None:
    """Let a worker drop, later, values that other workers have too and that no task needs."""
    event = RemoveReplicasEvent(keys=list(keys), stimulus_id=f"devctx-{time.time()}")
    worker.loop.add_callback(worker.handle_stimulus, event)
