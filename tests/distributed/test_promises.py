"""What dask promises its users is the same with the plugin as without.

Each test runs on two clusters: one as dask makes it, one whose workers preload the plugin from the
configuration. What is asserted is the same.
"""

from __future__ import annotations

import asyncio
import operator
import threading
import time
from collections.abc import Callable
from typing import Any

import dask
import pytest
from distributed import (
    Event,
    Lock,
    MultiLock,
    Nanny,
    Queue,
    Reschedule,
    Semaphore,
    Variable,
    Worker,
    as_completed,
    fire_and_forget,
    get_client,
    get_worker,
    secede,
    wait,
    worker_client,
)
from distributed.client import FutureCancelledError
from distributed.utils_test import async_poll_for, gen_cluster, inc, slowinc

from dask_devctx.worker.run import DeviceRun as DeviceTask
from tests.distributed.devices import here

PRELOAD = "dask_devctx"


def promise(*nthreads: int, **kwargs: Any) -> Callable[[Any], Any]:
    """A test on a cluster without and on one with the plugin."""

    config = kwargs.pop("config", {})

    def decorate(test: Any) -> Any:
        @pytest.mark.parametrize("plugin", [False, True], ids=["without", "with"])
        def run(plugin: bool) -> None:
            async def checked(client: Any, scheduler: Any, *workers: Any) -> None:
                expected = set(range(4)) if plugin else {None}
                assert await client.submit(here, pure=False) in expected
                await test(client, scheduler, *workers)

            gen_cluster(
                client=True,
                nthreads=[("127.0.0.1", n) for n in nthreads or (2, 2)],
                config={**config, "distributed.worker.preload": [PRELOAD] if plugin else []},
                timeout=60,
                **kwargs,
            )(checked)()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


def fail(x: object = None) -> None:
    raise ZeroDivisionError(f"of {x}")


@promise()
async def test_futures(client: Any, scheduler: Any, *workers: Any) -> None:
    futures = client.map(inc, range(20))
    total = client.submit(sum, futures)
    assert await total == sum(range(1, 21))
    assert await client.gather(futures) == list(range(1, 21))
    assert client.map(inc, [3])[0].key == futures[3].key  # pure: the same
    assert total.status == "finished"


@promise()
async def test_errors(client: Any, scheduler: Any, *workers: Any) -> None:
    bad = client.submit(fail, 7)
    after = client.submit(inc, bad)
    with pytest.raises(ZeroDivisionError, match="of 7") as raised:
        await after
    names = []
    traceback = raised.value.__traceback__
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert names[-1] == "fail"  # the user's own line ends the traceback
    assert (bad.status, after.status) == ("error", "error")
    assert await client.gather([bad, client.submit(inc, 1)], errors="skip") == [2]
    assert isinstance(await bad.exception(), ZeroDivisionError)
    await client.retry(bad)
    assert isinstance(await bad.exception(), ZeroDivisionError)


attempts: list[int] = []


def third_time(name: str) -> str:
    attempts.append(1)
    if len(attempts) < 3:
        raise OSError(name)
    return name


@promise()
async def test_retries(client: Any, scheduler: Any, *workers: Any) -> None:
    attempts.clear()
    assert await client.submit(third_time, "a", retries=2) == "a"
    attempts.clear()
    with pytest.raises(OSError, match="b"):
        await client.submit(third_time, "b", retries=1)


def _rescheduled() -> str:
    attempts.append(1)
    if len(attempts) < 3:
        raise Reschedule
    return "done"


@promise()
async def test_reschedule(client: Any, scheduler: Any, *workers: Any) -> None:
    attempts.clear()
    assert await client.submit(_rescheduled) == "done"
    assert len(attempts) == 3


@promise(1)
async def test_cancellation(client: Any, scheduler: Any, worker: Any) -> None:
    running = client.map(slowinc, range(10), delay=0.05)
    last = running[-1]
    await client.cancel(running)
    assert last.cancelled()
    with pytest.raises((asyncio.CancelledError, FutureCancelledError)):
        await last
    await async_poll_for(lambda: not worker.state.tasks, timeout=10)
    assert await client.submit(inc, 1) == 2


@promise(1, 1)
async def test_stealing(client: Any, scheduler: Any, one: Any, two: Any) -> None:
    futures = client.map(
        slowinc, range(20), delay=0.15, workers=[one.address], allow_other_workers=True
    )
    assert await client.gather(futures) == list(range(1, 21))
    assert one.data
    assert two.data


class Counter:
    n = 0

    def __init__(self, start: int = 0) -> None:
        self.n = start

    def add(self, by: int = 1) -> int:
        self.n += by
        return self.n

    async def add_later(self) -> int:
        await asyncio.sleep(0.01)
        return self.add()

    def fail(self) -> None:
        fail("an actor")


@promise()
async def test_actors(client: Any, scheduler: Any, *workers: Any) -> None:
    counter = await client.submit(Counter, 10, actor=True)
    assert [await counter.add() for _ in range(3)] == [11, 12, 13]
    assert await counter.add_later() == 14
    assert await counter.add(by=2, separate_thread=False) == 16
    assert await counter.n == 16
    with pytest.raises(ZeroDivisionError, match="an actor"):
        await counter.fail()
    calls = [counter.add() for _ in range(50)]
    assert sorted([await call for call in calls]) == list(range(17, 67))
    assert await client.submit(lambda c: c.add().result(), counter) == 67


inside: list[int] = []


def _exclusive(_: int) -> None:
    with Lock("only-one"):
        inside.append(1)
        assert len(inside) == 1
        time.sleep(0.01)
        inside.pop()


@promise()
async def test_locks(client: Any, scheduler: Any, *workers: Any) -> None:
    await client.gather(client.map(_exclusive, range(8)))
    lock = Lock("held")
    await lock.acquire()
    assert await client.submit(lambda: Lock("held").acquire(timeout=0.05)) is False
    await lock.release()

    def both(_: int) -> int:
        with MultiLock(["a", "b"]):
            return 1

    def limited(_: int) -> int:
        with Semaphore(2, name="two"):
            return 1

    assert await client.gather(client.map(both, range(4))) == [1] * 4
    semaphore = await Semaphore(2, name="two")
    assert await client.gather(client.map(limited, range(4))) == [1] * 4
    assert await semaphore.get_value() == 0


@promise()
async def test_queues_variables_and_events(client: Any, scheduler: Any, *workers: Any) -> None:
    def produce() -> None:
        Event("may-produce").wait()
        for i in range(5):
            Queue("items").put(i)
        Variable("last").set(4)

    def consume() -> list[int]:
        return [Queue("items").get() for _ in range(5)]

    queue, variable = await Queue("items"), Variable("last")
    consumed, produced = client.submit(consume), client.submit(produce)
    assert not await Event("may-produce").is_set()
    await Event("may-produce").set()
    await produced
    assert await consumed == list(range(5))
    assert await variable.get() == 4
    assert await queue.qsize() == 0


@promise()
async def test_events_of_topics(client: Any, scheduler: Any, *workers: Any) -> None:
    got: list[Any] = []
    client.subscribe_topic("mine", lambda event: got.append(event[1]))
    await client.submit(lambda: get_worker().log_event("mine", {"x": 1}))
    await async_poll_for(lambda: got, timeout=10)
    assert [event["x"] for event in got] == [1]
    assert [event for _, event in await client.get_events("mine")] == got


def _fibonacci(n: int) -> int:
    if n < 2:
        return n
    with worker_client() as client:
        parts = client.map(_fibonacci, [n - 1, n - 2])
        return sum(client.gather(parts))


def _sums(n: int) -> int:
    futures = get_client().map(inc, range(n))
    secede()
    return sum(get_client().gather(futures))


async def _sums_async(n: int) -> int:
    return sum(await get_client().gather(get_client().map(inc, range(n))))


@promise(1, 1)
async def test_tasks_that_make_tasks(client: Any, scheduler: Any, *workers: Any) -> None:
    assert await client.submit(_fibonacci, 6) == 8
    assert await client.gather(client.map(_sums, [3, 4, 5])) == [6, 10, 15]
    assert await client.submit(_sums_async, 3) == 6


@promise()
async def test_what_is_dropped_is_forgotten(
    client: Any, scheduler: Any, one: Any, two: Any
) -> None:
    futures = client.map(inc, range(50))
    await wait(futures)
    assert len(one.data) + len(two.data) == 50
    del futures
    await async_poll_for(lambda: not scheduler.tasks, timeout=10)
    await async_poll_for(lambda: not one.data and not two.data, timeout=10)
    assert not one.state.tasks
    assert not two.state.tasks


@promise()
async def test_fire_and_forget(client: Any, scheduler: Any, *workers: Any) -> None:
    fire_and_forget(client.submit(lambda: Variable("done").set(1)))
    assert await Variable("done").get(timeout=10) == 1


@promise()
async def test_as_completed(client: Any, scheduler: Any, *workers: Any) -> None:
    futures = [client.submit(slowinc, i, delay=0.02 * (3 - i)) for i in range(3)]
    seen = []
    async for future in as_completed(futures):
        seen.append(await future)
    assert sorted(seen) == [1, 2, 3]


ran: list[str] = []


@promise(1, config={"distributed.scheduler.worker-saturation": float("inf")})
async def test_priorities(client: Any, scheduler: Any, worker: Any) -> None:
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


@promise(4, worker_kwargs={"resources": {"LICENSE": 1}})
async def test_resources(client: Any, scheduler: Any, worker: Any) -> None:
    inside.clear()

    futures = client.map(_licensed, range(6), resources={"LICENSE": 1})
    assert await client.gather(futures) == [1] * 6


def _licensed(_: int) -> int:
    inside.append(1)
    time.sleep(0.01)
    at_once = len(inside)
    inside.pop()
    return at_once


@promise(4)
async def test_as_many_at_a_time_as_threads(client: Any, scheduler: Any, worker: Any) -> None:
    def meet(_: int) -> int:
        return int(_barrier().wait(20) >= 0)

    assert await client.gather(client.map(meet, range(4))) == [1] * 4


def _barrier(known: dict[str, threading.Barrier] = {}) -> threading.Barrier:  # noqa: B006
    return known.setdefault("four", threading.Barrier(4))


@promise()
async def test_a_worker_that_dies(client: Any, scheduler: Any, one: Any, two: Any) -> None:
    futures = client.map(inc, range(10), workers=[one.address], allow_other_workers=True)
    await wait(futures)
    await one.close()
    assert await client.gather(futures) == list(range(1, 11))


@promise()
async def test_a_worker_that_retires(client: Any, scheduler: Any, one: Any, two: Any) -> None:
    futures = client.map(inc, range(10))
    await wait(futures)
    await client.retire_workers([one.address])
    assert await client.gather(futures) == list(range(1, 11))
    assert list(scheduler.workers) == [two.address]


@promise(1, 1, Worker=Nanny)
async def test_restarts(client: Any, scheduler: Any, *nannies: Any) -> None:
    future = client.submit(inc, 1)
    assert await future == 2
    before = set(scheduler.workers)
    await client.restart()
    assert future.cancelled()
    assert len(scheduler.workers) == 2
    assert not before & set(scheduler.workers)
    assert await client.submit(inc, 2) == 3


@promise(1, 1, Worker=Nanny)
async def test_a_process_that_is_killed(client: Any, scheduler: Any, *nannies: Any) -> None:
    def dies_once(x: int) -> int:
        import os

        if get_worker().name == 0:
            os._exit(1)
        return x

    futures = client.map(dies_once, range(4), workers=[0, 1])
    assert await client.gather(futures) == list(range(4))


@promise()
async def test_scatter_and_publish(client: Any, scheduler: Any, *workers: Any) -> None:
    data = await client.scatter({"x": 1}, broadcast=True)
    assert await client.submit(operator.add, data["x"], 1) == 2
    await client.publish_dataset(shared=data["x"])
    assert await client.list_datasets() == ("shared",)
    assert await (await client.get_dataset("shared")) == 1


@promise()
async def test_collections(client: Any, scheduler: Any, *workers: Any) -> None:
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
async def test_what_a_task_knows_of_itself(client: Any, scheduler: Any, *workers: Any) -> None:
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


@promise()
async def test_coroutines(client: Any, scheduler: Any, *workers: Any) -> None:
    async def pause(x: int) -> int:
        await asyncio.sleep(0.05)
        if x == 9:
            raise ZeroDivisionError
        return x

    futures = client.map(pause, range(10))
    await wait(futures)
    assert await client.gather(futures, errors="skip") == list(range(9))
    assert futures[9].status == "error"


@promise()
async def test_the_graph_that_is_sent_is_dasks_own(
    client: Any, scheduler: Any, *workers: Worker
) -> None:
    futures = client.map(inc, range(4))
    await wait(futures)
    for future in futures:
        assert not isinstance(scheduler.tasks[future.key].run_spec, DeviceTask)
        assert "executor" not in (scheduler.tasks[future.key].annotations or {})
