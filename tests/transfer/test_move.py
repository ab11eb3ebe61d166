"""Where a value is, and taking it elsewhere: the calls that order it, and what users register."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from dask_devctx import Device, driver
from dask_devctx.driver.relaxed import LEGACY_STREAM, PER_THREAD_STREAM
from dask_devctx.errors import DeviceMemoryError, DriverError
from dask_devctx.simulated_array import SimulatedArray
from dask_devctx.transfer import (
    device_of,
    nbytes_by_device,
    release_held,
    stamp,
    to_device,
    to_host,
)
from dask_devctx.transfer.location import memories
from dask_devctx.transfer.traffic import connect, copy_bytes
from tests.conftest import no_gpus
from tests.python import python

NOT_READY = cuda.CUresult.CUDA_ERROR_NOT_READY


def reset(machine, ordinal):
    """End a device's primary context, as another library may, and make a new one."""
    machine.driver.cuDevicePrimaryCtxRelease(ordinal)
    machine.driver.cuDevicePrimaryCtxRetain(ordinal)


def test_whether_it_is_done_is_asked_until_it_is(machine, x):
    made = stamp(x)
    machine.faults.inject("cuEventQuery", NOT_READY, times=2)
    assert [made.done() for _ in range(4)] == [False, False, True, True]
    assert machine.faults.calls["cuEventQuery"] == 3
    assert made.devices == (Device(0),)
    assert stamp(1, "a", [2]) is None
    stamp(x)
    assert machine.faults.calls["cuEventCreate"] == 1, "the event of what is done is free"


def test_a_broken_device_is_noticed_where_it_is_waited_for(machine, x):
    made = stamp(x)
    machine.faults.poison(cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        to_device(x, 0, after=made)


def test_the_driver_is_asked_once_for_many_values_and_moves(machine, x):
    with Device(0):
        others = [SimulatedArray(3) for _ in range(4)] + [SimulatedArray((0, 3))]
    calls = machine.faults.calls
    for n in range(1, 4):
        moved = to_device([x, *others], 1)
        release_held()
        assert calls["cuEventRecord"] == 2 * n  # of the source's work, and of the copies
    assert [one.shape for one in moved] == [(2, 3), (3,), (3,), (3,), (3,), (0, 3)]
    assert {one.device for one in moved} == {Device(1)}
    assert calls["cuEventCreate"] == 2
    assert calls["cuCtxEnablePeerAccess"] == 2
    assert connect(Device(0), Device(1))
    reset(machine, 1)
    to_device(x, 1)
    assert calls["cuCtxEnablePeerAccess"] == 4, "the context is new"


def test_a_failed_copy_is_the_callers_error_and_leaves_nothing(machine, x):
    machine.gpus[1].total_memory = 8
    with pytest.raises(DeviceMemoryError):
        to_device([x, x], 1)
    assert Device.current() is None
    machine.gpus[1].total_memory = 2**30
    assert device_of(to_device([x, x], 1)) is Device(1)


def test_the_end_of_an_event_calls_nothing(machine, x):
    """The garbage collector may end it on any thread, which would wait with the driver."""
    made = [stamp(x) for _ in range(2000)]
    before = machine.faults.calls.copy()
    made.clear()
    assert machine.faults.calls == before
    again = [stamp(x) for _ in range(2000)]
    assert machine.faults.calls["cuEventCreate"] == before["cuEventCreate"] == len(again)


def test_events_end_with_their_context(machine):
    for made in range(1, 20):
        with Device(0):
            for _ in range(2):
                assert stamp(SimulatedArray.asarray(np.ones(3))).done()
        assert machine.faults.calls["cuEventCreate"] == made
        reset(machine, 0)


def test_without_peer_access_it_still_moves(machine, x):
    machine.gpus[2].peers = frozenset()
    assert device_of(to_device(x, 2)) is Device(2)
    assert not connect(Device(2), Device(0))
    status = cuda.CUresult.CUDA_ERROR_TOO_MANY_PEERS
    machine.faults.inject("cuCtxEnablePeerAccess", status)
    assert device_of(to_device(x, 3)) is Device(3)
    assert not connect(Device(3), Device(0))


@pytest.mark.parametrize("stream", [LEGACY_STREAM, PER_THREAD_STREAM])
def test_the_bytes_of_a_librarys_array_go_to_another_device(x, stream):
    with Device(1) as there:
        y = SimulatedArray((2, 3))
        copy_bytes(y._pointer, there, x._pointer, x.device, x.nbytes, stream)
        assert y.get().ravel().tolist() == [0, 3, 1, 4, 2, 5]


def test_peer_access_is_tried_again_where_memory_was_short(machine, x):
    status = cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    machine.faults.inject("cuCtxEnablePeerAccess", status)
    assert device_of(to_device(x, 3)) is Device(3)
    assert device_of(to_device(x, 3)) is Device(3)
    assert connect(Device(3), Device(0))
    assert machine.faults.calls["cuCtxEnablePeerAccess"] == 3


class Grid:
    def __init__(self, cells, **attributes):
        self.cells = cells
        vars(self).update(attributes)


class Named:
    """Lives on a device, by its name only."""


def test_a_type_that_nothing_moves_stays(x):
    class Handle(Grid):
        pass

    device_of.register(Handle, lambda handle: device_of(handle.cells))
    handle = Handle(x)
    assert to_device(handle, 1) is handle
    assert device_of(handle) is Device(0)


def test_a_base_class_may_be_registered_after_a_value_was_seen(machine):
    class Base:
        nbytes = 8

    value = type("Derived", (Base,), {})()
    assert nbytes_by_device([value]) == nbytes_by_device(value) == {}
    device_of.register(Base, lambda value: 2)
    assert device_of(value) is Device(2)
    assert nbytes_by_device([value]) == nbytes_by_device(value) == {Device(2): 8}


def test_the_bytes_of_a_users_type_are_its_own_or_those_of_its_parts(x):
    device_of.register(Grid, lambda grid: device_of(grid.cells))
    assert nbytes_by_device(Grid(x)) == {Device(0): x.nbytes}
    assert nbytes_by_device(Grid([x, Grid(to_device(x, 0, copy=True))])) == {
        Device(0): 2 * x.nbytes
    }
    assert nbytes_by_device([Grid(x), to_device(x, 1)]) == {
        Device(0): x.nbytes,
        Device(1): x.nbytes,
    }
    assert nbytes_by_device(Grid(x, nbytes=7)) == {Device(0): 7}
    assert nbytes_by_device(Grid("on the host")) == {}
    device_of.register(Named, lambda value: "cuda:2")
    assert nbytes_by_device([Named()]) == {Device(2): 0}


# -- to host memory


def test_to_host_memory_and_back(x):
    for host in ("cpu", SimpleNamespace(type="cpu", index=None)):  # the second as torch's is
        copied = to_device(x, host)
        assert type(copied) is np.ndarray
        assert copied.tolist() == x.get().tolist()
        assert copied.flags.f_contiguous
        assert device_of(copied) is None
    assert device_of(to_device(copied, 1)) is None  # no library is guessed: it stays on the host


def test_containers_in_host_memory(x):
    word, y = ["host"], to_device(x, 2)
    value = {"x": x, "again": [x, y], "word": word}
    copied = to_device(value, "cpu")
    with driver.use(no_gpus()):  # as for a client without a GPU
        assert to_device(copied, "cpu") is copied
    assert type(copied["x"]) is type(copied["again"][1]) is np.ndarray
    assert copied["again"][0] is copied["x"]  # referenced twice, copied once
    assert copied["word"] is word
    assert value["x"] is x


class OnHost(Grid):
    """A type that says how it is copied to the host."""


def test_users_types_in_host_memory(x):
    device_of.register(OnHost, lambda grid: device_of(grid.cells))
    to_host.register(OnHost, lambda grid: OnHost(to_device(grid.cells, "cpu")))
    copied = to_device([OnHost(x), x], "cpu")
    assert type(copied[0].cells) is np.ndarray
    assert copied[0].cells is copied[1]  # one call's copies are made once
    to_device.register(OnHost, lambda grid, device: OnHost(to_device(grid.cells, device)))
    moved = to_device([OnHost(x), x], 1)
    assert moved[0].cells is moved[1]
    device_of.register(Named, lambda value: "cuda:2")
    with pytest.raises(TypeError) as caught:
        to_device([Named()], "cpu")
    said = str(caught.value)
    assert "lives on cuda:2, and nothing is known that copies one to the host" in said
    remedies = "import to_host; to_host.register(", ".get()", ".cpu()", "jax.device_get"
    assert [remedy for remedy in remedies if remedy not in said] == []


# -- the allocations under a value


def sizes(value):
    found = memories(value)
    assert all(one.base for one in found)
    return sorted((one.device.device_id, one.nbytes) for one in found)


def test_allocations(x):
    views = [x, x[:1], x.T, x[::-1, 1], {"deep": (x[1:],)}]
    for view in views:
        assert memories(view) == memories(x)
    assert sizes(views) == [(0, 48)]
    with Device(0):
        assert sizes([x, x.copy(), x + 1, to_device(x, 1)]) == [(0, 48)] * 3 + [(1, 48)]
    for host in (1, "text", None, [], np.zeros(9), [{"a": np.zeros(3)}]):
        assert memories(host) == set()


def test_allocations_that_are_not_known(x):
    device_of.register(Grid, lambda grid: device_of(grid.cells))
    assert memories(Grid(x)) is None
    assert memories([x, Grid(x)]) is None
    rows = [(n, str(n)) for n in range(1000)]
    value = {"x": x, "rows": [rows, [x[n % 2 :] for n in range(500)]]}
    assert memories(value, 5000) == memories(x)
    assert memories(value, 1000) is None  # the search has a bound
    assert memories(x, 1) == memories(x)


def test_plain_values_touch_neither_the_driver_nor_a_library():
    script = (
        "import sys\n"
        "from dask_devctx.transfer import device_of, to_device, nbytes_by_device\n"
        "assert device_of([1, {'a': (2.0, 'x')}, None]) is None\n"
        "assert nbytes_by_device(b'x') == {}\n"
        "print(*(m for m in ('numpy', 'cupy', 'torch', 'numba', 'jax', 'distributed')"
        " if m in sys.modules))\n"
    )
    done = python("-c", script)
    assert (done.stdout.strip(), done.stderr) == ("", "")
