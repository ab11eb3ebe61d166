"""The walk through a value: what it finds, how much it looks at, and what it says."""

from __future__ import annotations

import copyreg
import logging
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from dask_devctx import Device
from dask_devctx.transfer import device_of, location, nbytes_by_device, to_device, walk
from tests.transfer.hostile import ByReduce, Holder, Thing
from tests.transfer.shapes import array

pytestmark = pytest.mark.usefixtures("machine")


def nested(depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = [inner]
    return inner


def cube(last: Any = 1) -> Any:
    made: list[list[list[Any]]] = [[[1] * 100 for _ in range(100)] for _ in range(100)]
    made[-1][-1][-1] = last
    return made


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location, "_told", set())


class Watched:
    """Counts how many objects were looked at."""

    looked = 0


@device_of.register(Watched)
def _(value: Watched) -> None:
    Watched.looked += 1


HOST: dict[str, Callable[[], Any]] = {
    "tuples": lambda: [(i, "x") for i in range(100_000)],
    "numbers": lambda: list(range(100_000)),
    "cube": cube,
    "objects": lambda: [Thing(i) for i in range(5_000)],
    "dict of dicts": lambda: {i: {"a": i} for i in range(5_000)},
    "queue": lambda: deque((i,) for i in range(5_000)),
    "sets": lambda: {frozenset([i]) for i in range(5_000)},
    "deep": lambda: nested(10_000, "host"),
    "pandas": lambda: pd.DataFrame({"a": ["x"] * 100_000}),
    "module": lambda: logging,
}


@pytest.mark.parametrize("kind", HOST)
def test_host_data_is_itself_and_looked_at_for_a_moment(kind: str) -> None:
    """About a millisecond, counted in calls and returns: a look at all would have 50,000."""
    value = HOST[kind]()
    assert to_device(value, 1) is value
    calls = 0

    def called(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(called)
    try:
        places, _ = nbytes_by_device.found_in(value, walk.AT_MOST_ON_LOOP)
    finally:
        sys.setprofile(None)
    assert places == {}
    assert calls < 10_000


def test_a_thousand_objects_are_looked_at_and_a_value_with_more_is_told_once(caplog: Any) -> None:
    value = [Watched() for _ in range(3_000)]
    assert nbytes_by_device(value) == {}
    assert 900 < Watched.looked <= 1_000
    Watched.looked = 0
    assert nbytes_by_device.found_in(value, walk.AT_MOST_ON_LOOP) == ({}, False)
    assert 90 < Watched.looked <= 100
    assert nbytes_by_device([[i] for i in range(2_000)]) == {}
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("a list has more than the 1000 objects")
    assert "device_of.register" in said


@pytest.mark.parametrize(
    "around",
    [
        lambda x: [1] * 100_000 + [x],
        lambda x: [(1, "x")] * 100_000 + [(1, x)],
        lambda x: [x] + [(1, "x")] * 100_000,
        lambda x: (cube(), {"x": x}),
        lambda x: ({"x": x}, cube()),
        cube,
        lambda x: dict.fromkeys(range(100_000), 1) | {"x": x},
        lambda x: [[[i, x]] for i in range(5_000)],
        lambda x: {i: {"a": {"b": x}} for i in range(5_000)},
        lambda x: nested(300, x),
        lambda x: [[i] for i in range(500)] + [[x]] + [[i] for i in range(400)],
    ],
    ids=range(11),
)
def test_an_array_is_found_wherever_it_hides(around: Callable[[Any], Any]) -> None:
    value = around(array(3))
    assert device_of(to_device(value, 1)) is Device(1)
    assert device_of(value) is Device(3)


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("beside", ["x", range(50)], ids=["few", "many"])
def test_each_leaf_counts_once_among_few_objects_and_many(
    beside: Any, in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_c:
        monkeypatch.setattr(walk, "few_in_c", None)
    x, y = array(0), array(1)
    value = {"x": x, "again": [x, (y, x)], "beside": [*beside]}
    value["itself"] = value
    assert sorted(map(id, walk.leaves(value))) == sorted([id(x), id(y)])
    assert (walk.few(value) is None) == (not in_c or len(beside) > 1)
    broken = type("Broken", (), {})
    monkeypatch.setitem(walk._registered, broken, lambda whole: 1 / 0)
    assert walk.few([x, broken()]) is None, "what cannot be read is left to the walk"
    assert device_of(value) is Device(0)  # as many bytes on each: the lower ordinal


def test_a_type_that_copyreg_knows_is_made_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = lambda value: (Holder, (value.part,))  # noqa: E731
    monkeypatch.setitem(copyreg.dispatch_table, Holder, reduce)
    value = Holder(array(0))
    value.not_said = 1  # type: ignore[attr-defined]
    moved = to_device(value, 1)
    assert vars(moved).keys() == {"part"}
    assert device_of(moved) is Device(1)


def test_what_a_type_says_of_itself_is_asked_only_where_it_has_to_move() -> None:
    class Counted(ByReduce):
        asked = 0

        def __reduce__(self) -> Any:
            type(self).asked += 1
            return super().__reduce__()

    on_host, here, there = Counted("host"), Counted(array(1)), Counted(array(0))
    moved = to_device([on_host, here, there], 1)
    assert (moved[0], moved[1]) == (on_host, here)
    assert moved[2].parts[0].device is Device(1)
    assert Counted.asked == 1
