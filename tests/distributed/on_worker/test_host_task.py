"""Tasks without a device: nothing is current in them, and nothing stays current after them."""

from __future__ import annotations

import asyncio
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Worker

from dask_devctx import Device, SimulatedArray, device_of
from tests.distributed.devices import here, with_plugin


def make(n: int = 10) -> SimulatedArray:
    return SimulatedArray.asarray(np.ones(n))


def leaves_one(*_: object) -> int | None:
    """Leave a device current, as CuPy does that was called with nothing current."""
    before = here()
    Device(0).set_current()
    return before


async def leaves_one_later(*_: object) -> int | None:
    before = here()
    Device(0).set_current()
    await asyncio.sleep(0.001)
    Device(0).set_current()
    return before


@pytest.mark.parametrize("function", [leaves_one, leaves_one_later])
@with_plugin(1, devices=[0, 1])
async def test_what_a_task_leaves_current_the_next_does_not_see(
    client: Any, scheduler: Any, worker: Worker, function: Any
) -> None:
    x = client.submit(make)
    with dask.annotate(device=None):
        for inputs in ((), (x,), (), (x,)):
            assert await client.submit(function, *inputs, pure=False) is None
            assert here() is None, "it is current on the event loop"


@pytest.mark.parametrize("limit", ["auto", 0])
def test_where_the_first_device_is_not_the_workers_the_inputs_are_read_without_it(
    limit: str | int,
) -> None:
    """CuPy makes a context on the first device when it copies to the host with nothing current."""

    @with_plugin(2, devices=[2, 3], device_memory_limit=limit)
    async def body(client: Any, scheduler: Any, worker: Worker) -> None:
        with dask.annotate(device=3):
            x = client.submit(make)
        y = client.submit(list, range(10))
        with dask.annotate(device=None):
            assert await client.submit(here, x, pure=False) == 2
            assert await client.submit(ordinal, x, pure=False) == 3
            assert await client.submit(here_later, x, pure=False) == [2, 2]
            assert await client.submit(here, y, pure=False) is None
            assert await client.submit(leaves_one, x, pure=False) == 2
            for _ in range(3):
                assert await client.submit(here, pure=False) is None
        await client.unregister_worker_plugin("devctx")

    body()


def ordinal(array: SimulatedArray) -> int:
    found = device_of(array)
    assert found is not None
    return found.device_id


async def here_later(_: object) -> list[int | None]:
    before = here()
    await asyncio.sleep(0.001)
    return [before, here()]
