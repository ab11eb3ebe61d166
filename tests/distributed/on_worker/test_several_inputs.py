"""Inputs and results of tasks of several devices: where they are, and in which order."""

from __future__ import annotations

from typing import Any

import dask
from distributed.utils_test import gen_cluster

from dask_devctx import Device, DevicePlugin, SimulatedArray, device_of, task_devices
from tests.distributed.devices import with_plugin
from tests.distributed.on_worker.test_several import mine, nothing_held


def array_on(ordinal: int) -> SimulatedArray:
    with Device(ordinal):
        return SimulatedArray.asarray([float(ordinal)] * 4)


def homes(*arrays: Any) -> list[int]:
    found = [device_of(one) for one in arrays]
    return [device.device_id for device in found if device is not None]


def homes_of(arrays: Any) -> list[int]:
    return homes(*arrays)


def spread() -> list[SimulatedArray]:
    return [array_on(device.device_id) for device in task_devices()]


def totals(arrays: Any) -> list[float]:
    sums = []
    for one in arrays:
        with device_of(one) or Device(0):
            sums.append(float(one.sum()))
    return sums


@with_plugin()
async def test_inputs_stay_on_the_tasks_devices_or_come_to_the_first(
    client: Any, scheduler: Any, worker: Any
) -> None:
    arrays = []
    for n in range(4):
        with dask.annotate(device=n):
            arrays.append(client.submit(array_on, n))
    with dask.annotate(devices=[2, 0]):
        assert await client.submit(homes, *arrays) == [0, 2, 2, 2]
        assert await client.submit(totals, arrays) == [0, 4, 8, 12]


@with_plugin()
async def test_a_value_on_several_devices(client: Any, scheduler: Any, worker: Any) -> None:
    with dask.annotate(devices=[1, 3]):
        value = client.submit(spread)
        assert await client.submit(homes_of, value, key="kept") == [1, 3]
    with dask.annotate(devices=[0, 3]):  # a part lives elsewhere: the value comes as a whole
        assert await client.submit(homes_of, value, key="moved") == [0, 0]
    with dask.annotate(device=2):
        assert await client.submit(homes_of, value, key="moved-to-one") == [2, 2]
        assert await client.submit(totals, value, key="right") == [4, 12]
    fetched = await value
    assert [one.tolist() for one in fetched] == [[1.0] * 4, [3.0] * 4]
    del value, fetched
    await nothing_held(worker)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 8)] * 2, timeout=60)
async def test_a_value_on_several_devices_goes_to_another_worker(
    client: Any, scheduler: Any, one: Any, other: Any
) -> None:
    await client.register_plugin(DevicePlugin(devices_per_worker=2))
    with dask.annotate(devices=2):
        value = client.submit(spread, workers=[one.address])
        there = client.submit(mine, workers=[one.address], key="there")
        sums = client.submit(totals, value, workers=[other.address], key="sums")
    assert await sums == [4.0 * n for n in await there]


def first(task_sees: Any) -> tuple[int, ...]:
    return mine()


@with_plugin()
async def test_devices_that_hold_the_inputs_are_preferred(
    client: Any, scheduler: Any, worker: Any
) -> None:
    found = []
    for pair in ([0, 1], [1, 2], [2, 3], [0, 3]):
        with dask.annotate(devices=pair):
            value = client.submit(large, pure=False)
        await value
        with dask.annotate(devices=2):
            found.append((sorted(await client.submit(first, value, pure=False)), pair))
    assert all(had == pair for had, pair in found)


def large() -> list[SimulatedArray]:
    made = []
    for device in task_devices():
        with device:
            made.append(SimulatedArray((1 << 20,)))
    return made
