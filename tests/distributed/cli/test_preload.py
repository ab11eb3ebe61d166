"""``--preload dask_devctx``, on the command line and in the configuration, and several hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack

import dask
import pytest
from distributed import Client, LocalCluster, get_worker

from dask_devctx import Device, DeviceNotFoundError
from dask_devctx.driver.simulated import SimulatedMachine
from tests.distributed.commands import dask_command
from tests.distributed.devices import submit_on, workers_of

WORKER = ("worker", "--no-dashboard", "--nthreads", "4", "--preload", "dask_devctx")


def where() -> tuple[str, str, int]:
    device = Device.current()
    return get_worker().name, device.uuid, device.device_id


def uuids(host: str) -> list[str]:
    return [gpu.uuid for gpu in SimulatedMachine(4, host=host).gpus]


@pytest.fixture
def address() -> Iterator[str]:
    with dask_command(
        *("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"),
        *("--preload", "dask_devctx"),
    ) as scheduler:
        assert scheduler.says("Scheduler at:"), scheduler.said
        yield re.search(r"Scheduler at:\s+(tcp://\S+)", scheduler.said)[1]


def test_several_hosts(address: str) -> None:
    with ExitStack() as stack:
        for host in ("a", "b"):
            env = {"DASK_DEVCTX__SIMULATED_HOST": host}
            stack.enter_context(dask_command(*WORKER, "--name", host, address, env=env))
        client = stack.enter_context(Client(address))
        client.wait_for_workers(2, timeout=30)
        for host in ("a", "b"):
            for ordinal, uuid in enumerate(uuids(host)):
                future = submit_on(client, uuid, where, pure=False)
                assert future.result(timeout=10) == (host, uuid, ordinal)
        ran = submit_on(client, 2, where, pure=False)  # an ordinal is any host's
        name, uuid, ordinal = ran.result(timeout=10)
        assert uuid == uuids(name)[2]
        assert ordinal == 2
        future = submit_on(client, uuids("c")[0], where, pure=False)
        assert isinstance(future.exception(timeout=40), DeviceNotFoundError)
        # what was made on one host is read on the other
        there = submit_on(client, uuids("a")[0], lambda: list(range(1000)), pure=False)
        summed = submit_on(client, uuids("b")[0], sum, there, pure=False)
        assert summed.result(timeout=10) == 499500


def test_workers_of_a_machine_share_it_out(address: str) -> None:
    env = {"DASK_DEVCTX__DEVICES_PER_WORKER": "2"}
    with ExitStack() as stack:
        command = (*WORKER[:1], "--nworkers", "2", *WORKER[1:])  # with their nannies
        stack.enter_context(dask_command(*command, address, env=env))
        client = stack.enter_context(Client(address))
        client.wait_for_workers(2, timeout=30)
        names = []
        for ordinal in range(4):
            name, _, found = submit_on(client, ordinal, where, pure=False).result(timeout=10)
            assert found == ordinal
            names.append(name)
        assert names[0] == names[1] != names[2] == names[3]
        with dask_command(*WORKER, "--no-nanny", address, env=env) as third:
            assert third.says("wants 2 devices for itself, and cuda:"), third.said
            assert third.ends() != 0
        assert len(workers_of(client)) == 2


@pytest.mark.parametrize(
    ("nanny", "env", "text"),
    [
        ("--nanny", {"DASK_DEVCTX__DEVICES": "[7]"}, "no device 7"),
        (
            *("--no-nanny", {"CUDA_VISIBLE_DEVICES": "9"}),
            "(?s)no GPU: check CUDA_VISIBLE_DEVICES.*Available: none; CUDA_VISIBLE_DEVICES is '9'",
        ),
        ("--no-nanny", {"DASK_DEVCTX__SHARED": "7"}, "devctx.shared"),
    ],
)
def test_a_worker_without_devices_does_not_start(
    nanny: str, env: dict[str, str], text: str, address: str
) -> None:
    with dask_command(*WORKER, nanny, address, env=env) as worker:
        assert worker.ends() != 0
    assert re.search(text, worker.said)


@pytest.mark.parametrize("processes", [False, True])
def test_preloaded_from_the_configuration(processes: bool) -> None:
    preload = {"distributed.worker.preload": ["dask_devctx"], "devctx.devices-per-worker": 1}
    with (
        dask.config.set({**preload, "distributed.scheduler.preload": ["dask_devctx"]}),
        LocalCluster(n_workers=4, processes=processes, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        assert "devctx-routing" in cluster.scheduler.plugins
        seen = set()
        for uuid in [device.uuid for device in map(Device, range(4))]:
            name, found, _ = submit_on(client, uuid, where, pure=False).result(timeout=10)
            assert found == uuid
            seen.add(name)
        assert len(seen) == 4
