"""Which streams are current, as far as it can be said without a GPU."""

from __future__ import annotations

import sys
import types

import pytest

from dask_devctx import Device
from dask_devctx.driver.relaxed import LEGACY_STREAM
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.transfer.streams import current_streams


def test_libraries_are_not_asked_about_simulated_devices(
    machine: SimulatedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(get_current_stream=asked.append))
    monkeypatch.setitem(sys.modules, "cupy", cupy)  # type: ignore[arg-type]
    with Device(1) as device:
        assert current_streams(device) == (LEGACY_STREAM,)
    assert not asked
