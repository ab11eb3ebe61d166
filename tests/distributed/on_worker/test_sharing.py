"""Nothing is shared by accident: workers that name no number of devices share them out."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster, Worker
from distributed.utils_test import async_poll_for, gen_cluster

from dask_devctx import Device, DevicePlugin, DevicesInUseError, LocalDeviceCluster, devices
from dask_devctx.errors import LockDirectoryError
from dask_devctx.scheduler.messages import SHARE
from dask_devctx.worker.leases import share
from dask_devctx.worker.leases.lease import Lease, acquire, holders
from dask_devctx.worker.leases.locks import LockDirectory
from tests.distributed.commands import dask_command
from tests.distributed.devices import with_plugin

QUIET: dict[str, Any] = {"dashboard_address": ":0", "threads_per_worker": 4}


def of_worker(dask_worker: Worker) -> list[int]:
    plugin = dask_worker.plugins.get("devctx")  # a worker that closes has removed it
    return [device.device_id for device in plugin.worker_devices] if plugin else []


def who_has(client: Client) -> list[list[int]]:
    return sorted(client.run(of_worker).values())


def soon(found: Callable[[], object], expected: object, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while (seen := found()) != expected:
        assert time.monotonic() < deadline, seen
        time.sleep(0.05)


def where(*_: object) -> int:
    device = Device.current()
    assert device is not None
    return device.device_id


def pid(*_: object) -> int:
    return os.getpid()


def test_workers_that_come_and_go_share_evenly() -> None:
    with (
        dask.config.set({"devctx.missing-device-timeout": "1s"}),
        LocalCluster(n_workers=2, **QUIET) as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(DevicePlugin())
        assert who_has(client) == [[0, 1], [2, 3]]
        client.register_plugin(DevicePlugin(tasks_per_device=2))
        assert who_has(client) == [[0, 1], [2, 3]]
        cluster.scale(1)
        soon(lambda: who_has(client), [[0, 1, 2, 3]])


def test_one_that_was_killed_comes_back_with_its_devices() -> None:
    with LocalCluster(n_workers=2, **QUIET) as cluster, Client(cluster) as client:
        client.register_plugin(DevicePlugin())
        with dask.annotate(device=3):
            before = client.submit(pid, pure=False).result()
            os.kill(before, 9)
            assert client.submit(pid, pure=False).result(timeout=60) != before
        assert who_has(client) == [[0, 1], [2, 3]]


def test_one_that_joins_gets_devices_of_one_that_works() -> None:
    with (
        LocalDeviceCluster(n_workers=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        assert who_has(client) == [[0, 1, 2, 3]]
        futures = []
        for n in range(400):
            if n == 200:
                cluster.scale(2)
            with dask.annotate(device=n % 4):
                futures.append(client.submit(where, n, pure=False))
        assert client.gather(futures) == [n % 4 for n in range(400)]
        soon(lambda: who_has(client), [[0, 1], [2, 3]])
        with pytest.raises(
            ValueError, match="5 workers with 1 device each would need 5, and this machine has 4"
        ):
            cluster.scale(5)


def test_a_second_cluster_gets_the_rest_or_an_error(lock_directory: Path) -> None:
    def start(**options: Any) -> LocalDeviceCluster:
        return LocalDeviceCluster(n_workers=1, dashboard_address=":0", **options)

    with start(devices=[0, 2]) as one, start() as two:
        with Client(two) as client:
            assert who_has(client) == [[1, 3]]
        with pytest.raises(DevicesInUseError) as caught:
            start()
        assert caught.value.wanted == 1
        assert len(caught.value.holders) == 4
        for cluster in (one, two):
            assert f"worker 0 of {cluster.scheduler_address}" in str(caught.value)
        assert f"pid {one.workers[0].pid} on" in str(caught.value)
        # devices that are named are all needed
        with pytest.raises(DevicesInUseError, match="wants 2 devices for itself"):
            start(devices=[1, 2])
        with start(shared=True) as three, Client(three) as client:
            assert who_has(client) == [[0, 1, 2, 3]]
    acquire(devices(), 4, holder="me", directory=lock_directory).release()


def test_workers_that_mean_it_share() -> None:
    with (
        LocalDeviceCluster(n_workers=2, shared=True, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(2, timeout=20)
        assert who_has(client) == [[0, 1, 2, 3]] * 2


def test_more_workers_than_devices_is_an_error_that_names_the_holders() -> None:
    with (
        LocalCluster(n_workers=2, **QUIET) as cluster,
        Client(cluster) as client,
        pytest.raises(DevicesInUseError, match=r"cuda:1 .* is held by worker [01] of its own cl"),
    ):
        client.register_plugin(DevicePlugin(devices=[1]))


def test_workers_of_one_process_use_the_same_devices() -> None:
    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(DevicePlugin())
        assert who_has(client) == [[0, 1, 2, 3]] * 2


def test_workers_with_other_lock_directories_share_out_what_both_see(tmp_path: Path) -> None:
    """As in containers that see the same GPUs."""
    with LocalCluster(n_workers=0, dashboard_address=":0") as cluster, Client(cluster) as client:
        worker = ("worker", "--no-dashboard", "--nthreads", "4", "--preload", "dask_devctx")
        one = {"DASK_DEVCTX__LOCK_DIRECTORY": str(tmp_path / "one")}
        other = {"DASK_DEVCTX__LOCK_DIRECTORY": str(tmp_path / "other")}
        address = cluster.scheduler_address
        with dask_command(*worker, address, env=one), dask_command(*worker, address, env=other):
            client.wait_for_workers(2, timeout=60)
            soon(lambda: who_has(client), [[0, 1], [2, 3]])


_HOLDS = """
import sys, time
from dask_devctx.cuda.device import devices
from dask_devctx.worker.leases.lease import acquire
lease = acquire(devices()[:1], 1, holder=sys.argv[1], directory=sys.argv[2])
print("held", flush=True)
time.sleep(60)
"""


def killed_holder(scheduler: str, directory: Path) -> None:
    """Let a process take the first device, for a worker of this scheduler, and kill it."""
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLDS, f"worker 0 of {scheduler}", str(directory)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    child.kill()
    child.communicate()


def test_a_restarting_workers_devices_are_kept_for_its_cluster(lock_directory: Path) -> None:
    first = devices()[:1]
    mine, other = "tcp://127.0.0.1:{}", "worker 1 of tcp://127.0.0.1:1"
    with socket.create_server(("127.0.0.1", 0)) as scheduler:
        mine = mine.format(scheduler.getsockname()[1])
        killed_holder(mine, lock_directory)
        said = rf"cuda:0 .* worker 0 of {mine}, which ended and may be starting again"
        with pytest.raises(DevicesInUseError, match=said):
            acquire(first, 1, holder=other, directory=lock_directory)
        assert {*Lease(other, lock_directory).take(first)} == {*first}
        assert not holders(first, lock_directory, cluster=mine)
        assert {*holders(first, lock_directory)} == {*first}  # a look frees nothing
        acquire(first, 1, holder=f"worker 0 of {mine}", directory=lock_directory).release()
        # a worker that releases its devices keeps nothing
        acquire(first, 1, holder=other, directory=lock_directory).release()
        killed_holder(mine, lock_directory)
        for path in lock_directory.iterdir():  # the last sign of life is old
            os.utime(path, (time.time() - 60, time.time() - 60))
        acquire(first, 1, holder=other, directory=lock_directory).release()
        killed_holder(mine, lock_directory)
    # its scheduler has gone, so that nobody starts it again
    acquire(first, 1, holder=other, directory=lock_directory).release()


def test_a_scheduler_that_does_not_answer_is_tried_once(
    lock_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host is gone: each try takes a second, and others wait for their turn meanwhile."""
    lock_directory.mkdir(mode=0o700)
    for device in devices():
        path = lock_directory / f"{device.uuid}.lock"
        path.write_text("pid 1 on a host, worker 0 of tcp://192.0.2.1:8786")
        path.chmod(0o600)
    tried = []

    def no_answer(address: object, timeout: float) -> None:
        tried.append(address)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", no_answer)
    mine = "worker 0 of tcp://127.0.0.1:1"
    assert not holders(devices(), lock_directory)
    assert tried == [("192.0.2.1", 8786)]
    acquire(devices(), 4, holder=mine, directory=lock_directory).release()
    assert len(tried) == 2


def test_no_device_stays_taken_where_the_lock_of_another_is_refused(lock_directory: Path) -> None:
    lock_directory.mkdir(mode=0o700)
    linked = lock_directory / f"{devices()[1].uuid}.lock"
    linked.symlink_to("elsewhere")
    mine = "worker 0 of tcp://127.0.0.1:1"
    with pytest.raises(LockDirectoryError, match="symbolic link"):
        Lease(mine, lock_directory).take(devices())
    linked.unlink()
    acquire(devices(), 4, holder=mine, directory=lock_directory).release()


def test_no_other_cluster_takes_the_devices_of_a_worker_that_restarts() -> None:
    with (
        LocalDeviceCluster(n_workers=1, devices=[0], dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        before = client.submit(pid, pure=False).result(timeout=30)
        os.kill(before, 9)
        with (
            pytest.raises(DevicesInUseError, match=cluster.scheduler_address),
            LocalDeviceCluster(
                n_workers=1, devices=[0], processes=False, dashboard_address=":0"
            ) as thief,
        ):
            pytest.fail(f"it took them: {thief}")
        assert client.submit(pid, pure=False).result(timeout=60) != before
        assert who_has(client) == [[0]]


def test_a_holder_gives_signs_of_life(
    lock_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share, "SIGN_INTERVAL_S", 0.05)
    with LocalDeviceCluster(
        n_workers=2, processes=False, devices_per_worker=1, dashboard_address=":0"
    ):
        paths = [path for path in lock_directory.glob("GPU-*") if path.read_text()]  # not freed
        assert len(paths) == 2
        for path in paths:
            os.utime(path, (0, 0))
        soon(lambda: all(path.stat().st_mtime > 1 for path in paths), True)


def test_a_device_that_its_holder_releases_late_is_taken_then(
    monkeypatch: pytest.MonkeyPatch, lock_directory: Path
) -> None:
    """A worker that closes releases its devices one by one; another was given them meanwhile."""
    monkeypatch.setattr(share, "SIGN_INTERVAL_S", 0.02)
    one = Device(1)

    @with_plugin(4)
    async def body(client: Any, scheduler: Any, worker: Worker) -> None:
        told = worker.handlers[SHARE]
        uuids = [Device(n).uuid for n in range(4)]
        await told(uuids=[uuid for uuid in uuids if uuid != one.uuid], version=100)
        assert of_worker(worker) == [0, 2, 3]
        address = worker.scheduler.address
        late = acquire([one], 1, holder=f"worker 1 of {address}", directory=lock_directory)
        await told(uuids=uuids, version=101)
        assert of_worker(worker) == [0, 2, 3]
        late.release()
        await async_poll_for(lambda: of_worker(worker) == [0, 1, 2, 3], timeout=20)

    body()


@pytest.mark.parametrize("options", [{}, {"devices_per_worker": 2}])
def test_a_worker_that_waits_for_devices_does_not_stop_its_event_loop(
    options: dict[str, Any], lock_directory: Path
) -> None:
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 4)], timeout=60)
    async def body(client: Any, scheduler: Any, worker: Worker) -> None:
        with LockDirectory(lock_directory) as place, place.exclusive(1):  # as a stopped process
            registered = asyncio.ensure_future(client.register_plugin(DevicePlugin(**options)))
            pauses, last = [], time.monotonic()
            while time.monotonic() < last + 0.5 and len(pauses) < 50:
                await asyncio.sleep(0.01)
                pauses.append(time.monotonic() - last)
                last = time.monotonic()
            assert not registered.done()
        await registered
        assert max(pauses) < 0.4
        assert len(of_worker(worker)) == options.get("devices_per_worker", 4)

    body()
