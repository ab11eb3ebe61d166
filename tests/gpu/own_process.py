"""Scenarios that have a process of their own, on real GPUs."""

from __future__ import annotations

import json
import tempfile
from typing import Any

from tests.python import python


def answer_of(module: str, *arguments: str, **variables: str) -> Any:
    """Run a module of the tests; return what it prints last, read as JSON."""
    shown = output_of(module, *arguments, **variables)
    lines = [line for line in shown.splitlines() if line.startswith("{")]
    assert lines, shown
    print(lines[-1])
    return json.loads(lines[-1])


def output_of(module: str, *arguments: str, **variables: str) -> str:
    """Run a module of the tests, which ends well; return what it prints."""
    with tempfile.TemporaryDirectory() as locks:  # other tests use the GPUs at the same time
        own = {"DASK_DEVCTX__SIMULATED_DEVICES": None, "DASK_DEVCTX__LOCK_DIRECTORY": locks}
        return python("-m", module, *arguments, env={**own, **variables}, timeout=300).stdout


def first_device(dask_worker: Any) -> int | None:
    devices = dask_worker.plugins["devctx"].worker_devices
    return devices[0].device_id if devices else None
