"""The devices that tests run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dask_devctx import driver
from dask_devctx.driver.simulated import SimulatedMachine


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu(count=1): needs so many real GPUs")


@pytest.fixture
def machine() -> Iterator[SimulatedMachine]:
    """A fresh simulated machine with four GPUs, whose driver the package uses in this test."""
    machine = SimulatedMachine(4, host="test")
    with driver.use(machine.backend()):
        yield machine
