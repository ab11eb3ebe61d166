"""Tasks of several devices, of a part of one, and with a reservation of its memory."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import dask
import numpy as np
import pytest
from distributed import get_worker, secede
from distributed.utils_test import async_poll_for, wait_for_state

from dask_devctx import DevctxError, Device, DevicePlugin, SimulatedArray, device_of, task_devices
from dask_devctx.worker.placement.policy import Candidate, choose_group
from tests.distributed.devices import here, on_cluster, submit_on, with_plugin

GIB = 2**30


def mine(*_: object) -> tuple[int, ...]:
    devices = task_devices()
    assert here() == devices[0].device_id
    return tuple(device.device_id for device in devices)


LIMIT = int(0.8 * 16 * GIB)


class Used:
    """The shares and bytes of each device that tasks have now; a task that finds too much fails."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shares: Counter[int] = Counter()
        self.nbytes: Counter[int] = Counter()
        self.most_nbytes = 0


used = Used()


def uses(
    number: int,
    devices: int,
    share: float,
    nbytes: int = 0,
    seconds: float = 0.02,
    fails: bool = False,
) -> int:
    had = mine()
    assert len(set(had)) == devices
    with used.lock:
        for one in had:
            used.shares[one] += int(share * 1000)
            used.nbytes[one] += nbytes
        used.most_nbytes = max(used.most_nbytes, *used.nbytes.values())
        assert max(used.shares.values()) <= 1000, used.shares
        assert used.most_nbytes <= LIMIT, used.nbytes
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


go_on = threading.Event()


@pytest.fixture(autouse=True)
def nobody_waits() -> Iterator[None]:
    go_on.clear()
    used.most_nbytes = 0
    yield
    go_on.set()


async def nothing_held(worker: Any) -> None:
    admission = worker.plugins["devctx"].extension.admission
    states = admission.states.values()
    await async_poll_for(
        lambda: not any(one.holding or admission.waiting_for(one.device) for one in states),
        timeout=10,
    )


@with_plugin()
async def test_a_number_of_devices_and_named_ones(client: Any, worker: Any) -> None:
    with dask.annotate(devices=2):
        await client.gather(client.map(uses, range(8), devices=2, share=1.0, pure=False))
    with dask.annotate(devices="all"):
        assert await client.submit(mine, key="all") == (0, 1, 2, 3)
    with dask.annotate(devices=lambda key: 3):
        assert len(await client.submit(mine, key="three")) == 3
    with dask.annotate(devices=[3, Device(2).uuid, "cuda:0"]):
        assert await client.submit(mine, key="named") == (3, 2, 0)
    assert len(await client.submit(mine, key="one")) == 1
    three = {"devices": 1, "share": 1 / 3, "nbytes": 1, "seconds": 0.3, "pure": False}
    with dask.annotate(device=0, device_share=1 / 3):
        await client.gather(client.map(uses, range(3), **three))
    assert used.most_nbytes == 3, "three thirds are a whole"
    await nothing_held(worker)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"devices": 0}, ValueError, "at least 1, .*device=0.* got 0"),
    ({"devices": -1}, ValueError, "at least 1, .* got -1"),
    ({"devices": True}, TypeError, "one of these; got True of type bool"),
    ({"devices": 1.5}, TypeError, "a number of devices"),
    ({"devices": np.array([0, 1])}, TypeError, "a list of devices"),
    ({"devices": 2.0}, TypeError, r"a number of devices, .*annotate\(devices=2\)"),
    ({"device": "all"}, DevctxError, r"dask.annotate\(devices='all'\)"),
    *(({"devices": n}, TypeError, r"dask.annotate\(devices=\[0, 1\]\)") for n in ("0,1", {0, 1})),
    ({"devices": "cuda:1"}, TypeError, r"dask.annotate\(device='cuda:1'"),
    ({"devices": []}, ValueError, "a list of devices"),
    ({"devices": [0, None]}, TypeError, "a list of devices"),
    ({"devices": [1, "cuda:1"]}, ValueError, "named once"),
    ({"devices": 2, "device": 1}, ValueError, "exclude each other"),
    ({"device": [0, 1]}, TypeError, r"dask.annotate\(devices=\[0, 1\]\)"),
    ({"device_share": 0}, ValueError, "above 0 and at most 1 .*got 0"),
    ({"device_share": 2}, ValueError, "devices=2"),
    ({"device_share": "half"}, TypeError, "got 'half' of type str"),
    *(({"device_memory": one}, ValueError, 'at least 1, .*"4 GiB"') for one in (0, "many")),
    ({"device_memory": [1]}, TypeError, "bytes, at least 1, .* of type tuple"),
    ({"device": "none", "device_share": 0.5}, ValueError, "asks for no device"),
    ({"rerun": "no"}, TypeError, "'rerun' is True or False"),
    ({"devices": 2, "executor": "default"}, DevctxError, "leave out the annotation 'executor'"),
    ({"devices": lambda key: 1 / 0}, ZeroDivisionError, "division"),
    ({"device_share": lambda key: "x"}, TypeError, "got 'x'"),
    ({"device_share": lambda key: Device(1)}, TypeError, "of type Device"),
    ({"devices": lambda key: Device(3)}, TypeError, "device=<Device cuda:3"),
]


@with_plugin()
async def test_wrong(client: Any) -> None:
    for number, (wrong, error, message) in enumerate(WRONG):
        with dask.annotate(**wrong):
            future = client.submit(mine, key=f"wrong-{number}")
        with pytest.raises(error, match=message):
            await future
    assert len(await client.submit(mine, key="after")) == 1


@with_plugin()
async def test_a_failed_task_lets_its_inputs_go(client: Any, worker: Any, machine: Any) -> None:
    gc.disable()
    try:
        for wanted in {"devices": 9}, {"device": None}, {"device": 1}, {"executor": "default"}:
            # One keeps an array; the other is a coroutine function that raises when it is called.
            for task in lambda value: [more := [value], 1 / 0, more], asyncio.wait:
                given = client.submit(array_on, 1, pure=False)
                with dask.annotate(**wanted):
                    assert await client.submit(task, given, pure=False).exception()
                del given
                await async_poll_for(lambda: not any(g.used_memory for g in machine.gpus), 10)
        given, running = client.submit(array_on, 1), submit_on(client, 1, time.sleep, 0.3)
        queued = submit_on(client, 1, mine, given, key="queued")
        await wait_for_state("queued", "executing", worker)
        await asyncio.gather(queued.cancel(), running)
        del given
        await async_poll_for(lambda: not any(g.used_memory for g in machine.gpus), 10)
    finally:
        gc.enable()


@with_plugin()
async def test_a_task_without_a_device_has_none(client: Any) -> None:
    async def coroutine() -> tuple[Device, ...]:
        await asyncio.sleep(0)
        return task_devices()

    assert await submit_on(client, None, task_devices, key="function") == ()
    assert await submit_on(client, None, coroutine, key="coroutine") == ()
    await client.unregister_worker_plugin("devctx")
    assert isinstance(await client.submit(task_devices, key="later").exception(), RuntimeError)


@with_plugin()
async def test_a_reservation(client: Any) -> None:
    with dask.annotate(device=0, device_memory="6 GiB"):
        six = {"devices": 1, "share": 0.1, "nbytes": 6 * GIB}
        await client.gather(client.map(uses, range(6), **six, pure=False))
    assert used.most_nbytes == 12 * GIB  # of 12.8
    with dask.annotate(device_memory="17 GiB"), pytest.raises(DevctxError, match=r"17\.0 GiB"):
        await client.submit(mine)


MIB = 2**20


def array() -> SimulatedArray:
    return SimulatedArray((12 * MIB,), "u1")


def free_nbytes() -> int:
    """Return how much of this task's device dask's values and other reservations leave."""
    extension = get_worker().plugins["devctx"].extension
    return 64 * MIB - extension.store.spill.counts(task_devices()[0])["held"]


@with_plugin(device_memory_limit="64 MiB")
async def test_values_leave_a_device_for_a_reservation(client: Any, worker: Any) -> None:
    kept = [submit_on(client, 0, array, pure=False) for _ in range(4)]
    await asyncio.gather(*kept)
    with dask.annotate(device=0, device_memory="40 MiB"):
        assert await client.submit(free_nbytes) >= 40 * MIB
    extension = worker.plugins["devctx"].extension
    await nothing_held(worker)
    assert extension.store.spill.counts(Device(0))["held"] <= 24 * MIB
    arrays = await asyncio.gather(*kept)
    assert all(one.nbytes == 12 * MIB for one in arrays)


def hold() -> tuple[int, ...]:
    go_on.wait(20)
    return mine()


def leaves() -> tuple[int, ...]:
    secede()
    go_on.wait(20)
    return mine()


@with_plugin()
async def test_failures_cancellation_and_secession_give_back(client: Any, worker: Any) -> None:
    def fails() -> None:
        raise KeyError("it fails")

    with dask.annotate(devices="all"):
        failed = client.submit(fails)
        left = client.submit(leaves)
        assert isinstance(await failed.exception(), KeyError)
        running = client.submit(hold, pure=False)
        waiting = client.submit(mine, key="waiting")
        after = client.submit(mine, key="after")
    await asyncio.sleep(0.1)
    assert waiting.status == after.status == "pending"
    await waiting.cancel()
    await asyncio.sleep(0.05)
    go_on.set()
    assert await after == (0, 1, 2, 3)
    assert await left == (0, 1, 2, 3)
    await running
    await nothing_held(worker)
    go_on.clear()
    running = submit_on(client, 0, hold, pure=False)
    with dask.annotate(devices="all"):
        waiting = client.submit(mine, key="waits again")
    behind = submit_on(client, 1, mine, key="behind")
    await asyncio.sleep(0.1)
    await waiting.cancel()
    assert await asyncio.wait_for(behind, 5) == (1,), "its device is idle"
    go_on.set()
    await running


@with_plugin(tasks_per_device=2)
async def test_a_cancelled_task_that_waits_for_memory_holds_up_no_other(
    client: Any, worker: Any
) -> None:
    admission = worker.plugins["devctx"].extension.admission
    with dask.annotate(device=0, device_memory="8 GiB"):
        running = client.submit(hold)
        waiting = client.submit(mine, key="waits")
    behind = submit_on(client, 0, mine, key="behind")
    await async_poll_for(lambda: admission.waiting_for(Device(0)) == 2, timeout=10)
    await waiting.cancel()
    assert await asyncio.wait_for(behind, 10) == (0,), "a slot and memory are free"
    go_on.set()
    await running


@with_plugin(64, tasks_per_device=2)
async def test_500_random_tasks_never_exceed_a_device(client: Any, worker: Any) -> None:
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


def array_on(ordinal: int) -> SimulatedArray:
    with Device(ordinal):
        return SimulatedArray.asarray([float(ordinal)] * 4)


def homes(*arrays: Any) -> list[int]:
    found = [device_of(one) for one in arrays]
    return [device.device_id for device in found if device is not None]


def homes_of(arrays: Any) -> list[int]:
    return homes(*arrays)


def totals(arrays: Any) -> list[float]:
    sums = []
    for one in arrays:
        with device_of(one) or Device(0):
            sums.append(float(one.sum()))
    return sums


@with_plugin()
async def test_inputs_stay_on_the_tasks_devices_or_come_to_the_first(client: Any) -> None:
    arrays = []
    for n in range(4):
        arrays.append(submit_on(client, n, array_on, n))
    with dask.annotate(devices=[2, 0]):
        assert await client.submit(homes, *arrays) == [0, 2, 2, 2]
        assert await client.submit(totals, arrays) == [0, 4, 8, 12]


@with_plugin()
async def test_a_value_on_several_devices(client: Any, worker: Any) -> None:
    with dask.annotate(devices=[1, 3]):
        value = client.submit(lambda: [array_on(one.device_id) for one in task_devices()])
        assert await client.submit(homes_of, value, key="kept") == [1, 3]
    with dask.annotate(devices=[0, 3]):  # a part lives elsewhere: the value comes as a whole
        assert await client.submit(homes_of, value, key="moved") == [0, 0]
    assert await submit_on(client, 2, homes_of, value, key="moved-to-one") == [2, 2]
    assert await submit_on(client, 2, totals, value, key="right") == [4, 12]
    fetched = await value
    assert [one.tolist() for one in fetched] == [[1.0] * 4, [3.0] * 4]
    del value, fetched
    await nothing_held(worker)


# -- claims of coroutines and actors, and their end


class Model:
    def __init__(self) -> None:
        self.made_on = mine()

    def where(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.made_on, mine()

    async def where_later(self) -> tuple[int, ...]:
        await asyncio.sleep(0)
        return mine()

    def places(self, arrays: Any) -> list[int]:
        return homes(*arrays)


@with_plugin()
async def test_an_actor_is_on_its_devices_and_keeps_no_part_of_them(
    client: Any, worker: Any
) -> None:
    with dask.annotate(devices=[1, 3]):
        actor = await client.submit(Model, actor=True)
    assert await actor.where() == ((1, 3), (1, 3))
    assert await actor.where_later() == (1, 3)
    arrays = []
    for device in (1, 2, 3):
        with Device(device):
            arrays.append(SimulatedArray((4,)))
    assert await actor.places(arrays) == [1, 1, 1]
    found = await client.gather(client.map(mine, range(12), pure=False))
    assert set(found) == {(0,), (1,), (2,), (3,)}
    await client.register_plugin(DevicePlugin())  # again: it stays where it is
    assert await actor.where() == ((1, 3), (1, 3))
    with dask.annotate(devices="all"):
        assert await client.submit(mine) == (0, 1, 2, 3)
    await nothing_held(worker)


@with_plugin()
async def test_the_plugins_end_lets_those_that_wait_run(client: Any, worker: Any) -> None:
    with dask.annotate(devices="all"):
        first = client.submit(hold, key="first")
        second = client.submit(mine, key="second")
        admission = worker.plugins["devctx"].extension.admission
        await async_poll_for(lambda: admission.waiting_for(Device(0)), timeout=10)
        await client.unregister_worker_plugin("devctx")
        go_on.set()
        assert await first == await second == (0, 1, 2, 3)


@on_cluster(16)
async def test_a_worker_closes_while_claims_wait(client: Any, worker: Any) -> None:
    await client.register_plugin(DevicePlugin())
    with dask.annotate(devices="all"):
        futures = [client.submit(hold, key="first"), client.submit(mine, key="second")]
    admission = worker.plugins["devctx"].extension.admission
    await async_poll_for(lambda: admission.waiting_for(Device(0)), timeout=10)
    asyncio.get_running_loop().call_later(0.2, go_on.set)
    await asyncio.wait_for(worker.close(), 10)
    assert futures[1].status != "error"


def chosen(count: int, *busy_s: float, have: Sequence[int] = ()) -> list[int]:
    """Return the ordinals of the devices for a task with inputs of n + 1 GiB on some devices n."""
    total = sum(n + 1 for n in have)
    candidates = [
        Candidate(Device(n), int(s > 0), s, (total - (n + 1) * (n in have)) * GIB, n)
        for n, s in enumerate(busy_s)
    ]
    return [device.device_id for device in choose_group(candidates, count)]


def test_those_that_are_free_soonest() -> None:
    assert chosen(2, 3, 0, 2, 1) == [1, 3]
    assert chosen(3, 3, 0, 2, 1) == [1, 2, 3]


@pytest.mark.parametrize("have", [[2, 3], [3, 1]])
def test_those_that_hold_the_inputs(have: list[int]) -> None:
    assert chosen(2, 0, 0, 0, 0, have=have) == sorted(have, reverse=True)  # the most bytes first
    assert chosen(2, 0, 0, 10, 10, have=have) == ([0, 1] if have == [2, 3] else [1, 0])
