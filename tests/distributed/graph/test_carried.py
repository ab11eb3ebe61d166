"""A function that carries its device, ``on_device(...)(fn)``, is heeded as an annotation is."""

from __future__ import annotations

import threading
import time
from typing import Any

import dask
import pytest
from distributed import Client
from distributed.utils_test import async_poll_for

from dask_devctx import DeviceNotFoundError, DevicePlugin, SimulatedArray, on_device
from tests.distributed.devices import here, on_cluster, submit_on, with_plugin


def slow_where(number: int) -> tuple[int | None, str]:
    time.sleep(0.02)
    return here(), threading.current_thread().name


@on_cluster(16)
async def test_a_function_that_carries_its_device(client: Any) -> None:
    """As if it were annotated: it waits for its turn there, and its inputs come to it."""
    await client.register_plugin(DevicePlugin())
    for where, name in await client.gather(client.map(on_device(1)(slow_where), range(6))):
        assert where == 1
        assert name.startswith("devctx-cuda:1-")
    there = submit_on(client, 0, lambda: SimulatedArray((10,)))
    assert await client.submit(on_device(2)(lambda x: (x + 1).device.device_id), there) == 2
    with dask.annotate(device=3):  # the annotation wins, until the function is called
        where, name = await client.submit(on_device(1)(slow_where), 7)
    assert where == 1
    assert name.startswith("devctx-cuda:3-")
    for same in ({"device": "cuda:1"}, {"device": "auto"}, {"devices": [1]}, {"device_share": 1}):
        with dask.annotate(**same):
            where, name = await client.submit(on_device(1)(slow_where), 7, pure=False)
        assert where == 1
        assert name.startswith("devctx-cuda:1-")
    error = await client.submit(on_device(9)(slow_where), 8).exception()
    assert isinstance(error, DeviceNotFoundError)


@pytest.mark.parametrize("name", ["cuda", "gpu"])
@on_cluster(16)
async def test_torchs_word_for_its_own_device(client: Any, name: str) -> None:
    await client.register_plugin(DevicePlugin())
    with dask.annotate(device=name):
        annotated = client.map(here, range(32), pure=False)
    carried = client.map(on_device(name)(here), range(32), pure=False)
    assert set(await client.gather(annotated)) == set(await client.gather(carried)) == {0, 1, 2, 3}


@with_plugin(16)
async def test_a_task_that_was_released_is_another(client: Client) -> None:
    for device in (0, 1):
        future = submit_on(client, device, here, 1)
        assert await future == device
        future.release()
        await async_poll_for(lambda: not client.futures, timeout=10)
