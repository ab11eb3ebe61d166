"""Workers × devices: the same job gives the same result however the devices are split."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dask_devctx.cuda.inspection import inspect_machine
from dask_devctx.driver import SIMULATED_DEVICES_VARIABLE, backends, use


@pytest.mark.long
@pytest.mark.parametrize("kind", ["simulated", "real"])
@pytest.mark.timeout(300)
def test_every_layout_gives_the_same_result(kind: str) -> None:
    env = dict(os.environ)
    if kind == "real":
        with use(backends.real()):
            machine = inspect_machine()
        if len(machine.peers) < 2:
            pytest.skip(f"fewer than two real GPUs: {'; '.join(machine.problems)}")
        del env[SIMULATED_DEVICES_VARIABLE]
    script = Path(__file__).with_name("layouts.py")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["n_workers"] for row in rows] == [
        n for n in (1, 2, 4, 8) if n <= rows[0]["n_devices"]
    ]
    for row in rows:
        assert row["total"] == row["expected"]
        assert row["reached"]
        assert row["used"] == list(range(row["n_devices"]))
