"""Containers: what moves, what stays itself, and what is in them more than once."""

from __future__ import annotations

import numpy as np
import pytest

from dask_devctx import Device
from dask_devctx.transfer import device_of, nbytes_by_device, to_device
from tests.transfer.hostile import object_array
from tests.transfer.shapes import array

pytestmark = pytest.mark.usefixtures("machine")


class Tensor:
    """Hashable by its identity, as torch's is."""

    nbytes = 32

    def __init__(self, device):
        self.device = device


device_of.register(Tensor, lambda tensor: tensor.device)
to_device.register(Tensor, lambda tensor, device: Tensor(device))


@pytest.mark.parametrize(
    "value",
    [{Tensor(0), 1}, frozenset([Tensor(0)]), {Tensor(0): "as a key", "other": 2}, [[Tensor(0)]]],
)
def test_members_and_keys_move(value):
    moved = to_device(value, 2)
    assert type(moved) is type(value)
    assert nbytes_by_device(moved) == {Device(2): 32}
    assert nbytes_by_device(value) == {Device(0): 32}
    assert to_device(moved, 2) is moved


def test_what_does_not_move_is_the_same_object():
    big, inner = np.ones(10), {"host": [1, 2]}
    value = [array(0), big, inner, array(1)]
    moved = to_device(value, 1)
    assert [a is b for a, b in zip(moved, value, strict=True)] == [False, True, True, True]
    for host in (value[1:3], "text", None, 3, big, Device(0), len, Tensor):
        assert to_device(host, 1) is host


def test_what_is_there_twice_is_copied_once(machine):
    x = array(0)
    moved = to_device({"a": x, "b": [x]}, 1)
    assert moved["a"] is moved["b"][0]
    assert machine.gpus[1].used_memory == x.nbytes
    many = [array(0) for _ in range(1000)]
    assert nbytes_by_device(dict(enumerate(many))) == {Device(0): 32_000}
    assert len({id(item) for item in to_device(many, 1)}) == 1000


def test_arrays_in_numpys_arrays_of_objects():
    x, row = array(0), np.arange(3)
    value = object_array([x, row, [array(2)], x])
    assert nbytes_by_device(value) == {Device(0): 32, Device(2): 32}
    moved = to_device({"a": value, "x": x}, 1)
    assert (type(moved["a"]), moved["a"].shape) == (np.ndarray, (4,))
    assert nbytes_by_device(moved) == {Device(1): 64}
    assert moved["a"][0] is moved["a"][3] is moved["x"]
    assert moved["a"][1] is row
    assert value[0] is x
    assert to_device(value, "cpu")[0].tolist() == x.get().tolist()
    alone = np.array(None, dtype=object)
    alone[()] = x
    assert nbytes_by_device(alone) == {Device(0): 32}
    assert device_of(to_device(alone, 1)[()]) == Device(1)


@pytest.mark.parametrize("order", ["C", "F"])
def test_the_layout_of_an_array_of_objects_is_kept(order):
    value = np.empty((2, 3), dtype=object, order=order)
    for index in np.ndindex(2, 3):
        value[index] = array(0) if index == (1, 2) else index
    moved = to_device(value, 3)
    assert moved.flags["C_CONTIGUOUS"] == value.flags["C_CONTIGUOUS"]
    assert nbytes_by_device(moved) == {Device(3): 32}
    assert [moved[index] for index in np.ndindex(1, 3)] == [(0, 0), (0, 1), (0, 2)]
    value[0, 0] = value  # it holds itself
    moved = to_device(value, 3)
    assert moved[0, 0] is moved


def test_other_arrays_of_numpy_are_known_by_their_type(caplog):
    many = [np.ones(2) for _ in range(15_000)]
    for value in (np.ones(3), np.empty((), dtype=object), many, np.array([None] * 30_000)):
        assert nbytes_by_device(value) == {}
        assert to_device(value, 1) is value
        assert nbytes_by_device.found_in(value) == ({}, True)
    assert caplog.records == []
    assert nbytes_by_device([*many, object_array([array(2)])]) == {Device(2): 32}
