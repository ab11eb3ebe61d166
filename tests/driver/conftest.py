"""Fixtures with the calls of both drivers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda.bindings import driver as types

from dask_devctx.driver.calls import Calls
from dask_devctx.driver.simulated import SimulatedMachine
from tests.addressed import AddressedDriver


@pytest.fixture(
    params=["simulated", "addressed", pytest.param("real", marks=pytest.mark.gpu(count=2))]
)
def calls(request: pytest.FixtureRequest) -> Iterator[Calls]:
    """The calls of a driver, with the primary context of device 0 current."""
    machine = SimulatedMachine(2)
    drivers = {"simulated": machine.driver, "addressed": AddressedDriver(machine), "real": types}
    calls = Calls(drivers[request.param])
    try:
        calls.init()
    except Exception as error:
        pytest.skip(f"no driver: {error}")
    contexts = [calls.primary_retain(ordinal) for ordinal in (0, 1)]
    calls.contexts = contexts
    calls.set_current(contexts[0])
    yield calls
    calls.set_current(0)
    for ordinal in (0, 1):
        assert calls.driver.cuDevicePrimaryCtxRelease(ordinal)[0] == 0
