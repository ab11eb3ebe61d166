"""Workers of one machine share its devices out."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster

from dask_devctx import Device, DevicePlugin, DevicesInUseError, devices, driver
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.worker.leases.lease import Lease, acquire

TAKE = """
import sys, time
from dask_devctx import devices
from dask_devctx.worker.leases.lease import acquire
share = acquire(devices(), int(sys.argv[2]), holder="child", directory=sys.argv[1])
print(*[device.device_id for device in share.devices], flush=True)
time.sleep(60)
"""


def start(directory: Path, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TAKE, str(directory), str(count)], stdout=subprocess.PIPE, text=True
    )


def line(child: subprocess.Popen[str]) -> list[int]:
    assert child.stdout is not None
    return [int(word) for word in child.stdout.readline().split()]


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


def held_by(worker: Any) -> list[int]:
    return [device.device_id for device in worker.plugins["devctx"].worker_devices]


def test_shares_do_not_overlap_and_come_back(lock_directory: Path) -> None:
    one = acquire(devices(), 2, holder="one", directory=lock_directory)
    two = acquire(devices(), 2, holder="two", directory=lock_directory)
    assert [*one.devices, *two.devices] == list(devices())
    one.release()
    assert acquire(devices(), 1, holder="three", directory=lock_directory).devices == (Device(0),)
    two.release()


def test_too_many_says_who_holds_what(lock_directory: Path) -> None:
    share = acquire(devices(), 3, holder="worker one", directory=lock_directory)
    with pytest.raises(DevicesInUseError) as caught:
        acquire(devices(), 2, holder="worker two", directory=lock_directory)
    error = caught.value
    assert error.wanted == 2
    assert error.free == (str(Device(3).info),)
    assert list(error.holders) == [str(device.info) for device in share.devices]
    assert all(f"pid {os.getpid()} on " in who for who in error.holders.values())
    assert "worker one" in str(error)
    assert "1 of 4 is free" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (again.wanted, again.free, again.holders) == (2, error.free, error.holders)
    # what it took before it gave up is free again
    last = acquire(devices(), 1, holder="worker three", directory=lock_directory)
    assert last.devices == (Device(3),)
    share.release()
    last.release()


def test_more_than_there_are(lock_directory: Path) -> None:
    with pytest.raises(DevicesInUseError, match="wants 5 devices for itself and there are 4"):
        acquire(devices(), 5, holder="me", directory=lock_directory)


def test_of_two_that_want_most_one_gets_them(lock_directory: Path) -> None:
    def attempt(number: int) -> Lease | DevicesInUseError:
        try:
            return acquire(devices(), 3, holder=str(number), directory=lock_directory)
        except DevicesInUseError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            outcomes = list(pool.map(attempt, range(2)))
            shares = [outcome for outcome in outcomes if isinstance(outcome, Lease)]
            assert len(shares) == 1
            shares[0].release()


def test_processes_share_out_and_the_killed_ones_come_back(lock_directory: Path) -> None:
    children = [start(lock_directory, 2) for _ in range(2)]
    try:
        shares = sorted(line(child) for child in children)
        assert shares == [[0, 1], [2, 3]]
        with pytest.raises(DevicesInUseError) as caught:
            acquire(devices(), 1, holder="me", directory=lock_directory)
        holders = list(caught.value.holders.values())
        assert {f"pid {child.pid}" in "".join(holders) for child in children} == {True}
        end(children[0])
        share = acquire(devices(), 2, holder="me", directory=lock_directory)
        share.release()
    finally:
        for child in children:
            end(child)


def test_machines_do_not_share(lock_directory: Path) -> None:
    here = acquire(devices(), 4, holder="here", directory=lock_directory)
    with driver.use(SimulatedMachine(4, host="elsewhere").backend()):
        there = acquire(devices(), 4, holder="there", directory=lock_directory)
        there.release()
    here.release()


def test_workers_of_one_process(lock_directory: Path) -> None:
    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(DevicePlugin(devices_per_worker=2))
        workers = list(cluster.workers.values())
        assert sorted(map(held_by, workers)) == [[0, 1], [2, 3]]
        client.unregister_worker_plugin("devctx")
        share = acquire(devices(), 4, holder="me", directory=lock_directory)
        share.release()
        client.register_plugin(DevicePlugin(devices_per_worker=1, devices=[3, 1]))
        assert sorted(map(held_by, workers)) == [[1], [3]]
    share = acquire(devices(), 4, holder="me", directory=lock_directory)  # closing frees them
    share.release()


def test_a_live_worker_that_gets_none_is_reported() -> None:
    with (
        LocalCluster(n_workers=3, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        pytest.raises(DevicesInUseError, match="wants 2 devices for itself and 0 of 4 are free"),
    ):
        client.register_plugin(DevicePlugin(devices_per_worker=2))


def test_a_worker_that_joins_in_vain_leaves(lock_directory: Path) -> None:
    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(DevicePlugin(devices_per_worker=2))
        there = set(cluster.scheduler.workers)
        cluster.scale(3)
        routing = cluster.scheduler.plugins["devctx-routing"]
        for _ in range(100):
            if routing.refused and set(cluster.scheduler.workers) == there:
                break
            client.sync(_sleep)
        assert set(cluster.scheduler.workers) == there
        (error,) = routing.refused.values()
        assert isinstance(error, DevicesInUseError)
        with dask.annotate(device=3):
            assert client.submit(_where, pure=False).result() == 3


def test_the_configuration_stands_in() -> None:
    with dask.config.set({"devctx.devices-per-worker": 3}):
        assert DevicePlugin().options.devices_per_worker == 3
        assert DevicePlugin(devices_per_worker=1).options.devices_per_worker == 1


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_a_count_is_a_count(count: object) -> None:
    with pytest.raises(ValueError, match="devices_per_worker must be a whole number, 1 or more"):
        DevicePlugin(devices_per_worker=count)  # type: ignore[arg-type]


def _where() -> int:
    device = Device.current()
    assert device is not None
    return device.device_id


async def _sleep() -> None:
    await asyncio.sleep(0.05)
