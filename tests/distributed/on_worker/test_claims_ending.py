"""Claims of coroutines and actors, on failing devices, and as the plugin and the worker end."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
import pytest
from distributed import worker_client
from distributed.utils_test import gen_cluster

from dask_devctx import (
    Device,
    DevicePlugin,
    SimulatedArray,
    device_of,
)
from tests.distributed.devices import with_plugin
from tests.distributed.on_worker.test_several import mine, nothing_held


class Gate:
    open = threading.Event()


@pytest.fixture(autouse=True)
def gate() -> Any:
    Gate.open = threading.Event()
    yield Gate.open
    Gate.open.set()


class Model:
    """An actor of several devices."""

    def __init__(self) -> None:
        self.made_on = mine()

    def where(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.made_on, mine()

    async def where_later(self) -> tuple[int, ...]:
        await asyncio.sleep(0)
        return mine()

    def places(self, arrays: Any) -> list[int]:
        homes = [device_of(one) for one in arrays]
        return [home.device_id for home in homes if home is not None]


@with_plugin()
async def test_an_actor_keeps_its_devices(client: Any, scheduler: Any, worker: Any) -> None:
    with dask.annotate(devices=[1, 3]):
        actor = await client.submit(Model, actor=True)
    assert await actor.where() == ((1, 3), (1, 3))
    assert await actor.where_later() == (1, 3)
    arrays = []
    for device in (1, 2, 3):
        with Device(device):
            arrays.append(SimulatedArray((4,)))
    assert await actor.places(arrays) == [1, 1, 1]
    # Tasks that name no device avoid them; the others wait for the actor's end.
    found = await client.gather(client.map(mine, range(12), pure=False))
    assert set(found) == {(0,), (2,)}
    with dask.annotate(device=3):
        waiting = client.submit(mine, key="waits")
    with dask.annotate(devices=2):
        assert set(await client.submit(mine, key="two")) == {0, 2}
    await asyncio.sleep(0.1)
    assert waiting.status == "pending"
    await client.register_plugin(DevicePlugin())  # again: the actor keeps them
    assert await waiting == (3,)  # it was submitted to the plugin before
    with dask.annotate(device=1):
        waiting = client.submit(mine, key="waits-again")
    await asyncio.sleep(0.1)
    assert waiting.status == "pending"
    del actor
    gc.collect()  # its futures refer to each other
    assert await waiting == (1,)
    await nothing_held(worker)


@with_plugin()
async def test_a_report_says_which_actor_tasks_wait_for(
    client: Any, scheduler: Any, worker: Any
) -> None:
    with dask.annotate(device=1, device_share=1):
        actor = await client.submit(Model, actor=True, key="the-model")
    with dask.annotate(device=1):
        waiting = client.submit(mine, key="waits")
    while not (text := worker.plugins["devctx"].extension.report()["waiting"]):
        await asyncio.sleep(0.01)
    assert "cuda:1 is held by 'the-model'" in text
    assert "1 task queued for it" in text
    assert "smaller device_share" in text
    del actor
    gc.collect()
    assert await waiting == (1,)
    assert worker.plugins["devctx"].extension.report()["waiting"] == ""


@with_plugin(device_memory_limit=0.5)
async def test_room_that_cannot_be_made_on_the_second_device(
    client: Any, scheduler: Any, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was reserved on the first device is given back."""
    reservations = worker.plugins["devctx"].extension.store.spill
    make_room, used = reservations.make_room, reservations.used

    def fail_on_the_second(device: Device, nbytes: int, **how: Any) -> bool:
        if device == Device(2):
            raise RuntimeError("no room")
        return bool(make_room(device, nbytes, **how))

    monkeypatch.setattr(reservations, "make_room", fail_on_the_second)
    with (
        dask.annotate(devices=[1, 2], device_memory="1 MiB"),
        pytest.raises(RuntimeError, match="no room"),
    ):
        await client.submit(mine)
    await nothing_held(worker)
    assert [used(Device(number)) for number in range(4)] == [0] * 4


@with_plugin()
async def test_a_coroutine_has_its_devices_until_it_ends(
    client: Any, scheduler: Any, worker: Any
) -> None:
    async def coroutine(number: int) -> tuple[float, float, tuple[int, ...]]:
        start = time.monotonic()
        await asyncio.sleep(0.05)
        return start, time.monotonic(), mine()

    with dask.annotate(devices=3):
        first, second = await client.gather(client.map(coroutine, range(2)))
    assert len(first[2]) == len(second[2]) == 3
    assert first[1] <= second[0] or second[1] <= first[0]
    await nothing_held(worker)


@with_plugin()
async def test_a_task_that_waits_for_its_own_tasks_gives_its_devices_to_them(
    client: Any, scheduler: Any, worker: Any
) -> None:
    def outer() -> tuple[int, ...]:
        with worker_client() as inner, dask.annotate(devices="all"):
            result: tuple[int, ...] = inner.submit(mine).result(20)
        return result

    with dask.annotate(devices="all"):
        assert await client.submit(outer) == (0, 1, 2, 3)
    await nothing_held(worker)


@with_plugin()
async def test_the_plugins_end_lets_those_that_wait_run(
    client: Any, scheduler: Any, worker: Any
) -> None:
    with dask.annotate(devices="all"):
        first = client.submit(hold, key="first")
        second = client.submit(mine, key="second")
        admission = worker.plugins["devctx"].extension.admission
        while not admission.waiting_for(Device(0)):
            await asyncio.sleep(0.01)
        await client.unregister_worker_plugin("devctx")
        Gate.open.set()
        assert await first == await second == (0, 1, 2, 3)


class Slow(Model):
    """An actor that is made late."""

    def __init__(self) -> None:
        Gate.open.wait(20)
        super().__init__()


@pytest.mark.parametrize("again", [False, True])
@with_plugin()
async def test_an_actor_that_is_made_after_the_plugins_end_holds_no_one_back(
    client: Any, scheduler: Any, worker: Any, again: bool
) -> None:
    """If another plugin took its place, the actor keeps its devices there."""
    admission = worker.plugins["devctx"].extension.admission
    with dask.annotate(devices="all"):
        made = client.submit(Slow, actor=True)
        waiting = client.submit(mine, key="waits")
        while not admission.waiting_for(Device(0)):
            await asyncio.sleep(0.01)
    if again:
        await client.register_plugin(DevicePlugin())
    else:
        await client.unregister_worker_plugin("devctx")
    Gate.open.set()
    assert await waiting == (0, 1, 2, 3)
    actor = await made
    if again:
        admission = worker.plugins["devctx"].extension.admission
        assert admission.kept_devices() == {Device(number) for number in range(4)}
    del made, actor
    gc.collect()


def hold() -> tuple[int, ...]:
    Gate.open.wait(20)
    return mine()


@pytest.mark.parametrize("theirs", [{}, {"executor": "theirs"}], ids=["ours", "theirs"])
@gen_cluster(client=True, nthreads=[("127.0.0.1", 16)], timeout=60)
async def test_a_worker_closes_while_claims_wait(
    client: Any, scheduler: Any, worker: Any, theirs: dict[str, str]
) -> None:
    pool = worker.executors["theirs"] = ThreadPoolExecutor(2, thread_name_prefix="theirs")
    await client.register_plugin(DevicePlugin())
    with dask.annotate(devices="all", **theirs):
        futures = [client.submit(hold, key="first"), client.submit(mine, key="second")]
    while not worker.plugins["devctx"].extension.admission.waiting_for(Device(0)):
        await asyncio.sleep(0.01)
    asyncio.get_running_loop().call_later(0.2, Gate.open.set)
    start = time.monotonic()
    await asyncio.wait_for(worker.close(executor_wait=not theirs), 10)
    assert futures[1].status != "error"
    pool.shutdown(wait=False)
    while any(thread.name.startswith("theirs") for thread in threading.enumerate()):
        assert time.monotonic() - start < 20
        await asyncio.sleep(0.01)
