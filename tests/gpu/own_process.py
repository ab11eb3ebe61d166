"""Scenarios that have a process of their own, on real GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def answer_of(module: str, *arguments: str, **variables: str) -> Any:
    """Run a module of the tests; return what it prints last, read as JSON."""
    shown = output_of(module, *arguments, **variables)
    lines = [line for line in shown.splitlines() if line.startswith("{")]
    assert lines, shown
    print(lines[-1])
    return json.loads(lines[-1])


def output_of(module: str, *arguments: str, **variables: str) -> str:
    """Run a module of the tests, which ends well; return what it prints."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "DASK_DEVCTX__SIMULATED_DEVICES"
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as locks:  # other tests use the GPUs at the same time
        environment["DASK_DEVCTX__LOCK_DIRECTORY"] = locks
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    return done.stdout


def first_device(dask_worker: Any) -> int | None:
    devices = dask_worker.plugins["devctx"].worker_devices
    return devices[0].device_id if devices else None
