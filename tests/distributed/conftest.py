"""Clusters on simulated devices, with dask's own checks of its state on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
from distributed import utils_test

from dask_devctx import driver
from dask_devctx.driver.simulated import SimulatedMachine


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedMachine]:
    """Four simulated devices, in this process and, with the same UUIDs, in those it starts."""
    monkeypatch.setenv(driver.SIMULATED_DEVICES_VARIABLE, "4")
    machine = SimulatedMachine(4)
    with driver.use(machine.backend()):
        yield machine
        handle = machine.driver.cuCtxGetCurrent()[1]
        assert handle is None or int(handle) == 0, "a context was left current"


@pytest.fixture(autouse=True)
def validate() -> Iterator[None]:
    with dask.config.set(
        {"distributed.worker.validate": True, "distributed.scheduler.validate": True}
    ):
        yield


@pytest.fixture(autouse=True)
def lock_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The test's own, so that tests that run at the same time do not take each other's devices."""
    directory = tmp_path / "locks"
    monkeypatch.setenv("DASK_DEVCTX__LOCK_DIRECTORY", str(directory))
    setting = {"devctx.lock-directory": str(directory)}
    # gen_cluster goes back to the configuration that dask had when its test module was imported.
    with dask.config.set(setting), dask.config.set(setting, config=utils_test.original_config):
        yield directory
