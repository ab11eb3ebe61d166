"""The benchmarks run, at a size that measures nothing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.case import TINY, Case, Contender, ContenderFailedError, Size
from benchmarks.measure import measure, verdict
from benchmarks.report import as_data, judgement, table
from dask_devctx import driver
from tests.python import python


def ran(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Return what a run on two simulated devices wrote, and what it printed."""
    given = ("-m", "benchmarks", "--tiny", "-o", str(folder), *arguments)
    done = python(*given, env={driver.SIMULATED_DEVICES_VARIABLE: "2"}, timeout=None)
    return json.loads((folder / "results.json").read_text()), done.stdout


@pytest.mark.parametrize(
    ("names", "only", "missing"),
    [
        (["scope", "import", "scale"], None, {"CuPy", "torch", "Numba", "JAX"}),
        (["jobs"], "mean", {"dask-cuda, TCP", "dask-cuda, UCXX and RMM pool"}),
        *(
            pytest.param(*long, set(), marks=pytest.mark.long)
            for long in (
                (["page", "jobs", "tasks", "startup", "transfer", "between", "rechunk"], None),
                (["memory"], "host memory and back"),
            )
        ),
    ],
)
def test_the_command_line_measures_every_subject(
    tmp_path: Path, names: list[str], only: str | None, missing: set[str]
) -> None:
    results, printed = ran(tmp_path, *names, *(("-k", only) if only else ()))
    assert results["tiny"] is True
    assert results["machine"]["gpus"] == ["Simulated GPU"] * 2
    assert "simulated" in results["machine"]["driver"]
    assert set(results["subjects"]) == set(names)
    drawn = importlib.util.find_spec("matplotlib") is not None
    absent: set[str] = set()
    for name, subject in results["subjects"].items():
        assert subject["cases"]
        roles: set[str] = set()
        for case in subject["cases"]:
            assert [c["role"] for c in case["contenders"]].count("ours") == 1
            assert case["failed"] == []
            for contender in case["contenders"]:
                assert len(contender["values"]) == TINY.rounds
                assert min(contender["values"]) > 0
                assert contender["name"] in printed
            assert ("SIMULATED" in case["name"]) is (name != "import")
            roles |= {one["role"] for one in case["contenders"]}
            absent |= {one["name"] for one in case["missing"]}
        assert (tmp_path / f"{name}.png").exists() is bool(drawn and roles & {"peer", "variant"})
    assert ("matplotlib is not installed" in printed) is not drawn
    assert missing <= absent


def fails(count: int) -> float:
    raise ContenderFailedError("it has had enough")


def _constant(name: str, value: float, **options: object) -> Contender:
    return Contender(name, lambda count: value * count, **options)  # type: ignore[arg-type]


def test_ratios_are_ours_by_theirs_and_only_peers_that_do_the_whole_job_count() -> None:
    """One that fails is reported, and stops nobody."""
    turns = iter(range(10))

    def fails_once(count: int) -> float:
        return fails(count) if next(turns) == 2 else 1e-9

    case = Case(
        "a case",
        per="with",
        target=0.45,
        contenders=[
            _constant("ours", 3e-7, role="ours"),
            _constant("half the job", 1e-7, counts=False),
            Contender("fails", fails_once),
            _constant("slow", 2e-6),
            _constant("peer", 6e-7),
            _constant("floor", 1e-8, role="floor"),
        ],
    )
    measured = measure(case, Size(rounds=3, round_s=0))
    best = verdict(measured)
    assert best.contender.name == "peer"
    assert best.ratios == pytest.approx([0.5, 0.5, 0.5])
    assert judgement(case, measured) == "ours ÷ peer = 0.500, target at most 0.45: MISSED"
    assert judgement(case, measured) in table(case, measured)
    assert "FAILED: fails: it has had enough" in table(case, measured)
    data = as_data(case, measured)
    assert data["failed"] == [{"name": "fails", "reason": "it has had enough"}]
    assert [len(one["values"]) for one in data["contenders"]] == [3] * 5
