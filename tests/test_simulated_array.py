"""The array on a simulated device: as strict as CuPy's, and enough for dask.array."""

from __future__ import annotations

import copy
import gc
import pickle
from contextlib import closing

import dask
import dask.array as da
import numpy as np
import pytest
from distributed.protocol import deserialize, serialize

from dask_devctx import Context, Device, driver, to_device
from dask_devctx.driver.backends import Backend
from dask_devctx.errors import DevctxError, DeviceMemoryError, DriverError, DriverUnavailableError
from dask_devctx.simulated_array import SimulatedArray
from tests.device_memory import read

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture
def host():
    return np.random.default_rng(0).random((60, 60))


def on(device, values):
    with Device(device):
        return SimulatedArray.asarray(values)


def test_refuses_another_device_naming_both_and_the_remedy():
    x = on(1, [[1.0, 2.0]])
    with Device(3), pytest.raises(DevctxError, match=r"cuda:1 .* cuda:3.*to_device") as error:
        x + 1
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, y: x + y,
        lambda x, y: np.add(x, 1, out=x),
        lambda x, y: np.concatenate([y, x]),
        lambda x, y: np.einsum("ij,ij->", x, x),
        lambda x, y: x.sum(),
        lambda x, y: x[0],
        lambda x, y: x.__setitem__(0, 1.0),
        lambda x, y: float(x[:1, :1].sum()),
        lambda x, y: x @ x.T,
    ],
)
def test_every_way_to_compute_is_checked(use):
    x, y = on(1, np.ones((2, 2))), on(0, np.ones((2, 2)))
    with pytest.raises(DevctxError, match="cannot be used on"):
        use(x, y)
    assert (x.get() == 1).all()


@pytest.mark.parametrize("number", [float, int, complex, bool, hex, lambda x: x.item()])
def test_a_number_is_a_copy_to_the_host_from_any_device(number):
    """As with CuPy: this is no computation, and a client reads a result in this way."""
    x = on(1, np.array(3))
    assert number(x) == number(np.array(3))
    with Device(2):
        assert number(x) == number(np.array(3))
    assert x.tolist() == 3


def test_becomes_no_numpy_array_unasked(host):
    x = on(0, host)
    with pytest.raises(TypeError, match=r"\.get\(\)"):
        np.asarray(x)
    for mix in (lambda: x + host, lambda: host + x, lambda: np.concatenate([host, x])):
        with pytest.raises(TypeError, match="asarray"):
            mix()
    got = x.get()
    got[0] = 7
    assert (x.get() == host).all()


def test_views_see_writes_and_copies_do_not(host):
    x = on(0, host)
    view, twin = x[3:5], x.copy()
    x[3] = 5.0
    assert (view.get()[0] == 5).all()
    assert (twin.get() == host).all()
    x += 1
    assert (x.get()[3] == 6).all()
    view.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_takes_the_devices_memory_and_gives_it_back(machine):
    gpu = machine.gpus[1]
    x = on(1, np.zeros(1000))
    assert gpu.used_memory == 8000
    with Device(1):
        view, total = x[10:], x + x
        assert gpu.used_memory == 16000
    del x, total
    gc.collect()
    assert gpu.used_memory == 8000  # the view keeps all of it
    del view
    gc.collect()
    assert gpu.used_memory == 0


def test_runs_out_of_memory(machine):
    machine.gpus[0].total_memory = 1000
    kept = SimulatedArray(100)
    with pytest.raises(DeviceMemoryError, match="CUDA_ERROR_OUT_OF_MEMORY") as error:
        SimulatedArray(100)
    assert isinstance(error.value, MemoryError)
    assert machine.gpus[0].used_memory == kept.nbytes


@pytest.mark.parametrize("order", ["C", "F"])
def test_order_of_what_comes_from_the_host(host, order):
    x = SimulatedArray.asarray(host, order=order)
    assert (x.flags.c_contiguous, x.flags.f_contiguous) == (order == "C", order == "F")
    assert (x.get() == host).all()
    assert SimulatedArray.asarray(x) is SimulatedArray.asarray(x, order=order) is x
    assert SimulatedArray.asarray(x, "f4", "F").flags.f_contiguous


def test_an_array_goes_with_the_context_that_it_was_made_in(machine, host):
    own = Context(0)
    with own:
        x = SimulatedArray.asarray(host)
        y = x + 1  # so are results
        assert (y.get() == host + 1).all()
    assert (x.get() == host).all()  # the driver copies from any context
    assert machine.gpus[0].used_memory == 2 * host.nbytes
    own.close()
    assert machine.gpus[0].used_memory == 0
    with Device(0):
        for use in (
            lambda: x.get(),
            lambda: y.copy_to(Device(1)),
            lambda: pickle.dumps(x),
            lambda: to_device(x, 1),
        ):
            with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
                use()
        assert ((SimulatedArray.asarray(host) * 2).get() == host * 2).all()  # nothing is broken


def test_computing_in_another_context_is_an_illegal_address(host):
    with closing(Context(0)) as own:
        with own:
            x = SimulatedArray.asarray(host)
        with Device(0), pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            x + 1
        with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            Device(0).sync()  # as a kernel that did this, it leaves nothing that works


# -- the driver's copies


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x: x + 1, id="result"),
        pytest.param(lambda x: x.T.copy(), id="transposed copy"),
        pytest.param(lambda x: SimulatedArray.asarray(x, order="F"), id="order"),
        pytest.param(lambda x: np.concatenate([x, x]), id="concatenated"),
        pytest.param(lambda x: x.sum(), id="number"),
        pytest.param(lambda x: x.copy_to(Device(0)), id="copy of another device"),
    ],
)
def test_whatever_made_it_the_driver_knows_its_bytes(host, make):
    x = make(SimulatedArray.asarray(host))
    calls = Device(0)._backend.calls
    with Device(0):
        raw = read(calls.work, x._pointer, x.nbytes)
    assert raw == x.get().tobytes(order="A")


@pytest.mark.parametrize("by_distributed", [True, False])
def test_arrives_on_the_device_that_is_current_without_a_copy_of_its_host_bytes(
    host, by_distributed
):
    if by_distributed:
        header, frames = serialize(on(1, host))
        assert header["serializer"] == "pickle"
        assert sum(memoryview(frame).nbytes for frame in frames) < 1.1 * host.nbytes
        arrive = lambda: deserialize(header, frames)  # noqa: E731
    else:
        sent = pickle.dumps(on(1, host), protocol=5)
        arrive = lambda: pickle.loads(sent)  # noqa: E731
    assert arrive().device is Device(0)
    with Device(2):
        arrived = arrive()
    assert arrived.device is copy.deepcopy(arrived).device is Device(2)
    assert (arrived.get() == host).all()


def test_dask_counts_its_bytes_and_tells_it_apart(host):
    x = on(1, host)
    assert dask.sizeof.sizeof(x) >= x.nbytes
    with dask.config.set({"tokenize.ensure-deterministic": True}):
        assert dask.base.tokenize(x) == dask.base.tokenize(on(1, host))
        assert dask.base.tokenize(x) != dask.base.tokenize(on(1, host + 1))


def test_is_for_simulated_devices_only(machine):
    real = Backend(machine.driver, machine.nvml)  # as far as anybody can tell
    with driver.use(real), pytest.raises(DriverUnavailableError, match="simulated devices"):
        SimulatedArray(3)


@pytest.mark.parametrize(
    "compute",
    [
        pytest.param(lambda x: (x + x.T).sum(), id="sum of x + x.T"),
        pytest.param(lambda x: x.dot(x), id="dot"),
        pytest.param(lambda x: x.mean(axis=0), id="mean"),
        pytest.param(lambda x: x.std(), id="std"),
        pytest.param(lambda x: x[3:50:2, ::-1], id="slice"),
        pytest.param(lambda x: x[[5, 1, 40]], id="take"),
        pytest.param(lambda x: x.astype("f4") * 2, id="astype"),
        pytest.param(lambda x: x.reshape(3600), id="reshape"),
        pytest.param(lambda x: x.cumsum(axis=1), id="cumsum"),
    ],
)
def test_dask_array_computes_on_chunks_of_it(host, compute):
    x = da.from_array(SimulatedArray.asarray(host), chunks=25, asarray=False)
    got = compute(x).compute(scheduler="sync")
    assert isinstance(got, SimulatedArray)
    np.testing.assert_allclose(got.get(), compute(host), rtol=1e-6)


def test_a_scalar_shows_its_value():
    x = on(1, np.array(20.5))
    assert repr(x) == "<SimulatedArray 20.5 float64[] on cuda:1>"
    assert (f"{x:.3f}", f"{x}") == ("20.500", repr(x))
    assert repr(on(1, np.zeros(3))) == "<SimulatedArray float64[3] on cuda:1>"
