"""Tasks that wait for each other: what hangs on the devices' own threads, and each way out."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import dask
import pytest
from distributed import get_client, rejoin, secede, worker_client

from tests.distributed.devices import here, with_plugin

N = 8  # on four devices, of which each runs one task at a time


class Meeting:
    """N threads that wait until all of them are there; each is told whether they met."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(N)

    def wait(self, timeout_s: float = 20) -> bool:
        try:
            self._barrier.wait(timeout_s)
        except threading.BrokenBarrierError:
            return False
        return True


meetings: dict[str, Meeting] = {}  # by test: the worker is in this process


def meet(name: str, n: int, timeout_s: float = 20) -> tuple[bool, int | None]:
    return meetings[name].wait(timeout_s), here()


def meet_seceded(name: str, n: int) -> tuple[bool, int | None]:
    secede()
    met = meetings[name].wait()
    rejoin()
    return met, here()


def meet_in_a_worker_client(name: str, n: int) -> tuple[bool, int | None]:
    with worker_client():
        met = meetings[name].wait()
    return met, here()


together = asyncio.Barrier(N)


async def meet_in_a_coroutine(name: str, n: int) -> tuple[bool, int | None]:
    async with asyncio.timeout(20):
        await together.wait()
    return True, here()


async def gathered(client: Any, task: Any, *args: Any) -> list[tuple[bool, int | None]]:
    meetings[task.__name__] = Meeting()
    futures = [client.submit(task, task.__name__, n, *args, pure=False) for n in range(N)]
    return await client.gather(futures)  # type: ignore[no-any-return]


@with_plugin(64)
async def test_more_tasks_than_places_never_meet(client: Any, scheduler: Any, worker: Any) -> None:
    assert not any(met for met, _ in await gathered(client, meet, 0.5))


@with_plugin(64)
async def test_without_a_device_they_do(client: Any, scheduler: Any, worker: Any) -> None:
    with dask.annotate(device="none"):
        assert await gathered(client, meet) == [(True, None)] * N


@with_plugin(64, unannotated="leave")
async def test_left_alone_they_do(client: Any, scheduler: Any, worker: Any) -> None:
    assert await gathered(client, meet) == [(True, None)] * N


@with_plugin(64, tasks_per_device=2)
async def test_with_a_place_for_each_they_do(client: Any, scheduler: Any, worker: Any) -> None:
    found = await gathered(client, meet)
    assert sorted(found) == [(True, n // 2) for n in range(N)]


@pytest.mark.parametrize("task", [meet_seceded, meet_in_a_worker_client, meet_in_a_coroutine])
def test_those_that_give_up_their_place_do(task: Any) -> None:
    @with_plugin(64)
    async def check(client: Any, scheduler: Any, worker: Any) -> None:
        found = await gathered(client, task)
        assert all(met for met, _ in found)
        # Where one has left already when the next comes, its device may get that one, too.
        assert {where for _, where in found} <= {0, 1, 2, 3}

    check()


def compute_inside(n: int) -> int | None:
    there = dask.delayed(here)(n).compute()  # dask gives up the place while it waits
    assert there in range(4)
    return here()


def ask_inside(n: int) -> int | None:
    secede()
    there = get_client().submit(here, n, pure=False).result()
    rejoin()
    assert there in range(4)
    return here()


@pytest.mark.parametrize("task", [compute_inside, ask_inside])
def test_tasks_that_wait_for_tasks_of_their_own(task: Any) -> None:
    @with_plugin(64)
    async def check(client: Any, scheduler: Any, worker: Any) -> None:
        found = await client.gather(client.map(task, range(N), pure=False))
        assert sorted(found) == [n // 2 for n in range(N)]

    check()
