"""Several clusters on one machine: the next one gets the free devices, or an error at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Worker

from dask_devctx import DevicePlugin, DevicesInUseError, LocalDeviceCluster, devices
from dask_devctx.worker.leases.lease import acquire

HOLDER = "tcp://127.0.0.1:45861"
INSIDE: dict[str, Any] = {"processes": False, "dashboard_address": ":0"}


@contextmanager
def held(directory: Path, *ordinals: int) -> Iterator[None]:
    """Another cluster has devices, a worker for each."""
    leases = [
        acquire([devices()[n]], 1, holder=f"worker {n} of {HOLDER}", directory=directory)
        for n in ordinals
    ]
    try:
        yield
    finally:
        for lease in leases:
            lease.release()


def of_worker(dask_worker: Worker) -> list[int]:
    return [device.device_id for device in dask_worker.plugins["devctx"].worker_devices]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"processes": True}, [[2], [3]]),
        ({}, [[2, 3]]),
        ({"plugin": DevicePlugin()}, [[2, 3]]),
        ({"n_workers": 1}, [[2, 3]]),
        ({"n_workers": 2}, [[2], [3]]),
        ({"devices_per_worker": 2}, [[2, 3]]),
        ({"devices": [1, 2, 3], "devices_per_worker": 1, "n_workers": 2}, [[2], [3]]),
    ],
)
def test_the_next_cluster_gets_the_rest(
    given: dict[str, Any],
    expected: list[list[int]],
    lock_directory: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        held(lock_directory, 0, 1),
        LocalDeviceCluster(**{**INSIDE, **given}) as cluster,
        Client(cluster) as client,
    ):
        assert sorted(client.run(of_worker).values()) == expected
        said = repr(cluster)
    (line,) = [
        text for text in caplog.messages if "devices that are free, cuda:2, cuda:3: " in text
    ]
    first = "cuda:1 is" if "devices" in given else "cuda:0, cuda:1 are"
    assert f"{first} held by worker" in line
    assert f"of {HOLDER}" in line
    assert f", devices=cuda:2, cuda:3; left to others at its start: {first} held by" in said


@pytest.mark.parametrize(
    ("given", "taken", "said"),
    [
        ({}, (0, 1, 2, 3), "wants 1 device for itself, and cuda:0, cuda:1, cuda:2, cuda:3 are"),
        ({}, (0, 1, 2, 3), "held by workers 0, 1, 2, 3 of tcp://127.0.0.1:45861 (pid "),
        ({}, (0, 1, 2, 3), "No device is free. Close the cluster"),
        ({}, (0, 1, 2, 3), "(cluster.close(), or client.shutdown()), or use the same devices: sha"),
        ({"n_workers": 3}, (0, 1), "Free: cuda:2, cuda:3. For these, write devices=[2, 3], or lea"),
        ({"n_workers": 3}, (0, 1), "wants 3 devices for itself, and cuda:0, cuda:1 are held by"),
        ({"devices": [1, 2]}, (0, 1), "wants 2 devices for itself, and cuda:1 is held by worker 1"),
        ({"devices": [0, 1]}, (0, 1), "Free: cuda:2, cuda:3."),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, (0, 1), "devices=[2, 3]"),
        ({"devices_per_worker": 3}, (0, 1), "wants 3 devices"),
        ({"plugin": DevicePlugin(devices=[0])}, (0, 1), "wants 1 device"),
        (INSIDE, (0, 1, 2, 3), "No device is free."),
    ],
)
def test_too_few_free_devices_are_told_at_once(
    given: dict[str, Any], taken: tuple[int, ...], said: str, lock_directory: Path
) -> None:
    start = time.monotonic()
    with held(lock_directory, *taken), pytest.raises(DevicesInUseError) as caught:
        LocalDeviceCluster(**{"dashboard_address": ":0", **given})
    assert time.monotonic() - start < 1
    assert said in str(caught.value)
    assert len(caught.value.free) == 4 - len(taken)
    assert caught.value.by_cluster


def test_what_needs_no_device_of_its_own_starts(lock_directory: Path) -> None:
    with held(lock_directory, 0, 1, 2, 3):
        with LocalDeviceCluster(shared=True, **INSIDE) as cluster, Client(cluster) as client:
            assert client.run(of_worker).popitem()[1] == [0, 1, 2, 3]
        with LocalDeviceCluster(n_workers=0, **INSIDE):
            pass


def test_workers_of_this_process_use_its_devices_together(lock_directory: Path) -> None:
    with LocalDeviceCluster(**INSIDE), LocalDeviceCluster(**INSIDE) as cluster:
        with Client(cluster) as client:
            assert client.run(of_worker).popitem()[1] == [0, 1, 2, 3]
        with pytest.raises(DevicesInUseError, match="worker 0 of inproc"):
            LocalDeviceCluster(dashboard_address=":0")


def test_a_cluster_that_got_the_rest_grows_no_further(lock_directory: Path) -> None:
    with held(lock_directory, 0, 1):
        with pytest.warns(UserWarning, match="1 device will be idle"):
            cluster = LocalDeviceCluster(devices_per_worker=1, **INSIDE)
        with cluster:
            assert cluster.adapt().maximum == 2
            with pytest.raises(ValueError, match="would need 3, and the cluster has 2"):
                cluster.scale(3)
