"""Clusters on four simulated devices, whose locks are the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dask
import pytest

from dask_devctx import driver
from dask_devctx.driver.simulated import SimulatedMachine


@pytest.fixture(autouse=True)
def lock_directory(tmp_path: Path) -> Path:
    """The test's own, so that tests that run at the same time do not take each other's devices."""
    return tmp_path / "locks"


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch, lock_directory: Path) -> Iterator[SimulatedMachine]:
    """The machine of this process; processes that it starts simulate the same one."""
    monkeypatch.setenv("DASK_DEVCTX__SIMULATED_DEVICES", "4")
    monkeypatch.setenv("DASK_DEVCTX__LOCK_DIRECTORY", str(lock_directory))
    machine = SimulatedMachine(4)
    settings = {
        "devctx.simulated-devices": 4,
        "devctx.lock-directory": str(lock_directory),
        "distributed.scheduler.validate": True,
        "distributed.worker.validate": True,
    }
    with dask.config.set(settings), driver.use(machine.backend()):
        yield machine
