"""The benchmarks run, at a size that measures nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import subjects
from benchmarks.case import TINY, Case, Contender, Size
from benchmarks.measure import measure, verdict
from benchmarks.report import as_data, judgement, plot, quantity, table
from dask_devctx import driver
from dask_devctx.driver.simulated import SimulatedMachine
from tests.addressed import addressed

ROOT = Path(__file__).parent.parent


def test_the_command_line_measures_every_subject(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--tiny", "-o", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {driver.SIMULATED_DEVICES_VARIABLE: "2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["tiny"] is True
    assert results["machine"]["gpus"] == ["Simulated GPU"] * 2
    assert "simulated" in results["machine"]["driver"]
    assert set(results["subjects"]) == set(subjects.NAMES)
    for subject in results["subjects"].values():
        for case in subject["cases"]:
            assert [c["role"] for c in case["contenders"]].count("ours") == 1
            for contender in case["contenders"]:
                assert len(contender["values"]) == TINY.rounds
                assert min(contender["values"]) > 0
                assert contender["name"] in done.stdout
    missing = {m["name"] for m in results["subjects"]["scope"]["cases"][0]["missing"]}
    assert {"CuPy", "torch", "Numba", "JAX"} <= missing
    drawn = importlib.util.find_spec("matplotlib") is not None
    for name in subjects.NAMES:
        assert (tmp_path / f"{name}.png").exists() is drawn
    assert ("matplotlib is not installed" in done.stdout) is not drawn


def test_a_machine_without_gpus_is_told_so(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != driver.SIMULATED_DEVICES_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--tiny", "scope", "-o", str(tmp_path)],
        cwd=ROOT,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "cannot run here" in done.stdout


def test_the_scope_subject_where_the_driver_tells_its_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("dask_devctx._scope", reason="the extension was not built")
    monkeypatch.setenv(driver.SIMULATED_DEVICES_VARIABLE, "2")
    with driver.use(addressed(SimulatedMachine(2))):
        cases = []
        for case in subjects.load("scope").cases(TINY):
            measured = measure(case, TINY)
            assert table(case, measured).startswith(case.name)
            cases.append(as_data(case, measured))
    names = {one["name"] for one in cases[0]["contenders"]}
    assert {"dask_devctx", "dask_devctx, in Python", "cuda.bindings"} <= names
    for case in cases:
        for one in case["contenders"]:
            assert "NOT" not in one["remark"], one


def _constant(name: str, value: float, **options: object) -> Contender:
    return Contender(name, lambda count: value * count, **options)  # type: ignore[arg-type]


def test_ratios_are_ours_by_theirs_and_only_peers_that_do_the_whole_job_count() -> None:
    case = Case(
        "a case",
        per="with",
        target=0.45,
        contenders=[
            _constant("ours", 3e-7, role="ours"),
            _constant("half the job", 1e-7, counts=False),
            _constant("slow", 2e-6),
            _constant("peer", 6e-7),
            _constant("floor", 1e-8, role="floor"),
        ],
    )
    measured = measure(case, Size(rounds=3, round_s=0))
    best = verdict(measured)
    assert best is not None
    assert best.contender.name == "peer"
    assert best.ratios == pytest.approx([0.5, 0.5, 0.5])
    assert judgement(case, measured) == "ours ÷ peer = 0.500, target at most 0.45: MISSED"


def test_rounds_are_interleaved_and_nobody_always_follows_the_same() -> None:
    order: list[str] = []

    def note(name: str) -> Contender:
        def run(count: int) -> float:
            order.append(name)
            return 1.0

        return Contender(name, run, role="ours" if name == "a" else "peer")

    measure(Case("a case", "with", [note(name) for name in "abc"]), Size(rounds=3, round_s=0))
    assert order[3:] == list("abcbcacab")  # after one warm-up each


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (2.61e-7, "s", "261 ns"),
        (1.5e-3, "s", "1.50 ms"),
        (71.2, "s", "71.2 s"),
        (5e-10, "s", "0.50 ns"),
        (3 * 2**30, "B", "3.00 GiB"),
    ],
)
def test_quantities(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    case = Case("a case", "with", [_constant("ours", 3e-7, role="ours"), _constant("peer", 6e-7)])
    data = as_data(case, measure(case, Size(rounds=3, round_s=0)))
    assert plot(tmp_path / "plot.png", "title", [data])
    assert (tmp_path / "plot.png").stat().st_size > 1000
