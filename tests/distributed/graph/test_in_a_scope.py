"""A scope around a call that submits tasks: the client says that it means nothing to the tasks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import dask
import pytest
from distributed import Client, get_client

from dask_devctx import Device, on_device
from tests.distributed.devices import here, with_plugin

array = pytest.importorskip("dask.array")


def persist(client: Client) -> Any:
    return client.persist(array.ones(2))


CALLS: dict[str, Callable[[Client], Any]] = {
    "submit": lambda client: client.submit(here, pure=False),
    "map": lambda client: client.map(here, range(2), pure=False),
    "compute": lambda client: client.compute(array.ones(2)),
    "persist": persist,
}


@pytest.mark.parametrize("name", CALLS)
def test_the_warning_names_the_annotation(name: str) -> None:
    @with_plugin()
    async def test(client: Any) -> None:
        expected = rf"the scope of cuda:3 .*client\.{name}.*dask\.annotate\(device=3\)"
        with Device(3), pytest.warns(UserWarning, match=expected) as caught:
            CALLS[name](client)
        assert [one.filename for one in caught] == [__file__]
        with Device(0), Device(3).synchronized(), pytest.warns(UserWarning, match=expected):
            CALLS[name](client)
        CALLS[name](client)  # no scope is open any more

    test()


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
