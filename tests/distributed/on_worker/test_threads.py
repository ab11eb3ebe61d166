"""The threads of a worker: how many, near which CPUs, in which order; and the garbage collector."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import dask
import pytest
from distributed import Client, Worker
from distributed.utils_test import async_poll_for, poll_for

from dask_devctx import DevicePlugin, devices
from dask_devctx.dask_internals.garbage import collecting_rarely
from dask_devctx.dask_internals.tasks import DeviceThreadPoolExecutor
from dask_devctx.worker.placement.admission import Admission, Claim
from dask_devctx.worker.threads import keep_near
from tests.distributed.devices import claim_of, on_cluster, started

THREADS = 12


class Running:
    now = most = 0
    lock = threading.Lock()

    def __enter__(self) -> None:
        with self.lock:
            Running.now += 1
            Running.most = max(Running.most, Running.now)

    def __exit__(self, *error: object) -> None:
        with self.lock:
            Running.now -= 1


def computes(n: int, seconds: float = 0.02) -> None:
    with Running():
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass


def cpu_threads_of(worker: Worker) -> list[threading.Thread]:
    pool = worker.executors["default"]
    return [thread for thread in pool._threads.copy() if thread.is_alive()]


@pytest.mark.parametrize(("options", "expected"), [({}, 3), ({"cpu_threads": 5}, 5)])
def test_as_many_as_there_are_cpus(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: int
) -> None:
    monkeypatch.setattr("dask_devctx.worker.threads.CPU_COUNT", 3)

    @on_cluster(THREADS)
    async def body(client: Client, worker: Worker) -> None:
        await client.gather(client.map(computes, range(THREADS), seconds=0.001))
        assert len(cpu_threads_of(worker)) == THREADS  # from a time before the plugin
        await client.register_plugin(DevicePlugin(**options))
        await async_poll_for(lambda: len(cpu_threads_of(worker)) == expected, timeout=10)
        Running.most = 0
        with dask.annotate(device="none"):
            await client.gather(client.map(computes, range(40), pure=False))
            assert Running.most == expected
            waiting = client.map(time.sleep, [0.5] * (THREADS + 4), pure=False)
        for _ in range(3):  # the last ones keep threads that run them
            await client.register_plugin(DevicePlugin(**options))
        await asyncio.wait_for(client.gather(waiting), 20)
        await client.unregister_worker_plugin("devctx")
        await client.gather(client.map(computes, range(THREADS), pure=False))
        assert len(cpu_threads_of(worker)) == THREADS

    body()


def pool_of(
    threads: int, name: str = "test", cpus: frozenset[int] | None = None
) -> DeviceThreadPoolExecutor:
    device = devices()[0]
    admission = Admission([device], threads)
    started = functools.partial(keep_near, cpus)
    queue = admission.states[device]
    return DeviceThreadPoolExecutor(name, threads, queue, started, lambda: False)


def claim(pool: DeviceThreadPoolExecutor, priority: int = 0, *more: int) -> Claim:
    return claim_of(pool.queue.admission, "it", pool.queue.device, priority=(priority, *more))


@pytest.fixture
def pool() -> Iterator[DeviceThreadPoolExecutor]:
    pool = pool_of(1)
    yield pool
    pool.shutdown(wait=True, timeout=10)


def test_the_most_urgent_first(pool: DeviceThreadPoolExecutor) -> None:
    both, order = threading.Barrier(2, timeout=10), list[object]()

    async def submit() -> None:
        futures = [pool.submit_task(claim(pool), lambda: both.wait() + both.wait())]
        both.wait()
        for name, priority in [("late", (5, 1)), ("b", (1, 2)), ("soon", (1, 1)), ("c", (1, 2))]:
            futures.append(pool.submit_task(claim(pool, *priority), order.append, name))
        pool.submit(order.append, "of no task")
        both.wait()
        await asyncio.wait_for(asyncio.gather(*futures), 10)

    asyncio.run(submit())
    assert order == ["of no task", "soon", "b", "c", "late"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinities")
def test_threads_keep_to_the_cpus_that_may_be_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable = frozenset(os.sched_getaffinity(0))
    one, absent = frozenset([min(usable)]), frozenset([max(usable) + 1000])
    for near, kept in ((None, usable), (usable, usable), (absent, usable), (one | absent, one)):
        pool = pool_of(1, "near", near)
        assert pool.submit(abs, -1).result(10) == 1  # a thread is bound just after its start
        assert pool.submit(os.sched_getaffinity, 0).result(10) == kept
        pool.shutdown(wait=True, timeout=10)
        assert os.sched_getaffinity(0) == usable
    keep_near(one, threading.Thread())  # it has not begun: this thread is not bound instead
    assert os.sched_getaffinity(0) == usable
    # A batch system may take CPUs away after the worker has started.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: usable | absent)
    pool = pool_of(1, "near", absent)
    with caplog.at_level("INFO", "dask_devctx"):
        assert pool.submit(abs, -1).result(10) == 1
    assert "is not bound to the CPUs" in caplog.text
    pool.shutdown(wait=True, timeout=10)


def test_a_task_that_is_cancelled_before_it_begins_does_not_run(
    pool: DeviceThreadPoolExecutor,
) -> None:
    both, ran = threading.Barrier(2, timeout=10), list[int]()

    async def submit() -> None:
        running = pool.submit_task(claim(pool), lambda: both.wait() + both.wait())
        both.wait()
        cancelled, last = (pool.submit_task(claim(pool, n), ran.append, n) for n in range(2))
        cancelled.cancel()
        both.wait()
        await asyncio.wait_for(asyncio.gather(running, last), 10)

    asyncio.run(submit())
    assert ran == [1]


def test_garbage_is_collected_as_rarely_as_in_dasks_own_processes() -> None:
    ours = gc.get_threshold()
    with started(n_workers=1, processes=True) as client:
        with collecting_rarely():
            pass  # another user of this process, which is the scheduler's
        assert gc.get_threshold() > ours
        assert client.run(gc.get_threshold).popitem()[1] == gc.get_threshold()
        client.unregister_worker_plugin("devctx")
        assert client.run(gc.get_threshold).popitem()[1] == ours
        poll_for(lambda: gc.get_threshold() == ours, timeout=10)  # the scheduler hears of it
