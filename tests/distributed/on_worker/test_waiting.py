"""Tasks that wait for each other: what hangs on the devices' own threads, and each way out."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections import Counter
from typing import Any

import dask
import pytest
from distributed import Event, get_client, rejoin, secede, worker_client
from distributed.utils_test import async_poll_for, poll_for

from dask_devctx import DevicePlugin, SimulatedArray
from dask_devctx.worker import registration
from dask_devctx.worker.placement import balance
from tests.distributed.devices import blocks, here, on_cluster, started, submit_on, with_plugin

N = 8  # on four devices, of which each runs one task at a time
Met = tuple[bool, int | None]


class Meeting:
    """N threads that wait until all of them are there; each is told whether they met."""

    barrier = threading.Barrier(N)
    of_coroutines = asyncio.Barrier(N)

    @classmethod
    def wait(cls, timeout_s: float = 20) -> bool:
        try:
            cls.barrier.wait(timeout_s)
        except threading.BrokenBarrierError:
            return False
        return True


def meet(n: int, timeout_s: float = 20) -> Met:
    return Meeting.wait(timeout_s), here()


def meet_seceded(n: int) -> Met:
    secede()
    met = Meeting.wait()
    rejoin()
    return met, here()


def meet_in_a_worker_client(n: int) -> Met:
    with worker_client():
        met = Meeting.wait()
    return met, here()


async def meet_in_a_coroutine(n: int) -> Met:
    async with asyncio.timeout(20):
        await Meeting.of_coroutines.wait()
    return True, here()


@pytest.mark.parametrize(
    ("task", "device", "options", "expected"),
    [
        (lambda n: meet(n, 0.5), "auto", {}, None),
        (meet, "none", {"cpu_threads": N}, [(True, None)] * N),
        (meet, "auto", {"tasks_per_device": 2}, [(True, n // 2) for n in range(N)]),
        # Where one has left already when the next comes, its device may get that one, too.
        *((task, "auto", {}, ...) for task in (meet_seceded, meet_in_a_worker_client)),
        (meet_in_a_coroutine, "auto", {}, ...),
    ],
)
def test_tasks_that_wait_for_each_other(
    task: Any, device: str, options: dict[str, Any], expected: Any
) -> None:
    Meeting.barrier, Meeting.of_coroutines = threading.Barrier(N), asyncio.Barrier(N)

    @with_plugin(64, **options)
    async def body(client: Any) -> None:
        with dask.annotate(device=device):
            found = await client.gather(client.map(task, range(N), pure=False))
        if expected is None:
            assert not any(met for met, _ in found)
        elif expected is ...:
            assert all(met and where in range(4) for met, where in found)
        else:
            assert sorted(found) == expected

    body()


def compute_inside(n: int) -> int | None:
    dask.delayed(here)(n).compute()  # dask gives up the place while it waits
    there = get_client().submit(here, n, pure=False).result()
    assert there in range(4)
    return here()


def ask_inside(n: int) -> int | None:
    secede()
    there = get_client().submit(here, n, pure=False).result()
    rejoin()
    assert there in range(4)
    return here()


@pytest.mark.parametrize("task", [compute_inside, ask_inside])
@with_plugin(64)
async def test_tasks_that_wait_for_tasks_of_their_own(client: Any, task: Any) -> None:
    found = await client.gather(client.map(task, range(N), pure=False))
    assert sorted(found) == [n // 2 for n in range(N)]


@with_plugin(64, devices=[0])
async def test_tasks_that_seceded_end_while_others_begin(client: Any) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        naps = client.map(lambda n: secede() or time.sleep(0.003 * (n % 7)), range(900), pure=False)
        await asyncio.wait_for(client.gather([*naps, *client.map(here, range(900))]), 60)
    finally:
        sys.setswitchinterval(interval)


ended: set[int] = set()


def ask(n: int, device: str) -> tuple[float, float]:
    """Wait for a task, and run out of memory unless ``n`` has ended; when it began and ended."""
    began = time.perf_counter()
    submit_on(get_client(), device, time.sleep, 0.3, pure=False).result()
    if n not in ended:
        ended.add(n)
        raise MemoryError("CUDA out of memory")
    return began, time.perf_counter()


@pytest.mark.parametrize("memory", [None, "9 GiB"])
@with_plugin(64, devices=[0])
async def test_what_a_slot_that_is_given_up_leaves(
    client: Any, worker: Any, memory: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balance, "_KEEPS_S", 0.1)
    ended.update(range(3))
    with dask.annotate(**({"device_memory": memory} if memory else {})):
        spans = await client.gather(client.map(ask, range(3), device="none", pure=False))
    overlap = any(one[1] > other[0] for one, other in itertools.pairwise(sorted(spans)))
    assert overlap is (memory is None), "what a task reserves is its own to the end"
    ended.clear()
    await asyncio.wait_for(client.gather(client.map(ask, range(3), device="auto")), 20)
    threads = [one.name for one in threading.enumerate() if "devctx-cuda:0" in one.name]
    assert len(threads) <= 4, "each waits on a thread, and one runs"
    monkeypatch.setattr(balance, "_KEEPS_S", 0.5)
    again = client.register_plugin(DevicePlugin(devices=[0]))
    for change in again, client.unregister_worker_plugin("devctx"):
        futures = client.map(ask, range(3), device="auto", pure=False)
        await async_poll_for(lambda: any("sleep" in key for key in worker.state.tasks), timeout=10)
        await change
        await asyncio.wait_for(client.gather(futures), 20)


# -- tasks that a worker has ahead, behind one that takes long


class Long:
    """A task that runs until it may end, and its device once it runs."""

    may_end = threading.Event()
    device: int | None = None

    @classmethod
    def run(cls) -> bool:
        cls.device = here()
        return cls.may_end.wait(40)


@pytest.mark.parametrize("n_workers", [1, 4])
def test_late_tasks_run_on_idle_devices(n_workers: int) -> None:
    Long.may_end, Long.device = threading.Event(), None
    with started(n_workers=n_workers) as client:
        long = client.submit(Long.run)
        poll_for(lambda: Long.device is not None, timeout=20)
        named = submit_on(client, Long.device, here, pure=False)
        found = client.gather(client.map(here, range(32), pure=False))
        assert Long.device not in found
        assert not long.done()
        assert not named.done(), "it can run nowhere else"
        Long.may_end.set()
        assert long.result()
        assert named.result() == Long.device


def test_late_tasks_move_as_soon_as_a_device_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "_AGAIN_S", 60.0)
    with started(n_workers=4) as client:
        long = client.map(lambda one: Event(one).wait(), [*"babb"], pure=False)
        found = client.map(here, range(24), pure=False)
        time.sleep(0.5)  # all of them are late, and no device is idle
        Event("a", client).set()
        assert len(client.gather(found)) == 24
        assert [one.done() for one in long] == [False, True, False, False]
        Event("b", client).set()
        client.gather(long)


@on_cluster(8, plugin={"devices": [0]})
async def test_the_barrier_of_a_rechunk_does_not_go_back(client: Any, worker: Any) -> None:
    """dask ends a rechunk whose barrier is scheduled again."""
    asked: list[str] = []

    async def tell(worker: Any, op: str, *, keys: list[str]) -> None:
        asked.extend(keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registration, "tell", tell)
        keys = ["shuffle-barrier-1", "plain-1"]
        held = [client.submit(blocks, "long"), *(client.submit(here, key=one) for one in keys)]
        await async_poll_for(lambda: asked, timeout=10)
    assert set(asked) == {"plain-1"}
    await Event("go-on", client).set()
    assert await client.gather(held) == [0, 0, 0]


def test_a_group_with_one_input_goes_to_all_workers() -> None:
    with started(n_workers=4) as client:
        value = client.submit(SimulatedArray, (8,))
        names = client.map(lambda n, value: time.sleep(0.05) or here(), range(24), value=value)
        counts = Counter(client.gather(names))
    assert sorted(counts) == [0, 1, 2, 3]
    assert max(counts.values()) <= 10


def ask_plainly(n: int) -> int | None:
    client = get_client()
    return len(client.gather(client.map(here, range(N), pure=False)))


@pytest.mark.parametrize("n_workers", [1, 2, 4])
@pytest.mark.parametrize("n", [3, N])
def test_they_may_wait_without_a_word(n_workers: int, n: int, caplog: Any) -> None:
    with started(n_workers=n_workers, threads_per_worker=4 // n_workers) as client:
        assert client.gather(client.map(ask_plainly, range(n), pure=False)) == [N] * n
    said = [text for text in caplog.messages if "waits for results of tasks" in text]
    assert (n > 4) <= len(said) <= n_workers, "there are four slots"
