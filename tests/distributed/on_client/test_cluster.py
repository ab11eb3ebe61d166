"""``LocalDeviceCluster``: its numbers, its growth, and its end."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import psutil
import pytest
from distributed import Client, Status, Worker
from distributed.utils_test import poll_for

from dask_devctx import (
    DevctxError,
    Device,
    DevicePlugin,
    DevicesInUseError,
    LocalDeviceCluster,
    devices,
    start_soonest,
)
from dask_devctx.client import layout
from dask_devctx.config.options import OPTION_NAMES, Options
from tests.distributed.devices import acquire, here, of_worker, started, submit_on, workers_of

QUIET: dict[str, Any] = {"processes": False, "dashboard_address": ":0"}


def ordinals(cluster: LocalDeviceCluster) -> list[list[int]]:
    return sorted(
        [device.device_id for device in worker.plugins["devctx"].worker_devices]
        for worker in cluster.workers.values()
    )


def until_there_are(cluster: LocalDeviceCluster, n_workers: int) -> None:
    """Wait for the cluster's own list of workers: the scheduler knows of each one earlier."""
    poll_for(lambda: len(cluster.workers) == n_workers, timeout=10)


HALVES = {"devctx.devices-per-worker": 1, "devctx.devices": [0, 2]}
EACH, ALL = [[0], [1], [2], [3]], [[0, 1, 2, 3]]
PROCESSES = {"processes": True}


@pytest.mark.parametrize(
    ("arguments", "settings", "expected", "threads"),
    [
        (PROCESSES, {}, EACH, 8),
        (PROCESSES, {"devctx.ipc": False}, ALL, 32),
        ({}, {}, ALL, 32),
        ({"n_workers": 2}, {}, [[0, 1], [2, 3]], 16),
        ({"n_workers": 4, "tasks_per_device": 2}, {}, EACH, 16),
        ({**PROCESSES, "n_workers": 2, "devices": [3, "cuda:1"]}, {}, [[1], [3]], 8),
        ({**PROCESSES, "n_workers": 2, "devices_per_worker": 1}, {}, [[0], [1]], 8),
        ({"devices": [2], "threads_per_worker": 1}, {}, [[2]], 1),
        ({"n_workers": 2}, HALVES, [[0], [2]], 8),
    ],
)
def test_the_devices_and_threads_of_each_worker(
    arguments: dict[str, Any], settings: dict[str, Any], expected: list[list[int]], threads: int
) -> None:
    with dask.config.set(settings), started(**arguments) as client:
        client.wait_for_workers(len(expected), timeout=60)
        assert sorted(client.run(of_worker).values()) == expected
        assert {worker["nthreads"] for worker in workers_of(client).values()} == {threads}
        if "processes" in arguments:  # they have a configuration of their own
            client.register_plugin(DevicePlugin())
            assert sorted(client.run(of_worker).values()) == expected


def test_devices_that_show_no_memory_have_one_worker() -> None:
    instances: Any = [SimpleNamespace(uuid=f"MIG-{n}") for n in range(2)]
    assert layout.default_n_workers(instances, Options(), processes=True) == 1


@pytest.mark.parametrize(
    ("arguments", "said", "expected"),
    [
        ({"n_workers": 3}, "3 workers will use 1 each: 1 device will be idle", EACH[:3]),
        ({"devices_per_worker": 3}, "1 worker will use 3 each: 1 device will b", [[0, 1, 2]]),
    ],
)
def test_devices_that_are_left_over_are_told(
    arguments: dict[str, Any],
    said: str,
    expected: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LocalDeviceCluster(**arguments, **QUIET) as cluster:
        assert ordinals(cluster) == expected
    assert said in caplog.text


def leftovers(before: set[psutil.Process]) -> set[psutil.Process]:
    # multiprocessing keeps one process of each kind for all that it starts
    kept = "multiprocessing.resource_tracker", "multiprocessing.forkserver"
    return {
        child
        for child in set(psutil.Process().children(recursive=True)) - before
        if child.is_running()
        and child.status() != psutil.STATUS_ZOMBIE
        and not any(name in " ".join(child.cmdline()) for name in kept)
    }


def test_asynchronously(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with (
            LocalDeviceCluster(n_workers=np.int32(2), asynchronous=True, **QUIET) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            assert ordinals(cluster) == [[0, 1], [2, 3]]
            assert await submit_on(client, 3, here, pure=False) == 3
            await cluster.scale(2)
        share = acquire(devices(), 1, holder="somebody")
        monkeypatch.setattr(layout, "held_devices", lambda devices, **how: {})
        cluster = LocalDeviceCluster(n_workers=4, asynchronous=True, **QUIET)
        with pytest.raises(DevicesInUseError, match="somebody"):
            await cluster
        assert cluster.status.name == "closed"
        assert cluster.scheduler.status.name == "closed"
        assert {worker.status.name for worker in cluster.workers.values()} <= {"closed"}
        share.close()
        acquire(devices(), 4, holder="me").close()

    asyncio.run(body())


def test_scaling() -> None:
    with started(n_workers=1, devices_per_worker=1) as client:
        cluster: Any = client.cluster
        assert ordinals(cluster) == [[0]]
        cluster.scale(4)
        client.wait_for_workers(4, timeout=10)
        client.retire_workers([cluster.workers[0].address])
        poll_for(lambda: cluster.workers[0].status is Status.closed, timeout=10)
        cluster.scale(4)
        client.wait_for_workers(4, timeout=10)
        assert submit_on(client, 3, here, pure=False).result(10) == 3  # not announced yet, maybe
        until_there_are(cluster, 4)
        assert ordinals(cluster) == [[0], [1], [2], [3]]
        cluster.scale(2)
        until_there_are(cluster, 2)
        cluster.scale(4)
        client.wait_for_workers(4, timeout=10)


def test_it_takes_every_option_of_the_plugin() -> None:
    given: dict[str, Any] = {
        "devices": [0, 2],
        "devices_per_worker": 1,
        "shared": False,
        "cpu_threads": 2,
        "tasks_per_device": 2,
        "unannotated": "leave",
        "move_inputs": False,
        "policy": start_soonest,
        "synchronize": True,
        "oom_retries": 3,
        "ipc": False,
        "device_memory_limit": 2**30,
    }
    # RMM may be missing: tests/distributed/on_worker/test_allocators.py
    assert {*OPTION_NAMES} - given.keys() == {"allocator"}, "give each option a value above"
    uuids = tuple(Device(n).uuid for n in (0, 2))
    with LocalDeviceCluster(n_workers=2, **given, **QUIET) as cluster:
        assert ordinals(cluster) == [[0], [2]]
        for worker in cluster.workers.values():
            options = dataclasses.asdict(worker.plugins["devctx"].options)
            assert options.items() >= {**given, "devices": uuids}.items()


def test_arguments_of_the_workers_reach_them() -> None:
    class Mine(Worker):  # type: ignore[misc]
        def __init__(self, *args: Any, colour: str, **kwargs: Any) -> None:
            self.colour = colour
            super().__init__(*args, **kwargs)

    given: dict[str, Any] = {"worker_class": Mine, "colour": "red", "resources": {"A": 1}}
    with LocalDeviceCluster(n_workers=1, dashboard_address=":0", **given) as cluster:
        (worker,) = cluster.workers.values()
        assert (worker.colour, worker.state.total_resources) == ("red", {"A": 1})


def test_adapting() -> None:
    with started(n_workers=0, devices_per_worker=2) as client:
        cluster: Any = client.cluster
        adaptive = cluster.adapt(maximum=None, maximum_cores=100, interval="20ms")
        assert adaptive.maximum == 2
        assert adaptive.target_duration == 5 / 8, "a worker has 16 threads for two slots"
        futures = client.map(lambda _: time.sleep(0.05) or here(), range(200), pure=False)
        assert set(client.gather(futures)) == {0, 1, 2, 3}
        assert ordinals(cluster) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("processes", [False, True])
def test_a_worker_that_cannot_be_set_up_fails_the_start(
    processes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("raise ImportError('libbroken.so is missing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(psutil.Process().children(recursive=True))
    said = r"the worker [01] cannot use its devices.*: ImportError: libbroken\.so is missing"
    broken = dask.config.set({"devctx.pre-import": "broken_module"})
    with broken, pytest.raises(DevctxError, match=said):
        LocalDeviceCluster(
            n_workers=2,
            devices=[0, 1],
            processes=processes,
            dashboard_address=":0",
            silence_logs=50,
        )
    assert leftovers(before) == set()


# -- several clusters on one machine


HOLDER = "tcp://127.0.0.1:45861"


def held(*ordinals: int) -> ExitStack:
    held = ExitStack()
    for n in ordinals:
        held.enter_context(acquire([devices()[n]], 1, holder=f"worker {n} of {HOLDER}"))
    return held


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"processes": True}, [[2], [3]]),
        ({}, [[2, 3]]),
        ({"n_workers": 2}, [[2], [3]]),
        ({"devices_per_worker": 2}, [[2, 3]]),
        ({"devices": [1, 2, 3], "devices_per_worker": 1, "n_workers": 2}, [[2], [3]]),
    ],
)
def test_the_next_cluster_gets_the_rest(
    given: dict[str, Any], expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with held(0, 1), LocalDeviceCluster(**{**QUIET, **given}) as cluster, Client(cluster) as client:
        assert sorted(client.run(of_worker).values()) == expected
        said = repr(cluster)
    (line,) = [text for text in caplog.messages if "those that are free, cuda:2, cuda:3: " in text]
    assert re.search(rf"cuda:1 is held by pid \d+ on .*, worker 1 of {HOLDER}", line)
    assert said.endswith(", devices=cuda:2, cuda:3)")


@pytest.mark.parametrize(
    ("given", "taken", "said"),
    [
        (
            {},
            (0, 1, 2, 3),
            r"wants 1 device for itself, and cuda:0 is held by pid .*; cuda:3 is held by pid .*, "
            r"worker 3 of tcp://127.0.0.1:45861. No device is free: close the cluster .*"
            r"\(cluster.close\(\), or client.shutdown\(\)\), or use the same devices: shared=True "
            r"\(--shared\)",
        ),
        (
            {"n_workers": 3},
            (0, 1),
            r"wants 3 devices for itself, and cuda:0 is held by .* Free: cuda:2, cuda:3. "
            r"For these, write devices=\[2, 3\], lower",
        ),
        ({"devices": [1, 2]}, (0, 1), "wants 2 devices for itself, and cuda:1 is held by pid"),
        ({"devices_per_worker": 3}, (0, 1), "wants 3 devices"),
        (QUIET, (0, 1, 2, 3), "No device is free."),
    ],
)
def test_too_few_free_devices_are_told_at_once(
    given: dict[str, Any], taken: tuple[int, ...], said: str, capfd: Any
) -> None:
    """As where a notebook's cell runs twice: the exception has the text, and nothing starts."""
    start = time.monotonic()
    with held(*taken), pytest.raises(DevicesInUseError) as caught:
        LocalDeviceCluster(**{"dashboard_address": ":0", **given})
    assert time.monotonic() - start < 1
    assert capfd.readouterr().err == ""
    assert re.search(said, str(caught.value))
    assert "this cluster" in str(caught.value)


def test_clusters_of_one_process_exclude_each_other() -> None:
    with LocalDeviceCluster(**QUIET):
        for arguments in (QUIET, {"dashboard_address": ":0"}):
            with pytest.raises(DevicesInUseError, match="worker 0 of inproc"):
                LocalDeviceCluster(**arguments)
        every = [0, 1, 2, 3]
        for workers, used in [(0, []), (1, [every]), (2, [[0, 1], [2, 3]]), (5, [every] * 5)]:
            with LocalDeviceCluster(n_workers=workers, shared=True, **QUIET) as cluster:
                assert ordinals(cluster) == used
        with LocalDeviceCluster(n_workers=4, devices_per_worker=1, shared=True, **QUIET) as cluster:
            assert ordinals(cluster) == [[0], [1], [2], [3]]


def test_a_cluster_that_got_the_rest_grows_no_further() -> None:
    said = (
        "^3 workers with 2 devices each would need 6, and the cluster has 2. Start fewer "
        "workers, or pass a lower devices_per_worker$"
    )
    with held(0, 1), LocalDeviceCluster(devices_per_worker=2, **QUIET) as cluster:
        assert cluster.adapt().maximum == 1
        for given in ({"maximum": 3}, {"minimum": 3}, {"cores": 48}, {"n": 3}):
            with pytest.raises(ValueError, match=said):
                (cluster.scale if given.keys() < {"n", "cores"} else cluster.adapt)(**given)
