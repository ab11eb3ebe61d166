"""``dask devctx worker``: its options, the numbers that it chooses, and its end."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
import psutil
import pytest
from click.testing import CliRunner, Result
from distributed import Client, LocalCluster
from distributed.cli.dask_worker import main as dask_worker
from distributed.system import MEMORY_LIMIT

from dask_devctx import Device, config, devices
from dask_devctx.cli import devctx
from dask_devctx.cli.worker import option_names, worker
from dask_devctx.config.options import OPTION_NAMES
from tests.distributed.commands import dask_command
from tests.distributed.devices import acquire, here, submit_on

installed = pytest.mark.skipif(
    not entry_points(group="dask_cli", name="devctx"),
    reason="the package is not installed, so dask does not know the command",
)

ADDRESS = "tcp://127.0.0.1:8786"
OTHER = "tcp://127.0.0.1:8787"


def spellings(command: click.Command) -> set[str]:
    return {text for param in command.params for text in (*param.opts, *param.secondary_opts)}


def test_it_has_every_option_of_dask_worker() -> None:
    assert spellings(dask_worker) - spellings(worker) == set()


def test_it_has_every_option_of_the_plugin_but_functions() -> None:
    assert {*OPTION_NAMES} - {*option_names()} == {"policy"}
    shown = CliRunner().invoke(devctx, ["worker", "--help"]).stdout
    assert not re.search("[`:]class|``", shown)
    options = re.findall("^  --([a-z-]+)", shown, re.M)
    assert options[:2] == ["devices", "devices-per-worker"]
    assert {"nthreads", "device-memory-limit", "memory-limit", "interface"} < {*options[:12]}


def test_the_examples_of_the_help_are_right() -> None:
    text = (worker.epilog or "").replace("\\\n", " ")
    examples = re.findall("^  dask devctx worker (.*)$", text, re.M)
    assert len(examples) >= 5
    for example in examples:
        worker.make_context("worker", shlex.split(example))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments that ``dask worker`` gets, with the configuration of that moment."""
    calls: list[dict[str, Any]] = []

    def start(**given: Any) -> None:
        calls.append(
            {**given, "config": {key: config.get(key) for key in config.defaults["devctx"]}}
        )

    monkeypatch.setattr(dask_worker, "callback", start)
    return calls


def run(*arguments: str) -> Result:
    return CliRunner().invoke(devctx, ["worker", *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "n_workers", "nthreads", "settings"),
    [
        ("", "4", 8, {"devices-per-worker": 1}),
        ("--devices 0,2", "2", 8, {"devices": (), "devices-per-worker": 1}),
        ("--n-workers 1", "1", 32, {"devices-per-worker": 4}),
        ("--nworkers 2 --tasks-per-device 2", "2", 32, {"devices-per-worker": 2}),
        ("--devices-per-worker 2 --n-workers 1", "1", 16, {"devices-per-worker": 2}),
        ("--no-nanny", "1", 32, {}),
        ("--device-memory-limit 0.5", "4", 8, {"device-memory-limit": 0.5}),
        ("--no-move-inputs", "4", 8, {"move-inputs": False}),
    ],
)
def test_numbers(
    arguments: str,
    n_workers: str,
    nthreads: int,
    settings: dict[str, Any],
    started: list[dict[str, Any]],
) -> None:
    if "devices" in settings:
        settings["devices"] = tuple(Device(n).uuid for n in (0, 2))
    before = config.get("devices-per-worker")
    assert run(ADDRESS, *arguments.split()).exit_code == 0
    (call,) = started
    assert (call["n_workers"], call["nthreads"]) == (n_workers, nthreads)
    n_devices = call["config"]["devices-per-worker"]
    assert call["memory_limit"] == MEMORY_LIMIT * n_devices // 4
    assert call["preload"] == ("dask_devctx",)
    assert call["config"].items() >= settings.items()
    assert config.get("devices-per-worker") == before


def test_options_of_dask_worker_are_passed_on(started: list[dict[str, Any]]) -> None:
    given = "--name gpu --memory-limit 2GiB --preload wave --protocol tcp --death-timeout 5"
    assert run(ADDRESS, *given.split(), "--no-dashboard", "--local-directory", "/d").exit_code == 0
    (call,) = started
    assert call["scheduler"] == ADDRESS
    assert (call["name"], call["memory_limit"], call["protocol"]) == ("gpu", "2GiB", "tcp")
    assert call["preload"] == ("dask_devctx", "wave")
    assert (call["death_timeout"], call["dashboard"], call["local_directory"]) == ("5", False, "/d")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ("nonsense", 2, "missing port number in address 'nonsense'"),
        ("foo://bar:1", 2, "unknown address scheme 'foo'"),
        (f"{ADDRESS} --task-per-device 2", 2, "No such option.*--tasks-per-device"),
        (f"{ADDRESS} --pre-import cudf", 2, "--pre-import.*DASK_DEVCTX__PRE_IMPORT"),
        (f"{ADDRESS} --tasks-per-device 0", 2, "tasks_per_device .* 1 or more, got 0$"),
        (f"{ADDRESS} --n-workers 5", 2, "5 workers with 1 device each would need 5, and the"),
        (f"{ADDRESS} --devices 9", 1, "no device 9"),
        (f"{ADDRESS} --rmm-async", 1, "rmm_async needs the package rmm"),
        (f"{ADDRESS} --protocol ucx", 1, "needs the package distributed_ucxx"),
    ],
)
def test_what_cannot_be_ends_with_a_status(
    arguments: str,
    status: int,
    said: str,
    started: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("rmm", "distributed_ucxx", "ucp"):
        monkeypatch.setitem(sys.modules, name, None)
    result = run(*arguments.split())
    assert (result.exit_code, started) == (status, [])
    assert re.search(said, " ".join(result.stderr.split()))


@pytest.fixture
def scheduler() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=0, processes=False, dashboard_address=":0", protocol="tcp") as one:
        yield one


def _devices(dask_worker: Any) -> tuple[str, list[int], int]:
    used = dask_worker.plugins["devctx"].worker_devices
    return dask_worker.name, [device.device_id for device in used], dask_worker.state.nthreads


@installed
def test_workers_run_and_end(scheduler: LocalCluster) -> None:
    address = scheduler.scheduler_address
    command = ("devctx", "worker", address, "--devices", "1,3", "--name", "gpu")
    with Client(scheduler) as client, dask_command(*command) as workers:
        client.wait_for_workers(2, timeout=60)
        found = sorted(client.run(_devices).values())
        assert [name for name, _, _ in found] == ["gpu-0", "gpu-1"]
        assert sorted(used for _, used, _ in found) == [[1], [3]]
        assert {nthreads for _, _, nthreads in found} == {8}
        assert submit_on(client, 3, here, pure=False).result(timeout=30) == 3
        children = psutil.Process(workers.process.pid).children(recursive=True)
        assert len(children) >= 2
        workers.process.send_signal(signal.SIGINT)  # Ctrl-C
        assert workers.ends() == 0, workers.said
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []


def test_a_wrong_option_of_dask_ends_with_a_line() -> None:
    with dask_command("devctx", "worker", ADDRESS, "--memory-limit", "much") as workers:
        assert workers.ends() == 2
        assert workers.says("Error: Could not interpret 'much'", 5)
        assert "Traceback" not in workers.said


def test_beside_another_cluster_it_starts_workers_for_the_free_devices(
    started: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    lease = acquire(devices()[:2], 2, holder=f"worker w of {OTHER}")
    run(ADDRESS)
    (line,) = caplog.messages
    run(ADDRESS, "--devices", "2,3")  # as somebody has chosen them
    assert caplog.messages == [line]
    lease.close()
    for call in started:
        assert (call["n_workers"], call["nthreads"]) == ("2", 8)
        assert call["config"]["devices-per-worker"] == 1
        assert call["config"]["devices"] == (Device(2).uuid, Device(3).uuid)  # later, too
        assert call["memory_limit"] == MEMORY_LIMIT // 4
    assert len(started) == 2
    assert line.startswith("The devices in use are those that are free, cuda:2, cuda:3: cuda:0")
    assert f"held by pid {os.getpid()} on " in line
    assert f", worker w of {OTHER}" in line


def test_a_file_of_the_scheduler_that_is_not_there_yet_is_told(
    tmp_path: Path, started: list[dict[str, Any]]
) -> None:
    path = tmp_path / "scheduler.json"
    said = f"Waiting for {path}, which dask scheduler --scheduler-file writes"
    assert said in run("--scheduler-file", str(path)).output
    path.touch()
    assert said not in run("--scheduler-file", str(path)).output
