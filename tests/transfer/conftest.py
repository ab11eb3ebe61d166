"""These tests need no addresses of functions; those that do have both kinds of driver."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from dask_devctx import Device, SimulatedArray
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.transfer import release_held
from tests.transfer.order import Order


@pytest.fixture
def simulation() -> str:
    return "simulated"


@pytest.fixture
def x(machine: SimulatedMachine) -> Iterator[SimulatedArray]:
    with Device(0):
        array = SimulatedArray.asarray(np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    yield array
    machine.faults.clear()
    assert release_held() == 0, "something is still held"


@pytest.fixture
def order(machine: SimulatedMachine, x: SimulatedArray) -> Order:
    return Order(machine)
