"""Any value, of whatever types: moved as a whole, shared as before, and never written to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_devctx import Device, driver
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.errors import DevctxError, DeviceMemoryError
from dask_devctx.simulated_array import SimulatedArray
from dask_devctx.transfer import nbytes_by_device, to_device
from tests.transfer.hostile import CONTAINERS, UNMOVABLE, Thing, Unlooked
from tests.transfer.shapes import array, identities, shape_of

# A value's nodes: what each is, and which of the earlier ones it holds.
_LEAVES = st.sampled_from(["array", "int", "text", "unlooked"])
_INNER = st.tuples(
    st.sampled_from(sorted(CONTAINERS)), st.lists(st.integers(0, 30), min_size=1, max_size=4)
)
_PLANS = st.lists(st.one_of(_LEAVES, _INNER, _INNER), min_size=1, max_size=14)


def build(plan: list[Any], devices: list[int], *, rings: bool) -> Any:
    nodes: list[Any] = [array(devices[0], 2)]
    things = []
    for index, what in enumerate(plan):
        match what:
            case "array":
                made: Any = array(devices[index % len(devices)], index % 3 + 1)
            case "int":
                made = index
            case "text":
                made = "text"
            case "unlooked":
                made = Unlooked()
            case (kind, held):
                made = CONTAINERS[kind]([nodes[which % len(nodes)] for which in held])
                if type(made) in (list, Thing):
                    things.append(made)
        nodes.append(made)
    root = nodes[-1]
    if rings:
        for thing in things:
            if type(thing) is list:
                thing.append(root)
            else:
                thing.root = root
    return root


@settings(max_examples=300, deadline=None)
@given(
    _PLANS,
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.booleans(),
)
def test_it_arrives_as_it_was(
    plan: list[Any], homes: list[int], way: list[int], rings: bool
) -> None:
    with driver.use(SimulatedMachine(4).backend()):
        value = build(plan, homes, rings=rings)
        before, parts = shape_of(value, devices=True), identities(value)
        moved = value
        for device in way:
            moved = to_device(moved, device)
            assert set(nbytes_by_device(moved)) <= {Device(device)}
        assert shape_of(moved) == shape_of(value)
        assert shape_of(value, devices=True) == before
        assert identities(value) == parts
        assert to_device(moved, way[-1]) is moved
        if not nbytes_by_device(value):
            assert moved is value


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("kind", UNMOVABLE, ids=lambda kind: kind.__name__)
def test_one_that_cannot_be_made_again_says_so_and_stays(kind: type) -> None:
    value = [kind(array(0))]
    before, parts = shape_of(value, devices=True), identities(value)
    with pytest.raises(DevctxError, match=rf"a {kind.__name__} .*{UNMOVABLE[kind]}"):
        to_device(value, 1)
    assert shape_of(value, devices=True) == before
    assert identities(value) == parts
    assert to_device(value, 0) is value
    host = [kind("on the host"), array(0)]
    assert to_device(host, 1)[0] is host[0]


class MakesMore:
    """Needs memory of the device where it is made."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.more = SimulatedArray(100)

    def __reduce__(self) -> Any:
        return MakesMore, (self.part,)


def test_a_type_s_own_code_runs_on_the_device_and_may_find_it_full(
    machine: SimulatedMachine,
) -> None:
    with Device(0):
        value = MakesMore(array(0))
    assert to_device(value, 1).more.device is Device(1)
    machine.gpus[2].total_memory = 100
    with pytest.raises(DeviceMemoryError):
        to_device(value, 2)
