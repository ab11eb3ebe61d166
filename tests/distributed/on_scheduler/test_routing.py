"""A task that names a device goes to the worker that has it, or fails; it never waits for ever."""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from distributed import Client, Event, LocalCluster, Scheduler, Worker, get_worker, rpc, secede
from distributed.utils_test import async_poll_for, captured_logger, poll_for

from dask_devctx import (
    DevctxError,
    Device,
    DeviceNotFoundError,
    DevicePlugin,
    LocalDeviceCluster,
    task_devices,
)
from dask_devctx.annotations import mistaken
from dask_devctx.dask_internals.scheduler import moved_to_idle, restrict, restrictions
from dask_devctx.scheduler import routing
from dask_devctx.scheduler.messages import ANNOUNCE, PROTOCOL
from tests.distributed.devices import nap, on_cluster, started, submit_on, uuid_here, worker_with


def worker_and_device() -> tuple[str, int]:
    device = Device.current()
    return get_worker().address, device.device_id


def holder(cluster: LocalCluster, ordinal: int) -> Worker:
    return worker_with(cluster.workers.values(), ordinal)


def run_on(client: Client, device: Any, fn: Any = uuid_here, **how: Any) -> Any:
    return submit_on(client, device, fn, pure=False, **how)


def test_every_name_reaches_its_holder(client: Client) -> None:
    for ordinal in range(4):
        device = Device(ordinal)
        names = (device, device.uuid, device.uuid[:12], ordinal, str(device), device.pci_bus_id)
        found = client.gather([run_on(client, name) for name in names])
        assert found == [device.uuid] * len(names)


def test_the_users_restrictions_hold_as_well(client: Client, cluster: LocalDeviceCluster) -> None:
    mine, other = holder(cluster, 0), holder(cluster, 3)
    both = [mine.address, other.address]
    found = run_on(client, 0, worker_and_device, workers=both).result(timeout=10)
    assert found == (mine.address, 0)
    wrong = run_on(client, 0, worker_and_device, workers=[other.address])
    assert isinstance(wrong.exception(timeout=10), DeviceNotFoundError)


def lose(cluster: LocalDeviceCluster, worker: Worker) -> None:
    remove = cluster.scheduler.remove_worker(worker.address, stimulus_id="it does not answer")
    asyncio.run_coroutine_threadsafe(remove, cluster.loop.asyncio_loop).result(10)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_task_whose_device_was_lost_waits(comes_back: bool) -> None:
    said = {"devctx.missing-device-timeout": "20s" if comes_back else "600ms"}
    with (
        dask.config.set({**said, "distributed.scheduler.validate": False}),  # of waiting actors
        LocalDeviceCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        lose(cluster, holder(cluster, 3))
        start = time.monotonic()
        future, actor = run_on(client, 3), run_on(client, 3, dict, actor=True)
        poll_for(lambda: len(cluster.scheduler.unrunnable) == 2, timeout=10)
        if comes_back:
            client.sync(join, cluster)
            assert future.result(timeout=20) == Device(3).uuid
            assert actor.result(timeout=20).key == actor.key
            return
        for one in (future, actor):
            assert isinstance(one.exception(timeout=10), DeviceNotFoundError)
        assert 0.2 < time.monotonic() - start < 5


def test_a_task_whose_preferred_worker_is_gone_goes_to_the_next_that_joins() -> None:
    with started(LocalDeviceCluster, n_workers=1, processes=False) as client:
        cluster: Any = client.cluster
        (mine,) = cluster.workers.values()
        lose(cluster, mine)
        there = {"workers": [mine.address], "allow_other_workers": True}
        future = client.submit(uuid_here, **there)
        poll_for(lambda: cluster.scheduler.unrunnable, timeout=10)
        client.sync(join, cluster)
        assert future.result(timeout=20)


async def join(cluster: LocalCluster, devices: list[int] | None = None) -> Worker:
    """Add a worker, with the cluster's plugin or with one for these devices."""
    worker = await Worker(cluster.scheduler.address, nthreads=1, name="late")
    cluster.workers["late"] = worker  # which closes it
    if devices is not None:
        await worker.plugin_add(DevicePlugin(devices=devices))
    return worker


def test_registering_on_a_live_cluster_brings_the_routing() -> None:
    with started(LocalCluster, n_workers=2) as client:
        cluster: Any = client.cluster
        assert "devctx-routing" not in cluster.scheduler.plugins
        go = Event("go")
        first = client.submit(go.wait, pure=False)
        there_already = submit_on(client, 3, uuid_here, first)
        client.register_plugin(DevicePlugin(devices_per_worker=2))
        go.set()
        assert there_already.result(timeout=10) == Device(3).uuid
        found = client.gather([run_on(client, ordinal) for ordinal in range(4)])
        assert found == [Device(ordinal).uuid for ordinal in range(4)]


@pytest.mark.parametrize("name", ["gpus", "devcie"])
def test_annotations_that_seem_to_name_a_device_are_told_of_once(
    client: Client, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        for _ in range(3):
            with dask.annotate(**{name: 1}):
                assert client.submit(uuid_here, pure=False).result(timeout=10)
        time.sleep(0.1)  # the client hears of the warning
    (warning,) = caught
    events = [event for _, event in client.get_events("devctx")]
    (message,) = (e["message"] for e in events if e.get("action") == "annotation-mistaken")
    assert str(warning.message) == message
    assert f"the annotation {name!r} means nothing" in message
    assert "device=1" in message
    assert message not in caplog.text  # the warning is enough


def test_other_annotations_are_not_ours() -> None:
    others = ("priority", "workers", "retries", "resources", "executor", "span", "service")
    mine = ("rerun", "device", "device_share", "devctx-isolated", "owner", "advice", "return")
    assert not [*mistaken(dict.fromkeys((*others, *mine), 3))]
    typos = {"devicee": "device=3", "devcies": "devices=3", "device_memry": "device_memory=3"}
    typos |= {"share": "device_share=3", "GPU": "device=3", "gpus": "devices=3", "reruns": "rerun"}
    for (name, right), text in zip(typos.items(), mistaken(dict.fromkeys(typos, 3)), strict=True):
        assert repr(name) in text
        assert f"dask.annotate({right}" in text
    assert "dask.annotate(device=0)" in next(mistaken({"gpu": 0}))
    assert "reserves 4 bytes" in next(mistaken({"device_memory": 4}))
    assert "oom_retries is an option of the plugin" in next(mistaken({"oom_retries": 0}))
    assert not [*mistaken({"device_memory": "1 MiB"}), *mistaken({"device_memory": float("inf")})]


def test_a_worker_without_devices_joins_and_is_not_waited_for() -> None:
    with started(shared=True) as client:
        cluster: Any = client.cluster
        # As on a machine whose devices are not these: the plugin's set-up fails there.
        worker = client.sync(join, cluster)
        assert worker.address in cluster.scheduler.workers
        plugin = DevicePlugin(devices=["GPU-ffffffff"])
        with pytest.raises(DeviceNotFoundError):
            client.sync(worker.plugin_add, plugin, catch_errors=False)
        start = time.monotonic()
        assert isinstance(run_on(client, 7).exception(timeout=20), DeviceNotFoundError)
        found = run_on(client, 2, worker_and_device).result(timeout=20)
        assert found == (cluster.workers[0].address, 2)
        assert time.monotonic() - start < 10


def worker_and_devices(*_: object) -> tuple[str, tuple[int, ...]]:
    return get_worker().address, tuple(device.device_id for device in task_devices())


async def with_devices(worker: Worker, *ordinals: int, **options: Any) -> None:
    uuids = [Device(n).uuid for n in ordinals]
    await worker.plugin_add(DevicePlugin(devices=uuids, **options))


async def split(scheduler: Any, *workers: Worker) -> None:
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
    with dask.annotate(devices="all"):
        found = await client.gather(client.map(worker_and_devices, range(20), pure=False))
    assert set(found) <= {(a.address, (3,)), (b.address, (0, 2))}


@on_cluster(2, plugin={"devices_per_worker": 2})
async def test_a_worker_that_joins_leaves_queued_tasks_queued(
    client: Any, scheduler: Any, worker: Any
) -> None:
    with dask.annotate(device="auto"):
        futures = client.map(nap, [0.05] * 100, pure=False)
    await async_poll_for(lambda: scheduler.queued, timeout=10)
    first = scheduler.workers[worker.address]
    before = len(first.processing)
    async with Worker(scheduler.address, nthreads=2):
        assert len(first.processing) <= before
        await client.gather(futures)


class Unsaid:
    def __repr__(self) -> str:
        raise ValueError("it does not say what it is")


@on_cluster(8, 8)
async def test_a_value_that_spoils_a_warning_restricts_the_tasks_all_the_same(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    await split(scheduler, a, b)
    with dask.annotate(devices=2, gpus=Unsaid()):
        found = await client.gather(client.map(worker_and_devices, range(8), pure=False))
    assert {address for address, _ in found} == {b.address}


@on_cluster(8, 8)
async def test_where_no_worker_has_enough(client: Any, scheduler: Any, a: Any, b: Any) -> None:
    await split(scheduler, a, b)
    start = time.monotonic()
    with dask.annotate(devices=3), pytest.raises(DevctxError, match="n_workers=1"):
        await client.submit(worker_and_devices)
    assert time.monotonic() - start < 5
    # Each has some of them.
    asked = r"at once \(cuda:2 .*, cuda:3 .*\), .* has them.* to one worker: ask for fewer, .*=1\n"
    with dask.annotate(devices=[2, 3]), pytest.raises(DevctxError, match=asked):
        await client.submit(worker_and_devices, key="named")
    with dask.annotate(devices=[2, 7]), pytest.raises(DeviceNotFoundError, match="no device 7"):
        await client.submit(worker_and_devices, key="missing")


@on_cluster(8, 8)
async def test_to_a_worker_whose_limit_allows_the_reservation(client: Any, a: Any, b: Any) -> None:
    await with_devices(a, 0, 1, device_memory_limit="2 GiB")
    await with_devices(b, 2, 3, device_memory_limit="4 GiB")
    with dask.annotate(device_memory="3 GiB"):
        found = await client.gather(client.map(worker_and_devices, range(8), pure=False))
    assert {address for address, _ in found} == {b.address}
    with dask.annotate(devices=2, device_memory="5 GiB"):
        error = await client.submit(worker_and_devices).exception()
    assert isinstance(error, DevctxError)
    assert "the task reserves 5.0 GiB of device memory" in str(error)


@on_cluster(4, 4)
async def test_a_worker_of_another_version_is_refused(
    client: Client, scheduler: Scheduler, a: Worker, b: Worker
) -> None:
    await client.register_plugin(DevicePlugin(devices_per_worker=2))
    uuid = "GPU-b33ebc80-95a3-9648-c914-5259efe7a11e"
    older = {"seen": [{"device_id": 0, "uuid": uuid}], "used": [uuid]}
    newer = {"protocol": PROTOCOL + 1, "seen": [(uuid, None)], "used": {uuid: 8}}
    with captured_logger("dask_devctx.scheduler.routing") as log:
        async with rpc(scheduler.address) as there:
            for message in (older, newer):
                answer = await getattr(there, ANNOUNCE)(address=a.address, **message)
                assert answer.startswith("refused: ")
                assert "Install the same version" in answer
                assert answer in log.getvalue()
    for ordinal in range(4):  # all is well
        assert await submit_on(client, ordinal, uuid_here, pure=False) == Device(ordinal).uuid
    with dask.annotate(device=uuid), pytest.raises(DeviceNotFoundError):
        await client.submit(uuid_here, pure=False)


@on_cluster(4)
async def test_a_worker_may_announce_before_it_joins(
    client: Client, scheduler: Scheduler, a: Worker
) -> None:
    await client.register_plugin(DevicePlugin(devices=[0, 1]))
    await client.unregister_worker_plugin("devctx")
    await a.plugin_add(DevicePlugin(devices=[0, 1]))
    async with Worker(scheduler.address, plugins=[DevicePlugin(devices=[3])]) as late:
        future = submit_on(client, Device(3).uuid, uuid_here, pure=False)
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
    assert await submit_on(client, Device(2).uuid, uuid_here) == Device(2).uuid


# -- late tasks, which a worker gives back for idle workers


@pytest.mark.parametrize("far", [False, True])
@on_cluster(1, 1)
async def test_late_tasks_move_to_idle_workers(
    client: Any, scheduler: Scheduler, worker: Worker, far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half of them; to another machine only where their inputs arrive before their turn."""
    may_end = Event("may-end")
    busy, idle = scheduler.workers.values()
    for ws, host in ((busy, "a"), (idle, "b" if far else "a")):
        monkeypatch.setattr(ws, "host", host)
    keys = [f"late-{n}" for n in range(4)]
    futures = [
        client.submit(lambda event: event.wait(20), may_end, key=key, workers=[busy.address])
        for key in keys
    ]
    # One that seceded takes no slot.
    seceded = client.submit(lambda e: secede() or e.wait(20), may_end, workers=[idle.address])
    while len(busy.processing) < len(keys) or not idle.long_running:
        await asyncio.sleep(0.01)
    slots = dict.fromkeys([busy.address, idle.address], 1)
    cluster = SimpleNamespace(slots=slots, late=set())
    assert moved_to_idle(scheduler, cluster, busy.address, keys) == [], "their user restricts them"
    for key in keys:
        restrict(scheduler.tasks[key], None, None)
    monkeypatch.setattr(scheduler, "get_comm_cost", lambda ts, ws: busy.occupancy * 2)
    moved = [] if far else keys[:2]
    assert moved_to_idle(scheduler, cluster, busy.address, keys) == moved
    assert moved_to_idle(scheduler, cluster, idle.address, keys) == [], "it does not have them"
    del cluster.slots[idle.address]
    assert moved_to_idle(scheduler, cluster, busy.address, keys) == [], "none is idle"
    for key in keys:
        wanted = {idle.address} if key in moved else None
        assert restrictions(scheduler.tasks[key]) == (wanted, None, key in moved)
    await may_end.set()
    assert all(await client.gather([*futures, seceded]))
