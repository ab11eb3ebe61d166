"""``dask devctx info``."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

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


def test_dask_finds_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["dask_cli"].items()

    @click.group
    def dask_itself() -> None: ...

    dask.cli._register_command_ep(dask_itself, EntryPoint(name, value, "dask_cli"))
    found = CliRunner().invoke(dask_itself, ["devctx", "info"])
    assert (found.exit_code, found.stdout.splitlines()[0][:19]) == (0, "4 simulated devices")


def test_every_device_has_a_line(machine: SimulatedMachine) -> None:
    machine.gpus[1].used_memory = 4 * 2**30
    result = info()
    assert result.exit_code == 0
    head, *rows = result.stdout.split("\n\n")[1].splitlines()
    assert head.split()[:3] == ["device", "name", "uuid"]
    for ordinal, (gpu, row) in enumerate(zip(machine.gpus, rows, strict=True)):
        for cell in (f"cuda:{ordinal}", "Simulated GPU", gpu.uuid, gpu.pci_bus_id, "9.0"):
            assert cell in row
    assert "12.0 GiB" in rows[1]
    assert [gpu.primary for gpu in machine.gpus] == [None] * 4, "no context is created"
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


def test_what_is_hidden(machine: SimulatedMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    text = info().stdout
    assert "2 simulated devices" in text
    assert "CUDA_VISIBLE_DEVICES '2,0'" in text
    hidden = text.split("Hidden by CUDA_VISIBLE_DEVICES:")[1]
    assert all(machine.gpus[n].uuid in hidden for n in (1, 3))
    assert [line.split()[0] for line in hidden.splitlines()[3:]] == ["1", "3"]


@pytest.mark.parametrize(
    ("value", "status", "said"),
    [
        ("0,9", 0, "- CUDA_VISIBLE_DEVICES='0,9': the entry '9' hides itself"),
        ("", 1, "CUDA_VISIBLE_DEVICES=''"),
        ("7", 1, "CUDA_VISIBLE_DEVICES='7'"),
    ],
)
def test_problems_and_the_status(
    value: str, status: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    result = info()
    assert said in result.stdout.split("Problems:")[1]
    assert result.exit_code == status


def test_an_option_that_is_out_of_range_is_a_problem() -> None:
    with dask.config.set({"devctx.replica-limit": 3}):
        assert "devctx.replica-limit" in info().stdout.split("Problems:")[1]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ("", 2, "no scheduler: give its address"),
        ("tcp://127.0.0.1:1 --timeout 0.5", 1, "Error: no scheduler at tcp://127.0.0.1:1"),
        ("tcp://127.0.0.1:1 --onc", 2, "--once"),
        ("tcp://127.0.0.1:1 --timeout bogus", 2, "'bogus' is not a valid float"),
    ],
)
def test_top_of_no_cluster_ends_with_a_status(arguments: str, status: int, said: str) -> None:
    result = CliRunner().invoke(devctx, ["top", *arguments.split()], catch_exceptions=False)
    assert result.exit_code == status
    assert said in result.stderr
