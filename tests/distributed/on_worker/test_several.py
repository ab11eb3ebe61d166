"""Tasks of several devices, of a part of one, and with a reservation of its memory."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Worker, get_worker, secede
from distributed.utils_test import gen_cluster

from dask_devctx import (
    Device,
    DeviceNotFoundError,
    DeviceReservationError,
    DeviceRouting,
    NotEnoughDevicesError,
    SimulatedArray,
    on_device,
    task_devices,
)
from tests.distributed.devices import here, with_plugin

GIB = 2**30


def mine(*_: object) -> tuple[int, ...]:
    """Return the ordinals of this task's devices."""
    devices = task_devices()
    assert here() == devices[0].device_id
    return tuple(device.device_id for device in devices)


class Running:
    """The tasks on each device at a time, as the tasks themselves see it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now: dict[int, int] = {}
        self.most: dict[int, int] = {}

    @contextmanager
    def counted(self, weight: int = 1) -> Iterator[None]:
        devices = mine()
        with self.lock:
            for one in devices:
                self.now[one] = self.now.get(one, 0) + weight
                self.most[one] = max(self.most.get(one, 0), self.now[one])
        try:
            yield
        finally:
            with self.lock:
                for one in devices:
                    self.now[one] -= weight


class Seen:
    running = Running()
    go_on = threading.Event()


@pytest.fixture(autouse=True)
def seen() -> Running:
    Seen.running, Seen.go_on = Running(), threading.Event()
    return Seen.running


def busy(seconds: float = 0.02, weight: int = 1) -> tuple[int, ...]:
    with Seen.running.counted(weight):
        time.sleep(seconds)
        return mine()


async def nothing_held(worker: Any) -> None:
    admission = worker.plugins["devctx"].extension.admission
    for _ in range(200):
        if admission.idle:
            break
        await asyncio.sleep(0.01)
    assert admission.idle


# -- the annotations


@with_plugin()
async def test_a_number_of_devices(client: Any, scheduler: Any, worker: Any) -> None:
    with dask.annotate(devices=2):
        found = await client.gather(client.map(busy, [0.02] * 8, pure=False))
    assert all(len(set(devices)) == 2 for devices in found)
    assert set(Seen.running.most.values()) == {1}
    with dask.annotate(devices="all"):
        assert await client.submit(mine, key="all") == (0, 1, 2, 3)
    with dask.annotate(devices=lambda key: 3):
        assert len(await client.submit(mine, key="three")) == 3
    assert len(await client.submit(mine, key="one")) == 1
    await nothing_held(worker)


@with_plugin()
async def test_named_devices(client: Any, scheduler: Any, worker: Any) -> None:
    with dask.annotate(devices=[3, 1]):
        assert await client.submit(mine, key="a") == (3, 1)
    with dask.annotate(devices=[Device(2).uuid, "cuda:0"]):
        assert await client.submit(mine, key="b") == (2, 0)
    assert await client.submit(on_device([1, 2])(mine), key="c") == (1, 2)
    with dask.annotate(devices=[1, "cuda:1"]), pytest.raises(ValueError, match="named once"):
        await client.submit(mine, key="d")


@with_plugin()
async def test_a_worker_that_has_too_few(client: Any, scheduler: Any, worker: Any) -> None:
    with dask.annotate(devices=5):
        future = client.submit(mine)
    with pytest.raises(NotEnoughDevicesError, match=r"has 4\. Ask for at most 4") as caught:
        await future
    assert caught.value.wanted == 5
    with dask.annotate(devices=[0, 7]), pytest.raises(DeviceNotFoundError):
        await client.submit(mine, key="named")


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"devices": 0}, ValueError, "at least 1, got 0.*device=0"),
    ({"devices": -1}, ValueError, "at least 1, got -1"),
    ({"devices": True}, TypeError, "got True of type bool"),
    ({"devices": 1.5}, TypeError, "a number of devices"),
    ({"devices": "0,1"}, TypeError, r"dask.annotate\(devices=\[0, 1\]\)$"),
    ({"devices": "cuda:1"}, TypeError, r"dask.annotate\(device='cuda:1'\)"),
    ({"devices": []}, ValueError, "names no device"),
    ({"devices": [0, None]}, TypeError, "a list of devices"),
    ({"devices": np.array([0, 1])}, TypeError, "a list of devices"),
    ({"devices": 2, "device": 1}, ValueError, "exclude each other"),
    ({"device": [0, 1]}, TypeError, r"dask.annotate\(devices=\[0, 1\]\)"),
    ({"device_share": 0}, ValueError, "above 0 and at most 1, got 0"),
    ({"device_share": 2}, ValueError, "devices=2"),
    ({"device_share": "half"}, TypeError, "got 'half' of type str"),
    ({"device_memory": 0}, ValueError, "at least 1"),
    ({"device_memory": "many"}, ValueError, "4 GiB"),
    ({"device_memory": [1]}, TypeError, "bytes, at least 1, .* of type tuple"),
    ({"device": "none", "device_share": 0.5}, ValueError, "asks for no device"),
    ({"devices": lambda key: 1 / 0}, ZeroDivisionError, "division"),
    ({"device_share": lambda key: "x"}, TypeError, "got 'x'"),
]


@with_plugin()
async def test_wrong(client: Any, scheduler: Any, worker: Any) -> None:
    for number, (wrong, error, message) in enumerate(WRONG):
        with dask.annotate(**wrong):
            future = client.submit(mine, key=f"wrong-{number}")
        with pytest.raises(error, match=message):
            await future
    assert len(await client.submit(mine, key="after")) == 1


@with_plugin()
async def test_annotations_that_are_close_to_ours_warn_once_at_the_client(
    client: Any, scheduler: Any, worker: Any
) -> None:
    for name, remedy in (("gpus", "devices=2"), ("gpu", "device=1"), ("devices", "device=1")):
        with pytest.warns(UserWarning, match=remedy) as caught:
            await three_times(client, name)
        assert len([one for one in caught if remedy in str(one.message)]) == 1


async def three_times(client: Any, name: str, value: object = 1) -> None:
    """Run three annotated tasks; the client hears of a warning then."""
    for number in range(3):
        with dask.annotate(**{name: value}):
            await client.submit(int, key=f"{name}-{number}")
    await asyncio.sleep(0.1)


@gen_cluster(client=True, nthreads=[])
async def test_an_annotation_that_no_worker_heeds(client: Any, scheduler: Any) -> None:
    with dask.config.set({"devctx.missing-device-timeout": "0 s"}):
        await scheduler.register_scheduler_plugin(DeviceRouting(), idempotent=False)
        async with Worker(scheduler.address):
            await asyncio.sleep(0.1)
            with pytest.warns(
                UserWarning, match="no worker of this cluster uses devices"
            ) as caught:
                await three_times(client, "device_share", 0.5)
            assert len(caught) == 1


# -- task_devices


def test_outside_of_a_task() -> None:
    with pytest.raises(RuntimeError, match="inside a task"):
        task_devices()


@with_plugin()
async def test_tasks_of_one_device_know_it(client: Any, scheduler: Any, worker: Any) -> None:
    async def coroutine() -> tuple[int, ...]:
        await asyncio.sleep(0)
        return mine()

    with dask.annotate(device=2):
        assert await client.submit(mine, key="function") == (2,)
        assert await client.submit(coroutine, key="coroutine") == (2,)


@with_plugin()
async def test_a_task_without_a_device_has_none(client: Any, scheduler: Any, worker: Any) -> None:
    async def coroutine() -> tuple[Device, ...]:
        await asyncio.sleep(0)
        return task_devices()

    with dask.annotate(device=None):
        assert await client.submit(task_devices, key="function") == ()
        assert await client.submit(coroutine, key="coroutine") == ()
    await client.unregister_worker_plugin("devctx")
    assert isinstance(await client.submit(task_devices, key="later").exception(), RuntimeError)


# -- shares


@with_plugin()
async def test_a_part_of_a_device(client: Any, scheduler: Any, worker: Any) -> None:
    with dask.annotate(device=1, device_share=0.25):
        parts = client.map(busy, [0.05] * 12, pure=False)
    with dask.annotate(device=1):
        whole = client.map(busy, [0.01] * 3, [4] * 3, pure=False)
    await client.gather(parts + whole)
    assert Seen.running.most == {1: 4}
    await nothing_held(worker)


@with_plugin(tasks_per_device=2)
async def test_tasks_that_say_nothing_count_as_one_place(
    client: Any, scheduler: Any, worker: Any
) -> None:
    with dask.annotate(device=0, device_share=0.25):
        parts = client.map(busy, [0.03] * 10, [1] * 10, pure=False)
    with dask.annotate(device=0):
        places = client.map(busy, [0.03] * 10, [2] * 10, pure=False)
    await client.gather(parts + places)
    assert Seen.running.most == {0: 4}


@with_plugin()
async def test_parts_run_on_threads_of_the_device(client: Any, scheduler: Any, worker: Any) -> None:
    def thread(_: int) -> str:
        time.sleep(0.1)
        return threading.current_thread().name

    with dask.annotate(device=3, device_share=0.5):
        names = await client.gather(client.map(thread, range(2)))
    assert len(set(names)) == 2
    assert all(name.startswith("devctx-cuda:3-") for name in names)


# -- reservations


@with_plugin()
async def test_a_reservation(client: Any, scheduler: Any, worker: Any) -> None:
    with dask.annotate(device=0, device_memory="6 GiB"):
        await client.gather(client.map(busy, [0.03] * 6, [6] * 6, pure=False))
    assert Seen.running.most == {0: 12}  # of 12.8 GiB
    with dask.annotate(device_memory="17 GiB"), pytest.raises(DeviceReservationError) as caught:
        await client.submit(mine)
    assert caught.value.nbytes == 17 * GIB


def nbytes_used() -> list[int]:
    """Return what dask's values and reservations take of each device."""
    spill = get_worker().plugins["devctx"].extension.store.spill
    return [spill.used(Device(number)) for number in range(3)]


@with_plugin(device_memory_limit=0.8)
async def test_room_is_made_for_a_reservation_and_given_back(
    client: Any, scheduler: Any, worker: Any
) -> None:
    with dask.annotate(devices=[0, 2], device_memory="3 GiB"):
        assert await client.submit(nbytes_used) == [3 * GIB, 0, 3 * GIB]
    with dask.annotate(device=1, device_memory=2**20):
        assert isinstance(await client.submit(divmod, 1, 0).exception(), ZeroDivisionError)
        actor = await client.submit(Running, actor=True)
    assert await client.submit(nbytes_used, pure=False) == [0, 2**20, 0]
    del actor
    gc.collect()
    await nothing_held(worker)
    assert await client.submit(nbytes_used, pure=False) == [0, 0, 0]


MIB = 2**20


def array() -> SimulatedArray:
    return SimulatedArray((12 * MIB,), "u1")


def free_nbytes() -> int:
    """Return how much of this task's device dask's values and other reservations leave."""
    extension = get_worker().plugins["devctx"].extension
    return 64 * MIB - extension.store.spill.used(task_devices()[0]) + 40 * MIB


@with_plugin(device_memory_limit="64 MiB")
async def test_values_leave_a_device_for_a_reservation(
    client: Any, scheduler: Any, worker: Any
) -> None:
    with dask.annotate(device=0):
        kept = [client.submit(array, pure=False) for _ in range(4)]
        await asyncio.gather(*kept)
    with dask.annotate(device=0, device_memory="40 MiB"):
        assert await client.submit(free_nbytes) >= 40 * MIB
    extension = worker.plugins["devctx"].extension
    await nothing_held(worker)
    assert extension.store.spill.used(Device(0)) <= 24 * MIB
    arrays = await asyncio.gather(*kept)
    assert all(one.nbytes == 12 * MIB for one in arrays)


# -- the end of a claim


def leaves() -> tuple[int, ...]:
    secede()
    Seen.go_on.wait(20)
    return mine()


def waits() -> None:
    Seen.go_on.wait(20)


@with_plugin()
async def test_failures_cancellation_and_secession_give_back(
    client: Any, scheduler: Any, worker: Any
) -> None:
    def fails() -> None:
        raise KeyError("it fails")

    with dask.annotate(devices="all"):
        failed = client.submit(fails)
        left = client.submit(leaves)
        assert isinstance(await failed.exception(), KeyError)
        running = client.submit(waits)
        waiting = client.submit(mine, key="waiting")
        after = client.submit(mine, key="after")
    await asyncio.sleep(0.1)
    assert waiting.status == after.status == "pending"
    await waiting.cancel()
    await asyncio.sleep(0.05)
    Seen.go_on.set()
    assert await after == (0, 1, 2, 3)
    assert await left == (0, 1, 2, 3)
    await running
    await nothing_held(worker)


@with_plugin()
async def test_a_claim_that_waits_is_given_back_as_soon_as_its_task_is_cancelled(
    client: Any, scheduler: Any, worker: Any
) -> None:
    with dask.annotate(device=1, device_share=0.5):
        running = client.submit(waits)
    with dask.annotate(device=1, device_share=1):
        waiting = client.submit(mine, key="waiting", priority=1)
    await asyncio.sleep(0.1)
    with dask.annotate(device=1, device_share=0.5):
        behind = client.submit(mine, key="behind")
    await asyncio.sleep(0.1)
    assert (waiting.status, behind.status) == ("pending", "pending")
    await waiting.cancel()
    assert await asyncio.wait_for(behind, 5) == (1,)
    assert running.status == "pending"
    Seen.go_on.set()
    await running
    await nothing_held(worker)


# -- many at once


class Used:
    """The shares and bytes of each device that tasks have now; a task that finds too much fails."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shares: Counter[int] = Counter()
        self.nbytes: Counter[int] = Counter()


used = Used()


def uses(number: int, devices: int, share: float, nbytes: int, seconds: float, fails: bool) -> int:
    had = mine()
    assert len(set(had)) == devices
    with used.lock:
        for one in had:
            used.shares[one] += int(share * 1000)
            used.nbytes[one] += nbytes
        assert max(used.shares.values()) <= 1000, used.shares
        assert max(used.nbytes.values()) <= LIMIT, used.nbytes
    try:
        time.sleep(seconds)
        if fails:
            raise KeyError(number)
        return number
    finally:
        with used.lock:
            for one in had:
                used.shares[one] -= int(share * 1000)
                used.nbytes[one] -= nbytes


LIMIT = int(0.8 * 16 * GIB)


@with_plugin(64, tasks_per_device=2)
async def test_500_random_tasks_never_exceed_a_device(
    client: Any, scheduler: Any, worker: Any
) -> None:
    choose = random.Random(0)
    futures, failing, cancelled = {}, set(), []
    for number in range(500):
        devices = choose.choice([1, 1, 1, 1, 2, 3, 4])
        share = choose.choice([None, None, 0.1, 0.25, 1.0])
        nbytes = choose.choice([None, None, GIB, 5 * GIB, LIMIT])
        annotations: dict[str, Any] = {"priority": choose.choice([0, 0, 1])}
        if devices > 1 or choose.random() < 0.1:
            named = choose.random() < 0.5
            annotations["devices"] = choose.sample(range(4), devices) if named else devices
        elif choose.random() < 0.5:
            annotations["device"] = choose.randrange(4)
        if share is not None:
            annotations["device_share"] = share
        if nbytes is not None:
            annotations["device_memory"] = nbytes
        counts = share or min(0.5, (nbytes or LIMIT) / LIMIT)
        seconds = choose.choice([0, 0.001, 0.005])
        fails = choose.random() < 0.05
        if annotations.get("devices") == 1:
            annotations["devices"] = [0]
        with dask.annotate(**annotations):
            future = client.submit(
                *(uses, number, devices, counts, nbytes or 0, seconds, fails), pure=False
            )
        if choose.random() < 0.05:
            cancelled.append(future)
        else:
            futures[number] = future
            if fails:
                failing.add(number)
    await client.cancel(cancelled)
    for number, future in futures.items():
        if number in failing:
            assert isinstance(await future.exception(), KeyError)
        else:
            assert await future == number
    await nothing_held(worker)
    assert not any(used.shares.values())
