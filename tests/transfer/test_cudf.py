"""cuDF's objects belong to one device of a process. A module of that name stands in for it."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from dask_devctx import Device, SimulatedArray, to_device
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.errors import DevctxError
from dask_devctx.transfer import nbytes_by_device


@pytest.fixture
def frame(machine: SimulatedMachine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make a frame on the current device."""
    cudf: Any = types.ModuleType("cudf")

    class Series:
        def __init__(self) -> None:
            self.column = SimulatedArray((10,))

        def memory_usage(self) -> int:
            return self.column.nbytes

    class DataFrame(Series):
        def memory_usage(self) -> Any:  # of each column
            return SimulatedArray.asarray([80, 80]).get()

    class Index(Series):
        pass

    for kind in (Series, DataFrame, Index):
        kind.__module__ = "cudf.core"
        setattr(cudf, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "cudf", cudf)
    monkeypatch.delitem(sys.modules, "dask_devctx.transfer.libraries.cudf", raising=False)
    importlib.import_module("dask_devctx.transfer.libraries.cudf")
    yield DataFrame
    del sys.modules["dask_devctx.transfer.libraries.cudf"]


def test_it_is_on_the_device_that_had_it_first(frame: Any) -> None:
    with Device(1):
        value = frame()
        assert nbytes_by_device([value]) == {Device(1): 160}
    assert nbytes_by_device(value) == {Device(1): 160}  # with none current
    assert to_device(value, 1) is value


def test_a_second_device_is_refused_with_the_remedy(frame: Any) -> None:
    with Device(1):
        value = frame()
        nbytes_by_device(value)
    with Device(0), pytest.raises(DevctxError, match="n_workers="):
        nbytes_by_device(frame())
    with pytest.raises(DevctxError, match="cuDF uses one device in a process, here cuda:1"):
        to_device(value, 2)
