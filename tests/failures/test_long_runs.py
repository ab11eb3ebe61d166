"""``make soak``, at a small size."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from tests.python import ROOT, python

pytestmark = pytest.mark.long


@pytest.mark.parametrize("workers", ["1", "2", "4"])
def test_soak(workers: str) -> None:
    few = ("--tasks", "100", "--batch", "50", "--seed", "199", "--guilty", "1", "--faults", "10")
    done = python("-m", "tests.soak", *few, "--workers", workers)
    assert re.search(r"seed 199: 10\d tasks", done.stdout)
    assert re.search(r"  guilty +\d found\n", done.stdout)
    assert "every result right, nothing lost" in done.stdout


def test_an_interrupted_soak_prints_its_table() -> None:
    command = [sys.executable, "-m", "tests.soak", "--tasks", "1000000", "--batch", "20"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as soak:
        assert "the workers are there" in soak.stdout.readline()
        soak.send_signal(signal.SIGTERM)
        shown = soak.communicate(timeout=110)[0]
    assert re.search(r"seed \d+: \d+ tasks in", shown)
    assert "every result right, nothing lost" in shown
    assert soak.returncode == 0
