"""``make soak``, at a small size."""

from __future__ import annotations

import re

import pytest

from tests.python import python

pytestmark = pytest.mark.long


@pytest.mark.parametrize("workers", ["1", "2", "4"])
def test_soak(workers: str) -> None:
    few = ("--tasks", "100", "--batch", "50", "--seed", "199", "--guilty", "1", "--faults", "10")
    done = python("-m", "tests.soak", *few, "--workers", workers)
    assert re.search(r"seed 199: 10\d tasks", done.stdout)
    assert re.search(r"  guilty +\d found\n", done.stdout)
    assert "every result right, nothing lost" in done.stdout
