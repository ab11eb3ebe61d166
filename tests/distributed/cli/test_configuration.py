"""``dask devctx config``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result
from distributed import LocalCluster

from dask_devctx import Device, LocalDeviceCluster, start_soonest
from dask_devctx.cli import devctx

# Those of `dask cuda config`, version 26.10.
THEIRS = {"--scheduler-file", "--tls-ca-file", "--tls-cert", "--tls-key"}


def test_it_has_every_option_of_dask_cuda_config() -> None:
    command: Any = devctx.commands["config"]
    assert {text for param in command.params for text in param.opts} >= {"scheduler", *THEIRS}


def show(*arguments: str) -> Result:
    return CliRunner().invoke(devctx, ["config", *arguments], catch_exceptions=False)


def test_options_devices_and_limits_are_shown() -> None:
    arguments: dict[str, Any] = {"protocol": "tcp", "processes": False, "dashboard_address": ":0"}
    with LocalDeviceCluster(
        n_workers=2,
        devices=[1, 3],
        tasks_per_device=3,
        device_memory_limit=0.25,
        policy=start_soonest,
        **arguments,
    ) as cluster:
        text = show(cluster.scheduler_address)
        found = json.loads(show(cluster.scheduler_address, "--json").stdout)
        limits = [worker.memory_manager.memory_limit for worker in cluster.workers.values()]
    assert text.exit_code == 0
    head, workers, devices, title, options = text.stdout.split("\n\n")
    assert head.startswith(f"scheduler {cluster.scheduler_address}, worker_ttl 300 s, 2 workers")
    assert [line.split()[-1] for line in workers.splitlines()] == ["devices", "1", "1"]
    assert devices.count("4.0 GiB") == 2
    assert title == "Options of all workers:"
    assert ["tasks_per_device", "3"] in [line.split() for line in options.splitlines()]
    assert found["scheduler"]["protocol"] == "tcp"
    seen = [*found["workers"].values()]
    assert [(one["name"], one["nthreads"], one["memory_limit"]) for one in seen] == [
        (n, 24, limit) for n, limit in enumerate(limits)
    ]
    for one, device in zip(seen, (Device(1), Device(3)), strict=True):
        options = one["devctx"]["options"]
        assert (options["tasks_per_device"], options["policy"]) == (3, "start_soonest")
        assert one["devctx"]["devices"] == {
            device.uuid: {
                "device": str(device.info),
                "device_memory_limit": 4 * 2**30,
                "rmm_pool_size": None,
                "rmm_maximum_pool_size": None,
                "rmm_release_threshold": None,
            }
        }


def test_a_worker_without_the_plugin_is_shown() -> None:
    with LocalCluster(1, processes=False, protocol="tcp", dashboard_address=":0") as cluster:
        (one,) = json.loads(show(cluster.scheduler_address, "--json").stdout)["workers"].values()
        assert "no plugin" in show(cluster.scheduler_address).stdout
    assert one["devctx"] is None


@pytest.mark.parametrize("command", ["config", "top"])
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ("", 2, "no scheduler: give its address"),
        ("tcp://127.0.0.1:1 --timeout 500ms", 1, "Error: no scheduler at tcp://127.0.0.1:1"),
        ("tcp://127.0.0.1:1 --jso", 2, "--json"),
        ("tcp://127.0.0.1:1 --timeout bogus", 2, "such as 10s or 500ms, got 'bogus'"),
        ("tcp://127.0.0.1:1 --timeout s10", 2, "such as 10s or 500ms, got 's10'"),
    ],
)
def test_what_cannot_be_ends_with_a_status(
    command: str, arguments: str, status: int, said: str
) -> None:
    result = CliRunner().invoke(devctx, [command, *arguments.split()], catch_exceptions=False)
    assert result.exit_code == status
    assert said in result.stderr
