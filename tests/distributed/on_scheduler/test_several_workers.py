"""Tasks that ask for more than one device go to a worker that has it, or fail at once."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import dask
import pytest
from distributed import Worker, get_worker

from dask_devctx import (
    Device,
    DeviceNotFoundError,
    DevicePlugin,
    DeviceReservationError,
    NotEnoughDevicesError,
    on_device,
    task_devices,
)
from tests.distributed.devices import on_cluster


def worker_and_devices(*_: object) -> tuple[str, tuple[int, ...]]:
    return get_worker().address, tuple(device.device_id for device in task_devices())


async def with_devices(worker: Worker, *ordinals: int, **options: Any) -> None:
    """Give a worker a plugin of its own."""
    uuids = [Device(n).uuid for n in ordinals]
    await worker.plugin_add(DevicePlugin(devices=uuids, **options))


async def split(scheduler: Any, *workers: Worker) -> None:
    """Give the first worker one device, and the second worker two."""
    await with_devices(workers[0], 3)
    await with_devices(workers[1], 0, 2)


@on_cluster(8, 8)
async def test_to_the_worker_that_has_enough(client: Any, scheduler: Any, a: Any, b: Any) -> None:
    await split(scheduler, a, b)
    with dask.annotate(devices=2):
        found = await client.gather(client.map(worker_and_devices, range(8), pure=False))
    assert {address for address, _ in found} == {b.address}
    with dask.annotate(devices=[Device(2).uuid, Device(0).uuid]):
        assert await client.submit(worker_and_devices, 1) == (b.address, (2, 0))
    carried = client.submit(on_device([Device(0).uuid, 2])(worker_and_devices), 2)
    assert await carried == (b.address, (0, 2))
    with dask.annotate(devices="all"):
        found = await client.gather(client.map(worker_and_devices, range(20), pure=False))
    assert set(found) <= {(a.address, (3,)), (b.address, (0, 2))}


@on_cluster(8, 8)
async def test_where_no_worker_has_enough(client: Any, scheduler: Any, a: Any, b: Any) -> None:
    await split(scheduler, a, b)
    start = time.monotonic()
    with dask.annotate(devices=3), pytest.raises(NotEnoughDevicesError, match="n_workers=1"):
        await client.submit(worker_and_devices)
    assert time.monotonic() - start < 5
    # Each has some of them.
    asked = r"at once \(cuda:2 .*, cuda:3 .*\), .* has all of them.*n_workers=1\)$"
    with dask.annotate(devices=[2, 3]), pytest.raises(NotEnoughDevicesError, match=asked):
        await client.submit(worker_and_devices, key="named")
    with dask.annotate(devices=[2, 7]), pytest.raises(DeviceNotFoundError, match="no device 7"):
        await client.submit(worker_and_devices, key="missing")


@on_cluster(8, 8)
async def test_a_device_that_no_worker_uses(client: Any, a: Any, b: Any) -> None:
    """The error names the devices of all workers, and no other."""
    await with_devices(a, 0)
    await with_devices(b, 1)
    for missing in (3, 7):
        with dask.annotate(device=missing), pytest.raises(DeviceNotFoundError) as caught:
            await client.submit(worker_and_devices, key=f"on-{missing}")
        assert caught.value.available == (str(Device(0).info), str(Device(1).info))
        assert "No worker of this cluster uses it" in str(caught.value)


@on_cluster(8, 8)
async def test_a_worker_that_has_just_left_is_waited_for(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    await split(scheduler, a, b)
    await b.close()
    with dask.annotate(devices=2):
        waiting = client.submit(worker_and_devices)
    await asyncio.sleep(0.2)
    assert not waiting.done()
    async with Worker(scheduler.address, nthreads=8) as again:
        await with_devices(again, 0, 2)
        assert await waiting == (again.address, (0, 2))


@on_cluster(8, 8)
async def test_to_a_worker_whose_limit_allows_the_reservation(client: Any, a: Any, b: Any) -> None:
    await with_devices(a, 0, 1, device_memory_limit="2 GiB")
    await with_devices(b, 2, 3, device_memory_limit="4 GiB")
    with dask.annotate(device_memory="3 GiB"):
        found = await client.gather(client.map(worker_and_devices, range(8), pure=False))
    assert {address for address, _ in found} == {b.address}
    with dask.annotate(devices=2, device_memory="5 GiB"):
        error = await client.submit(worker_and_devices).exception()
    assert isinstance(error, DeviceReservationError)
    assert set(error.limits.values()) <= {2 * 2**30, 4 * 2**30}
