"""Tasks without a device: how many run at a time."""

from __future__ import annotations

import threading
import time
from typing import Any

import dask
import pytest
from distributed import Client, Worker
from distributed.utils_test import async_poll_for

from dask_devctx import DevicePlugin
from dask_devctx.worker.threads import cpu_threads
from tests.distributed.devices import on_cluster

THREADS = 12


class Running:
    """The number of tasks that run now, and the most of them."""

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


together = threading.Barrier(THREADS)


def meets(n: int) -> int:
    return together.wait(30)


def pool_of(worker: Worker) -> list[threading.Thread]:
    pool = worker.executors["default"]
    return [thread for thread in pool._threads.copy() if thread.is_alive()]


@pytest.mark.parametrize(("options", "expected"), [({}, 3), ({"cpu_threads": 5}, 5)])
def test_as_many_as_there_are_cpus(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: int
) -> None:
    monkeypatch.setattr(cpu_threads, "CPU_COUNT", 3)

    @on_cluster(THREADS)
    async def body(client: Client, worker: Worker) -> None:
        await client.gather(client.map(computes, range(THREADS), seconds=0.001))
        assert len(pool_of(worker)) == THREADS  # from a time before the plugin
        await client.register_plugin(DevicePlugin(**options))
        await async_poll_for(lambda: len(pool_of(worker)) == expected, timeout=10)
        Running.most = 0
        with dask.annotate(device="none"):
            await client.gather(client.map(computes, range(40), pure=False))
        assert Running.most == expected
        await client.unregister_worker_plugin("devctx")
        await client.gather(client.map(computes, range(THREADS), pure=False))
        assert len(pool_of(worker)) == THREADS

    body()


@on_cluster(THREADS)
async def test_more_run_while_all_wait(client: Client, worker: Worker) -> None:
    await client.register_plugin(DevicePlugin())
    with dask.annotate(device="none"):
        met = await client.gather(client.map(meets, range(THREADS)))
    assert sorted(met) == list(range(THREADS))
    assert len(pool_of(worker)) == THREADS
    await async_poll_for(lambda: len(pool_of(worker)) < THREADS, timeout=10)
