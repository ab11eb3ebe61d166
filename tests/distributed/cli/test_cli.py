"""``dask devctx info``."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click
import dask
import dask.cli
import pytest
from click.testing import CliRunner, Result

from dask_devctx.cli import devctx
from dask_devctx.driver.simulated import SimulatedMachine

ROOT = Path(__file__).parents[3]


def info(*arguments: str) -> Result:
    return CliRunner().invoke(devctx, ["info", *arguments], catch_exceptions=False)


def as_json() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(info("--json").stdout)
    return found


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def show(value: str) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)

    return show


def test_dask_finds_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["dask_cli"].items()

    @click.group
    def dask_itself() -> None: ...

    dask.cli._register_command_ep(dask_itself, EntryPoint(name, value, "dask_cli"))
    found = CliRunner().invoke(dask_itself, ["devctx", "info"])
    assert (found.exit_code, found.stdout.splitlines()[0][:19]) == (0, "4 simulated devices")


def test_every_device_has_a_line(machine: SimulatedMachine) -> None:
    machine.gpus[1].numa_node = 1
    machine.gpus[1].used_memory = 4 * 2**30
    result = info()
    assert result.exit_code == 0
    head, *rows = result.stdout.split("\n\n")[1].splitlines()
    assert head.split()[:3] == ["device", "name", "uuid"]
    for ordinal, (gpu, row) in enumerate(zip(machine.gpus, rows, strict=True)):
        for cell in (f"cuda:{ordinal}", "Simulated GPU", gpu.uuid, gpu.pci_bus_id, "9.0"):
            assert cell in row
    assert "12.0 GiB" in rows[1]
    assert rows[1].split()[-2] == "1"
    assert "Problems" not in result.stdout
    assert "Hidden" not in result.stdout


def test_who_reaches_whom(machine: SimulatedMachine) -> None:
    machine.gpus[0].peers = frozenset({1})
    machine.gpus[3].peers = frozenset()
    matrix = info().stdout.split("column's memory:\n\n")[1].splitlines()
    assert [line.split() for line in matrix[1:5]] == [
        ["cuda:0", "-", "yes", "no", "no"],
        ["cuda:1", "yes", "-", "yes", "yes"],
        ["cuda:2", "yes", "yes", "-", "yes"],
        ["cuda:3", "no", "no", "no", "-"],
    ]
    found = as_json()["devices"]
    assert found[0]["peers"] == [machine.gpus[1].uuid]
    assert found[3]["peers"] == []


def test_no_context_is_created(machine: SimulatedMachine) -> None:
    assert info().exit_code == 0
    assert [gpu.primary for gpu in machine.gpus] == [None] * 4
    assert [gpu.used_memory for gpu in machine.gpus] == [0] * 4


def test_json_has_everything(machine: SimulatedMachine) -> None:
    found = as_json()
    assert {key: value for key, value in found.items() if key != "devices"} == {
        "hidden": [],
        "cuda_visible_devices": None,
        "cuda_device_order": None,
        "cuda_version": "13.0",
        "simulated": True,
        "problems": [],
    }
    first = found["devices"][0]
    assert first["uuid"] == machine.gpus[0].uuid
    assert first["free_memory"] == first["total_memory"] == 16 * 2**30
    assert first["compute_capability"] == [9, 0]
    assert first["cpu_affinity"] == sorted(first["cpu_affinity"])


def test_what_is_hidden(only: Callable[[str], None], machine: SimulatedMachine) -> None:
    only("2,0")
    text = info().stdout
    assert "2 simulated devices" in text
    assert "CUDA_VISIBLE_DEVICES '2,0'" in text
    hidden = text.split("Hidden by CUDA_VISIBLE_DEVICES:")[1]
    assert machine.gpus[1].uuid in hidden
    assert machine.gpus[3].uuid in hidden
    found = as_json()
    assert [device["uuid"] for device in found["devices"]] == [
        machine.gpus[2].uuid,
        machine.gpus[0].uuid,
    ]
    assert [device["nvml_index"] for device in found["hidden"]] == [1, 3]


def test_what_is_wrong_is_said(only: Callable[[str], None]) -> None:
    only("0,9")
    result = info()
    assert result.exit_code == 0
    assert "- CUDA_VISIBLE_DEVICES='0,9': the entry '9' hides itself" in result.stdout


@pytest.mark.parametrize("value", ["", "-1", "7"])
def test_no_device_is_status_1(only: Callable[[str], None], value: str) -> None:
    only(value)
    result = info()
    assert result.exit_code == 1
    assert "0 simulated devices" in result.stdout
    assert f"CUDA_VISIBLE_DEVICES={value!r}" in result.stdout.split("Problems:")[1]
    assert info("--json").exit_code == 1


def test_an_option_that_is_out_of_range_is_a_problem() -> None:
    with dask.config.set({"devctx.replica-limit": 3}):
        found = as_json()
    assert any("devctx.replica-limit" in problem for problem in found["problems"])


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ("", 2, "no scheduler: give its address"),
        ("tcp://127.0.0.1:1 --timeout 0.5", 1, "Error: no scheduler at tcp://127.0.0.1:1"),
        ("tcp://127.0.0.1:1 --jso", 2, "--json"),
        ("tcp://127.0.0.1:1 --json", 2, "--json needs --once"),
        ("tcp://127.0.0.1:1 --timeout bogus", 2, "'bogus' is not a valid float"),
    ],
)
def test_top_of_no_cluster_ends_with_a_status(arguments: str, status: int, said: str) -> None:
    result = CliRunner().invoke(devctx, ["top", *arguments.split()], catch_exceptions=False)
    assert result.exit_code == status
    assert said in result.stderr
