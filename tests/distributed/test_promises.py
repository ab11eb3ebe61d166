"""dask's promises to its users stay true on workers that preload the plugin."""

from __future__ import annotations

from typing import Any

import dask
import pytest
from distributed import (
    Event,
    Nanny,
    get_worker,
    wait,
    worker_client,
)
from distributed.utils_test import async_poll_for, inc

from tests.distributed.devices import on_cluster


def promise(*nthreads: int, config: dict[str, Any] | None = None, **how: Any) -> Any:
    """A test on a cluster, by default of two workers, that have the plugin."""
    settings = {**(config or {}), "distributed.worker.preload": ["dask_devctx"]}
    return on_cluster(*nthreads or (2, 2), config=settings, **how)


def _fibonacci(n: int) -> int:
    if n < 2:
        return n
    with worker_client() as client:
        parts = client.map(_fibonacci, [n - 1, n - 2])
        return sum(client.gather(parts))


@promise(1, 1)
async def test_tasks_that_make_tasks(client: Any) -> None:
    assert await client.submit(_fibonacci, 6) == 8


ran: list[str] = []


@promise(1, config={"distributed.scheduler.worker-saturation": float("inf")})
async def test_priorities(client: Any, worker: Any) -> None:
    ran.clear()
    event = Event("go")
    blocked = client.submit(lambda: Event("go").wait(), priority=100)
    low = [client.submit(_record, f"low-{i}", priority=-1) for i in range(3)]
    high = [client.submit(_record, f"high-{i}", priority=1) for i in range(3)]
    await async_poll_for(lambda: len(worker.state.ready) == 6, timeout=10)
    await event.set()
    await wait([blocked, *low, *high])
    assert [name.partition("-")[0] for name in ran] == ["high"] * 3 + ["low"] * 3


def _record(name: str) -> None:
    ran.append(name)


@promise()
async def test_a_worker_that_retires(client: Any, scheduler: Any, one: Any, two: Any) -> None:
    futures = client.map(inc, range(10))
    await wait(futures)
    await client.retire_workers([one.address])
    assert await client.gather(futures) == list(range(1, 11))
    assert list(scheduler.workers) == [two.address]


@promise(1, 1, Worker=Nanny)
async def test_restarts(client: Any, scheduler: Any) -> None:
    future = client.submit(inc, 1)
    assert await future == 2
    before = set(scheduler.workers)
    await client.restart()
    assert future.cancelled()
    assert len(scheduler.workers) == 2
    assert not before & set(scheduler.workers)
    assert await client.submit(inc, 2) == 3


@promise()
async def test_collections(client: Any) -> None:
    da = pytest.importorskip("dask.array")
    dd = pytest.importorskip("dask.dataframe")
    pd = pytest.importorskip("pandas")
    x = da.arange(100, chunks=7)
    assert await client.compute((x[::2] * 2).sum()) == sum(range(0, 100, 2)) * 2
    persisted = client.persist(x.rechunk(10, method="p2p"))
    assert (await client.compute(persisted) == range(100)).all()
    frame = pd.DataFrame({"a": [1, 2, 3, 4] * 5, "b": range(20)})
    grouped = dd.from_pandas(frame, npartitions=4).groupby("a").b.sum()
    assert (await client.compute(grouped)).to_dict() == frame.groupby("a").b.sum().to_dict()
    assert await client.compute(dask.delayed(sum)([dask.delayed(inc)(i) for i in range(4)])) == 10


@promise()
async def test_what_a_task_knows_of_itself(client: Any, *workers: Any) -> None:
    def who() -> tuple[str, str]:
        worker = get_worker()
        return worker.address, worker.get_current_task()

    await client.get_task_stream()  # which begins with this
    address, key = await client.submit(who, key="mine")
    assert (address, key) in {(w.address, "mine") for w in workers}
    stream = await client.get_task_stream()
    mine = next(record for record in stream if record["key"] == "mine")
    assert [times["action"] for times in mine["startstops"]] == ["compute"]
    assert mine["status"] == "OK"
