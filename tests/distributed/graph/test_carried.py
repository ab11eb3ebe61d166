"""A function that carries its device, ``on_device(...)(fn)``, is heeded as an annotation is."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import dask
import pytest
from distributed import Client, get_client
from distributed.utils_test import async_poll_for

from dask_devctx import Device, DeviceNotFoundError, DevicePlugin, SimulatedArray, on_device
from tests.distributed.devices import here, on_cluster, with_plugin


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
    with dask.annotate(device=0):
        there = client.submit(lambda: SimulatedArray((10,)))
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
        with dask.annotate(device=device):
            future = client.submit(here, 1)
            assert await future == device
        future.release()
        await async_poll_for(lambda: not client.futures, timeout=10)


array = pytest.importorskip("dask.array")


CALLS: dict[str, Callable[[Client], Any]] = {
    "submit": lambda client: client.submit(here, pure=False),
    "map": lambda client: client.map(here, range(2), pure=False),
    "compute": lambda client: client.compute(array.ones(2)),
    "persist": lambda client: client.persist(array.ones(2)),
}


@pytest.mark.parametrize("name", CALLS)
@with_plugin()
async def test_the_warning_names_the_annotation(client: Any, name: str) -> None:
    expected = rf"the scope of cuda:3 .*client\.{name}.*dask\.annotate\(device=3\)"
    with Device(3), pytest.warns(UserWarning, match=expected) as caught:
        CALLS[name](client)
    assert [one.filename for one in caught] == [__file__]
    with Device(0), Device(3).synchronized(), pytest.warns(UserWarning, match=expected):
        CALLS[name](client)
    CALLS[name](client)  # no scope is open any more


@with_plugin()
async def test_one_warning_for_each_place(client: Any) -> None:
    with warnings.catch_warnings(record=True) as caught, Device(3):
        warnings.simplefilter("default")
        for _ in range(3):
            client.submit(here, pure=False)
        client.submit(here, pure=False)
    assert len(caught) == 2


@with_plugin()
async def test_a_call_that_names_a_device_warns_of_nothing(client: Any) -> None:
    with Device(3):
        with dask.annotate(device=1):
            assert await client.submit(here, pure=False) == 1
        with dask.annotate(device="auto"):
            await client.submit(here, pure=False)
        assert await client.submit(on_device(2)(here), pure=False) == 2


def submits_a_task() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        get_client().submit(here, pure=False)
    return [str(one.message) for one in caught]


class Submits:
    def submit(self) -> list[str]:
        return submits_a_task()


@with_plugin()
async def test_tasks_and_actors_that_submit_tasks_warn_of_nothing(client: Any) -> None:
    assert await client.submit(submits_a_task) == []
    actor = await client.submit(Submits, actor=True)
    assert await actor.submit() == []
    assert set(map(tuple, (await client.run(submits_a_task)).values())) == {()}
