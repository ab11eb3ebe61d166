"""Workers and clusters of one machine share its devices out; nothing is shared by accident."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import ExitStack
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster, Worker
from distributed.utils_test import poll_for

from dask_devctx import DeviceNotFoundError, DevicePlugin, DevicesInUseError, devices, driver
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.worker.leases.locks import held_devices
from tests.distributed.devices import acquire, here, of_worker, on_cluster, submit_on

QUIET: dict[str, Any] = {"dashboard_address": ":0", "threads_per_worker": 4}
OTHER = "worker 1 of tcp://127.0.0.1:1"


def take(count: int, holder: str = OTHER) -> ExitStack:
    return acquire(devices(), count, holder=holder)


def who_has(client: Client) -> list[list[int]]:
    return sorted(client.run(of_worker, on_error="ignore").values())  # some leave just now


def test_who_holds_devices_is_named_and_another_machine_has_its_own() -> None:
    lease = take(3)
    with driver.use(SimulatedMachine(4, host="elsewhere").backend()):
        assert held_devices(devices()) == {}
    held = held_devices(devices())
    assert list(held) == list(devices()[:3])
    assert all(re.fullmatch(rf"pid {os.getpid()} on .*, {OTHER}", who) for who in held.values())
    lease.close()
    assert held_devices(devices()) == {}


def test_workers_with_a_number_of_devices() -> None:
    with (
        dask.config.set({"devctx.devices-per-worker": 2}),
        LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        workers = list(cluster.workers.values())
        client.register_plugin(DevicePlugin())
        assert sorted(map(of_worker, workers)) == [[0, 1], [2, 3]]
        client.unregister_worker_plugin("devctx")
        take(4).close()
        client.register_plugin(DevicePlugin(devices_per_worker=1, devices=[3, 1]))
        assert sorted(map(of_worker, workers)) == [[1], [3]]
        with pytest.raises(DevicesInUseError, match=r"wants 3 devices for itself, .* Free: cuda:"):
            client.register_plugin(DevicePlugin(devices_per_worker=3))
        client.register_plugin(DevicePlugin())
        # one that joins in vain leaves
        there = set(cluster.scheduler.workers)
        cluster.scale(3)
        routing = cluster.scheduler.plugins["devctx-routing"]
        poll_for(lambda: len(routing.refused) == 1, timeout=60)
        poll_for(lambda: set(cluster.scheduler.workers) == there, timeout=60)
        (error,) = routing.refused.values()
        assert isinstance(error, DevicesInUseError)
        assert submit_on(client, 3, here, pure=False).result() == 3
    take(4).close()  # closing frees them


def test_workers_that_come_and_go_share_evenly() -> None:
    with LocalCluster(n_workers=2, **QUIET) as cluster, Client(cluster) as client:
        client.register_plugin(DevicePlugin())
        assert who_has(client) == [[0, 1], [2, 3]]
        client.register_plugin(DevicePlugin(tasks_per_device=2))
        assert who_has(client) == [[0, 1], [2, 3]]
        before = submit_on(client, 3, os.getpid, pure=False).result()
        os.kill(before, 9)  # it comes back with its devices
        assert submit_on(client, 3, os.getpid, pure=False).result(timeout=60) != before
        assert who_has(client) == [[0, 1], [2, 3]]
        said = r"cuda:1.* held by .*worker [01] of its own cluster\. .* start fewer workers, or n"
        with pytest.raises(DevicesInUseError, match=said):
            client.register_plugin(DevicePlugin(devices=[1]))
        client.register_plugin(DevicePlugin(shared=True))
        assert who_has(client) == [[0, 1, 2, 3]] * 2


def test_one_that_joins_later_gets_free_devices_or_leaves(caplog: pytest.LogCaptureFixture) -> None:
    with LocalCluster(n_workers=2, processes=False, **QUIET) as cluster, Client(cluster) as client:
        client.register_plugin(DevicePlugin())
        assert who_has(client) == [[0, 1], [2, 3]]
        cluster.scale(3)
        poll_for(lambda: "leaves the cluster" in caplog.text, timeout=20)
        assert "No device is free: let each worker take fewer (devices_per_worker=1)" in caplog.text
        assert "2 of its own cluster" not in caplog.text
        cluster.scale(1)
        poll_for(lambda: len(who_has(client)) == 1, timeout=20)
        kept = who_has(client)
        cluster.scale(2)  # it takes the place of the one that left
        poll_for(lambda: who_has(client) == [[0, 1], [2, 3]], timeout=20)
        cluster.scale(1)
        poll_for(lambda: len(who_has(client)) == 1, timeout=20)
        client.register_plugin(DevicePlugin())  # divides again
        assert who_has(client) == [[0, 1, 2, 3]] != kept


def test_one_that_wants_more_takes_the_place_of_several_that_left() -> None:
    with LocalCluster(n_workers=4, processes=False, **QUIET) as cluster, Client(cluster) as client:
        client.register_plugin(DevicePlugin())
        assert who_has(client) == [[0], [1], [2], [3]]
        cluster.scale(2)
        poll_for(lambda: len(who_has(client)) == 2, timeout=20)
        kept = who_has(client)
        with dask.config.set({"devctx.devices-per-worker": 2}):
            cluster.scale(3)
            poll_for(lambda: len(who_has(client)) == 3, timeout=20)
        (new,) = (found for found in who_has(client) if found not in kept)
        assert sorted(sum(kept, new)) == [0, 1, 2, 3]


def test_a_lost_gpu_leaves_the_workers_the_rest_of_their_parts(machine: SimulatedMachine) -> None:
    uuids = [device.uuid for device in devices()]
    with LocalCluster(n_workers=2, processes=False, **QUIET) as cluster, Client(cluster) as client:
        machine.gpus[2].lost = True
        driver.backend().inventories.clear()
        client.register_plugin(DevicePlugin(devices=uuids, devices_per_worker=2))
        assert sorted(map(len, who_has(client))) == [1, 2]
        with pytest.raises(DevicesInUseError, match=r"^NVML index 2 .*; this worker wants 4"):
            client.register_plugin(DevicePlugin(devices_per_worker=4))
        client.register_plugin(DevicePlugin(devices=[uuid[:12] for uuid in uuids]))
        assert sorted(map(len, who_has(client))) == [1, 2]
        with pytest.raises(DeviceNotFoundError, match="no device 7"):  # it is wrong, and not lost
            client.register_plugin(DevicePlugin(devices=[*uuids, 7]))


@on_cluster(1)
async def test_a_plugin_that_takes_anothers_place_is_set_up_once(
    client: Any, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    for turn in range(3):
        order = [[3, 1, 0, 2], None, [2, 1]][turn]
        await client.register_plugin(DevicePlugin(devices=order))
        assert of_worker(worker) == (order or [0, 1, 2, 3])
        assert caplog.text.count("With nthreads=1") == turn + 1  # said at each set-up


@pytest.mark.parametrize("options", [{}, {"devices_per_worker": 2}])
@on_cluster(4)
async def test_devices_that_another_worker_of_the_cluster_is_about_to_release_are_waited_for(
    client: Any, worker: Worker, options: dict[str, Any]
) -> None:
    lease = take(4, holder=f"worker 9 of {worker.scheduler.address}")
    registered = asyncio.ensure_future(client.register_plugin(DevicePlugin(**options)))
    for _ in range(20):  # the event loop runs
        await asyncio.sleep(0.01)
    assert not registered.done()
    lease.close()
    await registered
    assert len(of_worker(worker)) == options.get("devices_per_worker", 4)
