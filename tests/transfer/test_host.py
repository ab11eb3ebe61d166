"""``to_device(value, "cpu")``: what is on a device, in host memory."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dask_devctx import Device
from dask_devctx.simulated_array import SimulatedArray
from dask_devctx.transfer import device_of, release_held, stamp, to_device, to_host

VALUES = np.asfortranarray(np.arange(6.0).reshape(2, 3))


@pytest.fixture
def x(machine):
    with Device(1):
        yield SimulatedArray.asarray(VALUES)


def test_an_array(x):
    for host in ("cpu", SimpleNamespace(type="cpu", index=None)):  # the second as torch's is
        copied = to_device(x, host)
        assert type(copied) is np.ndarray
        assert (copied == VALUES).all()
        assert copied.flags.f_contiguous
        assert device_of(copied) is None
    assert Device.current() is Device(1)


def test_there_and_back(x):
    back = to_device(to_device(x, "cpu"), 1)
    assert device_of(back) is None  # no library is guessed: a host array stays one
    with Device(2):
        assert device_of(SimulatedArray.asarray(back)) is Device(2)


def test_what_is_in_containers(x):
    with Device(2):
        y = SimulatedArray((2,))
    word = ["host"]
    value = {"x": x, "again": [x, y], "word": word}
    with Device(1):
        Device.unset_current()
        copied = to_device(value, "cpu")
        assert Device.current() is None
    assert to_device(copied, "cpu") is copied
    assert type(copied["x"]) is type(copied["again"][1]) is np.ndarray
    assert copied["again"][0] is copied["x"]  # referenced twice, copied once
    assert copied["word"] is word
    assert value["x"] is x


def test_no_other_device_is_used_and_nothing_is_held(x, machine):
    machine.faults.calls.clear()
    to_device(x, "cpu", after=stamp(x))
    assert machine.faults.calls["cuCtxEnablePeerAccess"] == 0
    assert release_held() == 0


class Grid:
    def __init__(self, cells):
        self.cells = cells


@device_of.register(Grid)
def _(grid):
    return device_of(grid.cells)


@to_host.register(Grid)
def _(grid):
    return Grid(to_device(grid.cells, "cpu"))


def test_a_type_of_somebodys(x):
    grid = Grid(x)
    copied = to_device([grid, x], "cpu")
    assert type(copied[0].cells) is np.ndarray
    assert copied[0].cells is copied[1]  # one call's copies are made once


def test_a_type_that_nobody_registered(x):
    class Other:
        def __init__(self, device):
            self.device = device
            self.nbytes = 8

    device_of.register(Other, lambda other: other.device)
    with pytest.raises(TypeError) as caught:
        to_device([Other(Device(2))], "cpu")
    said = str(caught.value)
    assert "lives on cuda:2, and nothing is known that copies one to the host" in said
    remedies = "import to_host; to_host.register(", ".get()", ".cpu()", "jax.device_get"
    assert [remedy for remedy in remedies if remedy not in said] == []


@pytest.mark.parametrize("word", ["host", "CPU", "cpu:0"])
def test_other_words_for_the_host_name_the_right_one(x, word):
    with pytest.raises(LookupError) as caught:
        to_device(x, word)
    said = str(caught.value)
    assert 'The host is no device. to_device(value, "cpu") copies a value to it' in said
    assert "dask.annotate(device=None)" in said
