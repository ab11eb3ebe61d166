"""Clusters on simulated devices, with dask's own checks of its state on.

No folder here is named ``worker`` or ``scheduler``: dask leaves the frames of files in
``distributed/worker`` and ``distributed/scheduler`` out of the tracebacks of tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
from distributed import Client, LocalCluster, utils_test

from dask_devctx.driver.simulated import SimulatedMachine
from tests.distributed.devices import started
from tests.distributed.starting import forked_workers


@pytest.fixture
def simulation() -> str:
    return "simulated"


@pytest.fixture(autouse=True)
def on_simulated_devices(machine: SimulatedMachine, validate: None) -> Iterator[None]:
    """All tests here run so."""
    with forked_workers():
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


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of a cluster in this process, of two workers with two devices each."""
    with started(n_workers=2, tasks_per_device=2) as client:
        yield client


@pytest.fixture
def cluster(client: Client) -> LocalCluster:
    return client.cluster
