"""The configuration of a cluster's workers, as its client sees it."""

from __future__ import annotations

import json
from typing import Any

from distributed.utils_test import gen_cluster

from dask_devctx import Device, DevicePlugin, start_soonest
from dask_devctx.client.configuration import cluster_configuration

GIB = 2**30


@gen_cluster(client=True, nthreads=[("127.0.0.1", 4)], timeout=60)
async def test_options_devices_and_limits(client: Any, scheduler: Any, worker: Any) -> None:
    found = await cluster_configuration(client)
    assert found["scheduler"]["protocol"] == "tcp"
    assert found["workers"][worker.address]["devctx"] is None
    await client.register_plugin(
        DevicePlugin(
            devices=[1, 3], device_memory_limit=0.5, tasks_per_device=2, policy=start_soonest
        )
    )
    found = await cluster_configuration(client)
    seen = found["workers"][worker.address]
    assert (seen["name"], seen["nthreads"]) == (0, 4)
    assert seen["memory_limit"] == worker.memory_manager.memory_limit
    options, devices = seen["devctx"]["options"], seen["devctx"]["devices"]
    assert (options["tasks_per_device"], options["policy"]) == (2, "start_soonest")
    assert [*devices] == [Device(1).uuid, Device(3).uuid]
    assert devices[Device(3).uuid] == {
        "device": str(Device(3).info),
        "device_memory_limit": 8 * GIB,
        "rmm_pool_size": None,
        "rmm_maximum_pool_size": None,
        "rmm_release_threshold": None,
    }
    json.dumps(found)
