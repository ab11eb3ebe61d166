"""The allocations under a value: views of one count once; unknown ones are said to be unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dask_devctx import Device, SimulatedArray, to_device
from dask_devctx.transfer import device_of
from dask_devctx.transfer.location import memories

pytestmark = pytest.mark.usefixtures("machine")


def sizes(value: object) -> list[tuple[int, int]]:
    found = memories(value)
    assert found is not None
    assert all(one.base for one in found)
    return sorted((one.device.device_id, one.nbytes) for one in found)


@dataclass
class Pair:
    left: Any
    right: Any


def test_an_array_and_its_views_are_one_allocation() -> None:
    x = SimulatedArray((10, 10))
    views = [x, x[2:5], x.T, x[::-1, 3], x.reshape(100)]
    for view in views:
        assert memories(view) == memories(x)
    assert sizes(views) == [(0, 800)]
    assert sizes(Pair(views[1], {"deep": (views[2],)})) == [(0, 800)]


def test_a_view_counts_with_all_of_its_allocation() -> None:
    assert sizes(SimulatedArray(1000)[:1]) == [(0, 8000)]


def test_copies_and_results_have_their_own() -> None:
    x = SimulatedArray(10)
    with Device(1):
        z = SimulatedArray(5)
    assert sizes([x, x.copy(), x + 1, z, to_device(x, 1)]) == [(0, 80)] * 3 + [(1, 40), (1, 80)]


@pytest.mark.parametrize("value", [1, "text", None, [], np.zeros(9), Pair(1, [np.zeros(3)])])
def test_host_data_has_none(value: object) -> None:
    assert memories(value) == set()


def test_an_array_without_elements_has_none() -> None:
    assert memories([SimulatedArray(0), SimulatedArray((3, 0))]) == set()


class Grid:
    """A type of a user, of which only the device is known."""

    def __init__(self, cells: SimulatedArray) -> None:
        self.cells = cells


def test_a_type_whose_allocations_are_not_known() -> None:
    device_of.register(Grid, lambda grid: device_of(grid.cells))
    assert memories(Grid(SimulatedArray(10))) is None
    assert memories([SimulatedArray(10), Grid(SimulatedArray(10))]) is None


def test_a_search_has_a_bound() -> None:
    x = SimulatedArray(10)
    rows = [(n, str(n)) for n in range(1000)]
    value = {"x": x, "rows": [rows, [x[n % 10 :] for n in range(500)]]}
    assert memories(value, 5000) == memories(x)
    assert memories(value, 1000) is None
    assert memories(x, 1) == memories(x)
