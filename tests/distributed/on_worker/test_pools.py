"""A device's threads: their CPUs, the order of their work, and their end."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from distributed.threadpoolexecutor import rejoin, secede

from dask_devctx import devices
from dask_devctx.worker.placement.admission import Admission, Claim
from dask_devctx.worker.threads.executors import DeviceThreadPoolExecutor, near_cpus


def pool_of(
    threads: int, name: str = "test", cpus: frozenset[int] | None = None
) -> DeviceThreadPoolExecutor:
    device = devices()[0]
    admission = Admission([device], threads)
    return DeviceThreadPoolExecutor(name, threads, admission.queues[device], cpus)


def claim(pool: DeviceThreadPoolExecutor, *priority: int) -> Claim:
    queue = pool._queue
    return Claim("it", (queue.device,), queue.admission.slot, 0, priority)


@pytest.fixture
def pool() -> Iterator[DeviceThreadPoolExecutor]:
    pool = pool_of(1)
    yield pool
    pool.shutdown(wait=True, timeout=10)


def test_the_most_urgent_first(pool: DeviceThreadPoolExecutor) -> None:
    began, go_on = threading.Event(), threading.Event()

    def block() -> None:
        began.set()
        go_on.wait(10)

    order: list[object] = []
    futures = [pool.submit_task(claim(pool), block)]
    assert began.wait(10)
    for name, priority in [("late", (5, 1)), ("b", (1, 2)), ("soon", (1, 1)), ("c", (1, 2))]:
        futures.append(pool.submit_task(claim(pool, *priority), order.append, name))
    futures.append(pool.submit(order.append, "of no task"))
    go_on.set()
    for future in futures:
        future.result(10)  # type: ignore[call-arg]
    assert order == ["of no task", "soon", "b", "c", "late"]


@pytest.mark.parametrize("threads", [1, 2])
def test_rejoining_after_the_shutdown(threads: int) -> None:
    pool = pool_of(threads, "test-rejoin")
    seceded, go_on = threading.Event(), threading.Event()

    def leaves() -> str:
        secede()
        seceded.set()
        go_on.wait(10)
        rejoin()
        return "back"

    future = pool.submit(leaves)
    assert seceded.wait(10)
    pool.shutdown(wait=False)
    go_on.set()
    assert future.result(10) == "back"
    deadline = time.monotonic() + 10
    while any(t.name.startswith("test-rejoin") for t in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread of the pool is left"
        time.sleep(0.01)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinities")
def test_threads_keep_to_their_cpus() -> None:
    usable = os.sched_getaffinity(0)
    one = frozenset([min(usable)])
    pool = pool_of(2, "near", one)
    try:
        together = threading.Barrier(2)

        def ask() -> set[int]:
            together.wait(10)
            return os.sched_getaffinity(0)

        assert [f.result(10) for f in [pool.submit(ask), pool.submit(ask)]] == [one, one]
        assert os.sched_getaffinity(0) == usable
    finally:
        pool.shutdown(wait=True, timeout=10)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinities")
def test_a_refused_binding_fails_no_task(caplog: pytest.LogCaptureFixture) -> None:
    """A batch system may take CPUs away after the worker has started: EINVAL."""
    taken = frozenset([max(os.sched_getaffinity(0)) + 1000])
    pool = pool_of(1, "near", taken)
    try:
        with caplog.at_level("INFO", "dask_devctx"):
            assert pool.submit(abs, -1).result(10) == 1
        assert "is not bound to the CPUs" in caplog.text
        assert "Invalid argument" in caplog.text
    finally:
        pool.shutdown(wait=True, timeout=10)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinities")
def test_near_cpus_are_those_that_may_be_used() -> None:
    usable = frozenset(os.sched_getaffinity(0))
    absent = max(usable) + 1000
    assert near_cpus(None) is None
    assert near_cpus(frozenset()) is None
    assert near_cpus(usable) is None  # nothing to keep to
    assert near_cpus(frozenset([absent])) is None  # none of them may be used
    if len(usable) > 1:
        one = frozenset([min(usable)])
        assert near_cpus(one | {absent}) == one


def outcomes(pool: DeviceThreadPoolExecutor, count: int) -> list[object]:
    """Submit from an event loop, as dask does for tasks."""

    def task(number: int) -> int:
        if number % 7 == 3:
            raise KeyError(number)
        return number

    async def run() -> list[object]:
        futures = [pool.submit_task(claim(pool), task, number) for number in range(count)]
        return await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)

    return asyncio.run(run())


def test_every_outcome_reaches_the_loop_that_submitted() -> None:
    pool = pool_of(4)
    for number, outcome in enumerate(outcomes(pool, 2000)):
        if number % 7 == 3:
            assert isinstance(outcome, KeyError)
        else:
            assert outcome == number
    # Another loop's, while the pool is the first one's.
    assert outcomes(pool, 3) == [0, 1, 2]
    pool.shutdown(wait=True, timeout=10)


def test_a_task_that_is_cancelled_as_it_begins_runs_once(pool: DeviceThreadPoolExecutor) -> None:
    """It runs here or is sent again by the scheduler, and never both."""
    ran: list[int] = []

    async def submit_and_cancel(rounds: int) -> list[int]:
        sent_again = []
        for number in range(rounds):
            future = pool.submit_task(claim(pool), ran.append, number)
            for _ in range(number % 200):
                pass
            future.cancel()
            with suppress(asyncio.CancelledError):
                if await future is not None:  # type: ignore[misc]
                    sent_again.append(number)
        return sent_again

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        sent_again = asyncio.run(submit_and_cancel(20_000))
    finally:
        sys.setswitchinterval(interval)
    pool.submit(bool).result(10)
    assert not set(sent_again) & set(ran)
