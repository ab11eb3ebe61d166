"""Fixtures with the calls of both drivers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda.bindings import driver as types

from dask_devctx.driver.calls import Calls
from dask_devctx.driver.simulated import SimulatedMachine


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.gpu(count=2))])
def calls(request: pytest.FixtureRequest) -> Iterator[Calls]:
    """The calls of a driver, with the primary context of device 0 current."""
    calls = Calls(SimulatedMachine(2).driver if request.param == "simulated" else types)
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
        calls.primary_release(ordinal)
