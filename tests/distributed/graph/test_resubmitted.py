"""The same pure task for two devices: dask runs it once, and the client says so."""

from __future__ import annotations

import warnings

import dask
import pytest
from distributed import Client
from distributed.utils_test import async_poll_for

from dask_devctx import on_device
from tests.distributed.devices import here, with_plugin


@with_plugin(16)
async def test_a_second_device_for_the_same_task_warns(client: Client) -> None:
    with dask.annotate(device=0):
        first = client.submit(here, 1)
        same = client.submit(here, 1)
    with (
        dask.annotate(device=1),
        pytest.warns(UserWarning, match="device=0 .*device=1: .*pure=False"),
    ):
        second = client.submit(here, 1)
    assert await client.gather([first, same, second]) == [0, 0, 0]
    with warnings.catch_warnings(), dask.annotate(device=1):
        warnings.simplefilter("error")
        assert await client.submit(here, 1, pure=False) == 1
    assert await client.submit(on_device(2)(here), 1) == 2  # another key


@with_plugin(16)
async def test_other_annotations_for_the_same_task_warn(client: Client) -> None:
    with dask.annotate(devices=2):
        first = client.submit(here, 1)
    other = pytest.warns(UserWarning, match="=2 .* so dask ignores device_share=0.5, devices=3:")
    with dask.annotate(devices=3, device_share=0.5), other as caught:
        assert await client.submit(here, 1) == await first
    assert [one.filename for one in caught] == [__file__]


@with_plugin(16)
async def test_a_task_that_was_released_is_another(client: Client) -> None:
    for device in (0, 1):
        with dask.annotate(device=device):
            future = client.submit(here, 1)
            assert await future == device
        future.release()
        await async_poll_for(lambda: not client.futures, timeout=10)
