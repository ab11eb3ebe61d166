"""The scheduler is told which devices a worker has."""

from __future__ import annotations

from typing import Any

import dask
import pytest
from distributed import Client, Scheduler, Worker, rpc
from distributed.utils_test import async_poll_for, captured_logger

from dask_devctx import Device, DeviceNotFoundError, DevicePlugin
from dask_devctx.scheduler import routing
from dask_devctx.scheduler.messages import ANNOUNCE, PROTOCOL
from tests.distributed.devices import on_cluster, uuid_here

UUIDS = [f"GPU-b33ebc8{n}-95a3-9648-c914-5259efe7a11e" for n in range(2)]
ANNOUNCEMENT = {
    "protocol": PROTOCOL, "seen": [(uuid, None) for uuid in UUIDS], "used": UUIDS, "limits": {},
    "memory_limit": None,
}  # fmt: skip


@on_cluster(4, 4)
async def test_a_worker_of_another_version_is_refused(
    client: Client, scheduler: Scheduler, a: Worker, b: Worker
) -> None:
    await client.register_plugin(DevicePlugin(devices_per_worker=2))
    older = {"seen": [{"device_id": 0, "uuid": UUIDS[0]}], "used": UUIDS[:1]}
    with captured_logger("dask_devctx.scheduler.routing") as log:
        async with rpc(scheduler.address) as there:
            for message in (older, {**ANNOUNCEMENT, "protocol": PROTOCOL + 1}):
                answer = await getattr(there, ANNOUNCE)(address=a.address, **message)
                assert answer.startswith("refused: ")
                assert "Install the same version" in answer
                assert answer in log.getvalue()
    await _all_is_well(client)


async def _all_is_well(client: Client) -> None:
    for ordinal in range(4):
        for name in (ordinal, Device(ordinal).uuid):
            with dask.annotate(device=name):
                assert await client.submit(uuid_here, pure=False) == Device(ordinal).uuid
    with dask.annotate(device=UUIDS[0]), pytest.raises(DeviceNotFoundError):
        await client.submit(uuid_here, pure=False)


@on_cluster(4)
async def test_a_worker_may_announce_before_it_joins(
    client: Client, scheduler: Scheduler, a: Worker
) -> None:
    await client.register_plugin(DevicePlugin(devices=[0, 1]))
    await client.unregister_worker_plugin("devctx")
    await a.plugin_add(DevicePlugin(devices=[0, 1]))
    async with Worker(scheduler.address, plugins=[DevicePlugin(devices=[3])]) as late:
        with dask.annotate(device=Device(3).uuid):
            future = client.submit(uuid_here, pure=False)
            assert await future == Device(3).uuid
        assert next(iter(scheduler.tasks[future.key].who_has)).address == late.address


@on_cluster(8)
async def test_a_scheduler_that_was_not_reached_is_told_again(
    client: Client, scheduler: Scheduler
) -> None:
    register, failed = scheduler.handlers["register_scheduler_plugin"], []

    async def fail_once(**given: Any) -> Any:
        if not failed:
            failed.append(True)
            raise OSError("Timed out trying to connect")
        return await register(**given)

    scheduler.handlers["register_scheduler_plugin"] = fail_once
    with captured_logger("dask_devctx") as log:
        await client.register_plugin(DevicePlugin())
        assert failed
        await async_poll_for(lambda: routing.DeviceRouting.name in scheduler.plugins, timeout=10)
    assert "Tasks that name a device" not in log.getvalue()
    with dask.annotate(device=Device(2).uuid):
        assert await client.submit(uuid_here) == Device(2).uuid
