"""The benchmarks run, at a size that measures nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import subjects
from benchmarks.__main__ import main
from benchmarks.case import TINY, Case, Contender, ContenderFailedError, Missing, Size
from benchmarks.host import Entry, Host, started
from benchmarks.measure import measure, verdict
from benchmarks.report import as_data, judgement, own_targets, plot, quantity, table
from dask_devctx import driver
from dask_devctx.driver.simulated import SimulatedMachine
from tests.addressed import addressed

ROOT = Path(__file__).parent.parent


def ran(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Return what a run on two simulated devices wrote, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--tiny", "-o", str(folder), *arguments],
        cwd=ROOT,
        env=os.environ | {driver.SIMULATED_DEVICES_VARIABLE: "2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "results.json").read_text()), done.stdout


@pytest.mark.parametrize(
    ("names", "only", "missing"),
    [
        (["scope", "import", "scale"], None, {"CuPy", "torch", "Numba", "JAX"}),
        (["jobs"], "mean", {"dask-cuda, TCP", "dask-cuda, UCXX and RMM pool"}),
        *(
            pytest.param(*long, set(), marks=pytest.mark.long)
            for long in (
                (["page", "jobs", "tasks", "startup", "transfer"], None),
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
        compared = bool(roles & {"peer", "variant"})
        assert (tmp_path / f"{name}.png").exists() is (drawn and compared)
    assert ("matplotlib is not installed" in printed) is not drawn
    assert missing <= absent


def test_every_subject_is_run_by_a_test() -> None:
    every = {"scope", "import", "tasks", "scale", "page", "startup", "transfer", "jobs", "memory"}
    assert set(subjects.NAMES) == every


def test_cases_are_chosen_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--tiny", "scope", "-o", str(tmp_path), "-k"]
    assert CliRunner().invoke(main, [*arguments, "NOTHING is"]).exit_code == 0
    before = (tmp_path / "results.json").read_text()
    (case,) = json.loads(before)["subjects"]["scope"]["cases"]
    assert case["name"].startswith("nothing is current")
    done = CliRunner().invoke(main, [*arguments, "no such case"])
    assert done.exit_code == 1
    assert "no case's name has 'no such case'" in done.output
    assert (tmp_path / "results.json").read_text() == before
    # clusters start only for the cases that are chosen
    monkeypatch.setattr("benchmarks.subjects.memory.field.n_devices", lambda: 2)
    monkeypatch.setattr("benchmarks.subjects.memory.started", pytest.fail)
    assert not list(subjects.load("memory").cases(dataclasses.replace(TINY, only=("absent",))))


def fails(count: int) -> float:
    raise ContenderFailedError("it has had enough")


def test_ours_failing_is_told_by_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Subject:
        TITLE = "a subject"

        @staticmethod
        def cases(size: Size) -> Iterator[Case]:
            yield Case("a case", "with", [Contender("ours", fails, "ours"), _constant("peer", 1.0)])

    monkeypatch.setattr(subjects, "load", lambda name: Subject)
    done = CliRunner().invoke(main, ["--tiny", "scope", "-o", str(tmp_path)])
    assert done.exit_code == 1
    assert "FAILED: ours: it has had enough" in done.output


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
    pytest.importorskip("dask_devctx.driver._scope", reason="the extension was not built")
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


def test_a_contender_that_fails_is_reported_and_stops_nobody() -> None:
    turns = iter(range(10))

    def fails_once(count: int) -> float:
        return fails(count) if next(turns) == 2 else 1e-9

    case = Case(
        "a case",
        "with",
        [
            _constant("ours", 3.0, role="ours"),
            Contender("fails", fails_once),
            _constant("peer", 6.0),
        ],
        target=0.4,
    )
    measured = measure(case, Size(rounds=3, round_s=0))
    assert "FAILED: fails: it has had enough" in table(case, measured)
    assert "ours ÷ peer = 0.500, target at most 0.4: MISSED" in table(case, measured)
    data = as_data(case, measured)
    assert data["failed"] == [{"name": "fails", "reason": "it has had enough"}]
    assert [len(one["values"]) for one in data["contenders"]] == [3, 3]


def test_ours_failing_leaves_no_verdict() -> None:
    case = Case("a case", "with", [Contender("ours", fails, "ours"), _constant("peer", 6.0)])
    measured = measure(case, Size(rounds=3, round_s=0))
    assert judgement(case, measured) == "ours could not be measured: no verdict"
    assert as_data(case, measured)["ratio"] is None
    assert "6.00 s" in table(case, measured)


def test_a_contender_over_its_time_gets_fewer_turns() -> None:
    def slow(count: int) -> float:
        time.sleep(0.02)
        return 1.0

    case = Case("a case", "job", [_constant("ours", 1.0, role="ours"), Contender("slow", slow)])
    capped = dataclasses.replace(case, cap_s=0.01, rounds=5)
    for one, rounds in ((case, 3), (capped, 1)):
        measured = measure(one, Size(rounds=3, round_s=0))
        assert len(measured[1].values) == len(measured[1].ratios) == rounds
    assert "1 of 5 rounds" in table(capped, measured)


def test_a_long_turn_is_told_when_it_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.measure._LONG_S", 0.01)

    def slow(count: int) -> float:
        time.sleep(0.02)
        return 1.0

    case = Case("a case", "with", [_constant("ours", 3.0, role="ours"), Contender("slow", slow)])
    measure(case, Size(rounds=2, round_s=0))
    told = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" took ")[0] for line in told] == [
        "  slow: the first turn",
        "  slow: the next turn",
        "  slow: the next turn",
    ]


def test_a_contender_can_have_a_target_of_its_own() -> None:
    contenders = [
        _constant("with", 5e-4, role="ours"),
        _constant("without", 4.9e-4, at_most=1.03, at_most_more=5e-6),
    ]
    case = Case("a case", "task", contenders)
    measured = measure(case, Size(rounds=3, round_s=0))
    assert own_targets(case, measured) == [
        "ours ÷ without = 1.020, target at most 1.03: met",
        "ours less without = 10.0 µs, target at most 5.00 µs: MISSED",
    ]


class _Held:
    """What a contender's process holds in these tests."""

    def add(self, one: int, other: int) -> int:
        return one + other

    def fail(self) -> None:
        raise ValueError("it does not work\nat all")

    def die(self) -> None:
        print("here is why", flush=True)
        os._exit(3)

    def hang(self) -> None:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        time.sleep(60)


@contextlib.contextmanager
def held(message: str = "") -> Iterator[_Held]:
    if message:
        raise RuntimeError(message)
    yield _Held()


HELD = "tests.test_benchmarks:held"


def test_a_host_answers_until_it_dies() -> None:
    with started([Entry("held", HELD)]) as (hosts, failed):
        assert failed == []
        host = hosts[0][1]
        assert host.call("add", 1, 2) == 3
        with pytest.raises(ContenderFailedError, match=r"ValueError: it does not work at all"):
            host.call("fail")
        assert host.call("add", 1, 3) == 4
        for _ in range(2):
            with pytest.raises(ContenderFailedError, match=r"died in die.*here is why"):
                host.call("die")


def test_a_host_that_hangs_is_ended_with_all_that_it_started() -> None:
    host = Host(HELD)
    try:
        with pytest.raises(ContenderFailedError, match="no answer within 0 s from hang"):
            host.call("hang", timeout_s=0.4)
        deadline = time.monotonic() + 5
        while _group_lives(host.pid):  # until init has reaped what it started
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        host.close()


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_contender_that_does_not_start_is_named() -> None:
    with started([Entry("bad", HELD, ("no such transport",)), Entry("good", HELD)]) as found:
        hosts, failed = found
        assert [entry.name for entry, _ in hosts] == ["good"]
        assert failed == [Missing("bad", "FAILED to start: RuntimeError: no such transport")]


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
