"""Tasks beside actors that keep devices: other workers run them, and nothing else changes."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import dask
import pytest
from distributed import Client, Event, Worker, get_worker
from distributed.utils_test import poll_for

from dask_devctx import DevicePlugin, LocalDeviceCluster, report
from dask_devctx.worker.placement import handback
from tests.distributed.devices import here, with_plugin, worker_with


class Server:
    def where(self) -> int | None:
        return here()


def nap(*_: object) -> int | None:
    time.sleep(0.01)
    return here()


def wait_for_event(name: str, *_: object) -> int | None:
    Event(name).wait(30)
    return here()


def address_of_worker(_: object) -> str:
    time.sleep(0.01)
    address: str = get_worker().address
    return address


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handback, "_LOOK_INTERVAL_S", 0.1)


def cluster_of(n_workers: int = 3, **how: Any) -> LocalDeviceCluster:
    devices = how.pop("devices", range(n_workers))
    return LocalDeviceCluster(
        n_workers=n_workers,
        devices=list(devices),
        processes=False,
        dashboard_address=":0",
        **how,
    )


@pytest.fixture
def cluster() -> Iterator[LocalDeviceCluster]:
    checked = {"distributed.scheduler.validate": True, "distributed.worker.validate": True}
    with dask.config.set(checked), cluster_of() as cluster:
        assert cluster.scheduler.validate
        yield cluster


def serve(client: Client, **asked: Any) -> Any:
    with dask.annotate(**asked):
        return client.submit(Server, actor=True, pure=False).result(timeout=15)


def worker_of(cluster: LocalDeviceCluster, ordinal: int) -> Worker:
    return worker_with(cluster.workers.values(), ordinal)


def results(client: Client, futures: list[Any]) -> Counter[Any]:
    return Counter(future.result(timeout=15) for future in futures)


@pytest.mark.parametrize(
    "asked",
    [
        {"device": 1, "device_share": 1},
        {"device": 1, "device_share": 0.5},
        {"devices": [1]},
        {"device": 1, "device_memory": "100 MiB"},
    ],
    ids=str,
)
def test_tasks_go_to_other_devices_until_the_actor_ends(
    client: Client, cluster: LocalDeviceCluster, asked: Any
) -> None:
    server = serve(client, **asked)
    assert set(results(client, client.map(nap, range(30), pure=False))) == {0, 2}
    assert server.where().result() == 1
    del server
    gc.collect()

    def all_used() -> bool:
        return set(results(client, client.map(nap, range(60), pure=False))) == {0, 1, 2}

    poll_for(all_used, timeout=15)


@pytest.mark.parametrize("saturation", [1.1, float("inf")])
def test_tasks_that_were_there_before_the_actor_move_and_so_do_later_ones(
    saturation: float,
) -> None:
    with (
        dask.config.set({"distributed.scheduler.worker-saturation": saturation}),
        cluster_of() as cluster,
        Client(cluster) as client,
    ):
        scheduler, address = cluster.scheduler, worker_of(cluster, 1).address
        futures = client.map(wait_for_event, ["open"] * 40, pure=False)
        poll_for(lambda: len(scheduler.workers[address].processing) > 2, timeout=15)
        with dask.annotate(device=1, device_share=1, priority=9):
            server = client.submit(Server, actor=True)
        Event("open").set()
        assert server.result(timeout=15).where().result() == 1
        assert sum(results(client, futures).values()) == 40
        assert {scheduler.tasks[future.key].suspicious for future in futures} == {0}
        value = futures[0]
        later = client.map(wait_for_event, ["later"] * 100, pure=False)
        Event("later").set()
        assert set(results(client, later)) == {0, 2}
        assert set(results(client, client.map(nap, [value] * 8, pure=False))) <= {0, 2}


def test_pinned_tasks_wait_for_the_actor_and_host_tasks_do_not(
    client: Client, cluster: LocalDeviceCluster
) -> None:
    server = serve(client, device=1, device_share=1)
    address = worker_of(cluster, 1).address
    with dask.annotate(device=1):
        named = client.submit(here, pure=False)
    pinned = client.submit(here, workers=[address], pure=False)
    either = client.submit(here, workers=[address, worker_of(cluster, 2).address], pure=False)
    with dask.annotate(device=None):
        host = client.submit(here, workers=[address], pure=False)
    assert host.result(timeout=15) is None
    assert either.result(timeout=15) == 2
    time.sleep(0.4)
    assert (named.status, pinned.status) == ("pending", "pending")
    del server
    gc.collect()
    assert (named.result(timeout=15), pinned.result(timeout=15)) == (1, 1)


def test_where_all_workers_have_actors_tasks_wait_for_the_first_to_end(
    client: Client, cluster: LocalDeviceCluster
) -> None:
    servers = [serve(client, device=n, device_share=1) for n in range(3)]
    futures = client.map(nap, range(80), pure=False)
    poll_for(lambda: report(client).waiting, timeout=15)
    assert all(future.status == "pending" for future in futures)
    assert servers[0].where().result() == 0
    del servers[2]
    gc.collect()
    assert set(results(client, futures)) == {2}


@with_plugin(8, 8)
async def test_the_plugin_is_registered_again(client: Any, scheduler: Any) -> None:
    with dask.annotate(devices="all"):
        server = await client.submit(Server, actor=True)
    kept = next(iter(scheduler.tasks[server.key].who_has)).address

    async def avoided() -> bool:
        futures = client.map(address_of_worker, range(20), pure=False)
        return kept not in await client.gather(futures)

    assert await avoided()
    await client.register_plugin(DevicePlugin())
    assert await avoided()
    await client.unregister_worker_plugin("devctx")
    assert not await avoided()
    await client.register_plugin(DevicePlugin())
    assert await avoided()
    del server
    gc.collect()
    for _ in range(100):
        if not await avoided():
            return
    raise AssertionError("the worker gets no tasks after its actor's end")
