"""``--preload dask_devctx``, on the command line and in the configuration, and several hosts."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import entry_points
from pathlib import Path

import dask
import pytest
from distributed import Client, LocalCluster, Nanny, get_worker

from dask_devctx import Device, DeviceNotFoundError, DevicesInUseError, DriverUnavailableError
from dask_devctx.cli.preload import dask_setup
from dask_devctx.cuda.device import named_devices
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.worker.leases.lease import acquire
from tests.distributed.commands import Command, dask_command
from tests.distributed.devices import workers_of

installed = pytest.mark.skipif(
    not entry_points(group="dask_cli", name="devctx"),
    reason="the package is not installed, so dask does not know the command",
)
WORKER = ("worker", "--no-dashboard", "--nthreads", "4", "--preload", "dask_devctx")


def where() -> tuple[str, str, int]:
    device = Device.current()
    assert device is not None
    return get_worker().name, device.uuid, device.device_id


def uuids(host: str) -> list[str]:
    return [gpu.uuid for gpu in SimulatedMachine(4, host=host).gpus]


def address_of(scheduler: Command) -> str:
    assert scheduler.says("Scheduler at:"), scheduler.said
    found = re.search(r"Scheduler at:\s+(tcp://\S+)", scheduler.said)
    assert found is not None
    return found[1]


@pytest.fixture
def address() -> Iterator[str]:
    with dask_command(
        *("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"),
        *("--preload", "dask_devctx"),
    ) as scheduler:
        yield address_of(scheduler)


def test_importing_the_package_imports_no_dask() -> None:
    source = (
        "import sys, dask_devctx; assert not {'dask', 'distributed'} & sys.modules.keys();"
        "dask_devctx.dask_setup; assert 'distributed' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


def test_several_hosts(address: str) -> None:
    with ExitStack() as stack:
        for host in ("a", "b"):
            env = {"DASK_DEVCTX__SIMULATED_HOST": host}
            stack.enter_context(dask_command(*WORKER, "--name", host, address, env=env))
        check_two_hosts(stack.enter_context(Client(address)))


def check_two_hosts(client: Client) -> None:
    client.wait_for_workers(2, timeout=30)
    for host in ("a", "b"):
        for ordinal, uuid in enumerate(uuids(host)):
            with dask.annotate(device=uuid):
                future = client.submit(where, pure=False)
            assert future.result(timeout=10) == (host, uuid, ordinal)
    with dask.annotate(device=2):  # an ordinal is any host's
        name, uuid, ordinal = client.submit(where, pure=False).result(timeout=10)
    assert uuid == uuids(name)[2]
    assert ordinal == 2
    with dask.annotate(device=uuids("c")[0]):
        future = client.submit(where, pure=False)
    assert isinstance(future.exception(timeout=40), DeviceNotFoundError)
    # what was made on one host is read on the other
    with dask.annotate(device=uuids("a")[0]):
        there = client.submit(lambda: list(range(1000)), pure=False)
    with dask.annotate(device=uuids("b")[0]):
        assert client.submit(sum, there, pure=False).result(timeout=10) == 499500


_NETWORK = "10.213.97"


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


@contextmanager
def two_networks() -> Iterator[None]:
    """The namespaces dv-a and dv-b, each with a link to a bridge of this one."""
    steps = ["link add dv-br type bridge", f"addr add {_NETWORK}.1/24 dev dv-br"]
    steps += ["link set dv-br up"]
    for number, host in enumerate("ab", 2):
        inside = f"netns exec dv-{host} ip"
        steps += [
            f"netns add dv-{host}",
            f"link add dv-{host} type veth peer name dv-in netns dv-{host}",
            f"link set dv-{host} master dv-br",
            f"link set dv-{host} up",
            f"{inside} link set lo up",
            f"{inside} addr add {_NETWORK}.{number}/24 dev dv-in",
            f"{inside} link set dv-in up",
        ]
    try:
        for step in steps:
            done = _ip(*step.split())
            if done.returncode:
                pytest.skip(f"network namespaces cannot be made: ip {step}: {done.stderr.strip()}")
        yield
    finally:
        for host in "ab":
            _ip("link", "del", f"dv-{host}")
            _ip("netns", "del", f"dv-{host}")
        _ip("link", "del", "dv-br")


def test_two_hosts_with_networks_of_their_own() -> None:
    try:
        probe = _ip("netns", "list")
    except FileNotFoundError:
        pytest.skip("there is no ip command")
    if probe.returncode:
        pytest.skip(f"ip netns is not permitted: {probe.stderr.strip()}")
    with two_networks(), ExitStack() as stack:
        command = ("scheduler", "--host", f"{_NETWORK}.1", "--port", "0", "--no-dashboard")
        address = address_of(stack.enter_context(dask_command(*command)))
        for number, host in enumerate("ab", 2):
            stack.enter_context(
                dask_command(
                    *(*WORKER, "--name", host, "--host", f"{_NETWORK}.{number}", address),
                    env={"DASK_DEVCTX__SIMULATED_HOST": host},
                    prefix=("ip", "netns", "exec", f"dv-{host}"),
                )
            )
        check_two_hosts(stack.enter_context(Client(address)))


def test_workers_of_a_machine_share_it_out(address: str) -> None:
    env = {"DASK_DEVCTX__DEVICES_PER_WORKER": "2"}
    with ExitStack() as stack:
        # one command with two workers, and their nannies
        command = (*WORKER[:1], "--nworkers", "2", *WORKER[1:])
        stack.enter_context(dask_command(*command, address, env=env))
        client = stack.enter_context(Client(address))
        client.wait_for_workers(2, timeout=30)
        names = []
        for ordinal in range(4):
            with dask.annotate(device=ordinal):
                name, _, found = client.submit(where, pure=False).result(timeout=10)
            assert found == ordinal
            names.append(name)
        assert names[0] == names[1] != names[2] == names[3]
        with dask_command(*WORKER, "--no-nanny", address, env=env) as third:
            assert third.says("wants 2 devices for itself and 0 of 4 are free"), third.said
            assert third.ends() != 0
        assert len(workers_of(client)) == 2


def lines_of(*command: str, **env: str) -> list[str]:
    """Return the lines of a command that must end with an error, and without a traceback."""
    with dask_command(*command, env=env) as worker:
        assert worker.ends() != 0
    assert "Traceback" not in worker.said
    return worker.said.splitlines()


@pytest.mark.parametrize(
    ("nanny", "env", "text"),
    [
        ("--nanny", {"DASK_DEVCTX__DEVICES": "[7]"}, "no device 7"),
        ("--no-nanny", {"CUDA_VISIBLE_DEVICES": "9"}, "CUDA_VISIBLE_DEVICES is '9': it hides all"),
    ],
)
def test_a_worker_without_devices_does_not_start(
    nanny: str, env: dict[str, str], text: str
) -> None:
    # dask's own line about the preload comes first
    _, last = lines_of(*WORKER, nanny, "tcp://127.0.0.1:1", **env)
    assert last.startswith("Error: ")
    assert text in last
    assert "`dask devctx info` shows what this machine has" in last
    if "DASK_DEVCTX__DEVICES" in env:
        assert all(last.count(uuid[:12]) == 1 for uuid in uuids("test"))


def test_no_driver_is_one_line() -> None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        pass
    else:
        pytest.skip("this machine has a driver")
    *_, last = lines = lines_of(*WORKER, "tcp://127.0.0.1:1", DASK_DEVCTX__SIMULATED_DEVICES="0")
    assert len(lines) == 2
    assert "Install NVIDIA's driver where the GPUs are" in last


@installed
def test_devices_that_others_hold_are_told_in_one_line(address: str, lock_directory: Path) -> None:
    devices = named_devices([0, 1])
    lease = acquire(devices, 2, holder="the other one", directory=lock_directory)
    command = ("devctx", "worker", "--devices", "0,1", "--n-workers", "1", "--no-dashboard")
    (line,) = lines_of(*command, address)
    lease.release()
    assert line.startswith("Error: this cluster wants 2 devices for itself, and cuda:0, cuda:1 are")
    assert "the other one. Name other devices with --devices, end the processes that" in line
    assert "--preload" not in line


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
            with dask.annotate(device=uuid):
                name, found, _ = client.submit(where, pure=False).result(timeout=10)
            assert found == uuid
            seen.add(name)
        assert len(seen) == 4


def test_the_real_error_of_a_preload_ends_the_start(lock_directory: Path) -> None:
    config = {"distributed.worker.preload": ["dask_devctx"], "devctx.devices-per-worker": 3}
    with (
        dask.config.set(config),
        pytest.raises(RuntimeError) as caught,
        LocalCluster(n_workers=2, processes=False, dashboard_address=":0"),
    ):
        pytest.fail("it started")
    causes = []
    error: BaseException | None = caught.value
    while error is not None:
        causes.append(error)
        error = error.__cause__
    assert isinstance(causes[-1], DevicesInUseError)
    assert not isinstance(causes[-1], DriverUnavailableError)


def test_a_nanny_cannot_preload_it() -> None:
    nanny = Nanny.__new__(Nanny)
    with pytest.raises(TypeError, match=r"distributed.worker.preload.*not by Nanny"):
        asyncio.run(dask_setup(nanny))
