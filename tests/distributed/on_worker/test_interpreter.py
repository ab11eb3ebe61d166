"""Python's own settings in a worker's process, and that they are put back."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import dask
import pytest
from distributed import Client

from dask_devctx import DevicePlugin
from dask_devctx.cuda.out_of_memory import release_caches
from tests.distributed.devices import on_cluster, started


@on_cluster(2, 2)
async def test_the_switch_interval(client: Any, *workers: Any) -> None:
    before = sys.getswitchinterval()
    await client.register_plugin(DevicePlugin())
    assert sys.getswitchinterval() == pytest.approx(1e-3, rel=0.02)
    await workers[0].close()
    assert sys.getswitchinterval() == pytest.approx(1e-3, rel=0.02), "the other is there"
    await client.unregister_worker_plugin("devctx")
    assert sys.getswitchinterval() == before


@on_cluster(2)
async def test_the_switch_interval_is_left_alone(client: Any) -> None:
    before = sys.getswitchinterval()
    with dask.config.set({"devctx.switch-interval": None}):
        await client.register_plugin(DevicePlugin())
    assert sys.getswitchinterval() == before


@on_cluster(2)
async def test_what_others_set_meanwhile_stays(client: Any) -> None:
    before = sys.getswitchinterval()
    try:
        await client.register_plugin(DevicePlugin())
        sys.setswitchinterval(0.002)
        await client.unregister_worker_plugin("devctx")
        assert sys.getswitchinterval() == pytest.approx(0.002, rel=0.02)
    finally:
        sys.setswitchinterval(before)


def frozen(client: Client, wanted: Callable[[int], bool]) -> int:
    deadline = time.monotonic() + 10
    while True:
        (count,) = client.run(gc.get_freeze_count).values()
        if wanted(count) or time.monotonic() > deadline:
            return int(count)
        time.sleep(0.05)


def test_modules_are_left_out_of_collections_while_no_task_is_there() -> None:
    ours = gc.get_freeze_count()  # a Python may come with some
    with started(n_workers=1, processes=True) as client:
        assert frozen(client, lambda count: count > 1000) > 1000
        client.run(release_caches)  # as after a device's memory ran out
        assert frozen(client, lambda count: count < 1000) < 1000

        held = client.submit(__import__, "wave")
        held.result()
        time.sleep(1.5)
        assert frozen(client, lambda count: True) < 1000, "a task's objects could be among them"
        del held
        assert frozen(client, lambda count: count > 1000) > 1000

        client.unregister_worker_plugin("devctx")
        assert frozen(client, lambda count: count < 1000) < 1000
        assert gc.get_freeze_count() == ours, "this process is not the worker's own"
