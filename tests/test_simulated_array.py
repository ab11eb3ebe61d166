"""The array on a simulated device: as strict as CuPy's, and enough for dask.array."""

from __future__ import annotations

import copy
import gc
import pickle

import dask
import dask.array as da
import numpy as np
import pytest

from dask_devctx import Device, driver
from dask_devctx.driver.backends import Backend
from dask_devctx.errors import DeviceMemoryError, DeviceMismatchError, DriverUnavailableError
from dask_devctx.simulated_array import SimulatedArray

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture
def host():
    return np.random.default_rng(0).random((60, 60))


def on(device, values):
    with Device(device):
        return SimulatedArray.asarray(values)


def test_lives_where_it_is_made():
    assert on(2, [1, 2]).device is Device(2)
    assert SimulatedArray((3,)).device is Device(0)
    with Device(1):
        assert (SimulatedArray((3,)) + 1).device is Device(1)


def test_refuses_another_device_naming_both_and_the_remedy():
    x = on(1, [[1.0, 2.0]])
    with (
        Device(3),
        pytest.raises(DeviceMismatchError, match=r"cuda:1 .* cuda:3.*to_device") as error,
    ):
        x + 1
    assert (error.value.device, error.value.current) == ("cuda:1", "cuda:3")
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
        lambda x, y: bool(x),
        lambda x, y: x.item(0),
        lambda x, y: x @ x.T,
    ],
)
def test_every_way_to_compute_is_checked(use):
    x, y = on(1, np.ones((2, 2))), on(0, np.ones((2, 2)))
    with pytest.raises(DeviceMismatchError):
        use(x, y)
    assert (x.get() == 1).all()


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


def test_without_elements_it_is_nowhere(machine):
    empty = on(1, np.zeros((0, 3)))
    assert (empty + 1).shape == (0, 3)
    assert machine.gpus[1].used_memory == 0


def test_arrives_on_the_device_that_is_current(host):
    sent = pickle.dumps(on(1, host), protocol=5)
    with Device(2):
        arrived = pickle.loads(sent)
    assert arrived.device is Device(2)
    assert (arrived.get() == host).all()
    assert pickle.loads(sent).device is Device(0)
    assert copy.deepcopy(arrived).device is Device(2)


def test_distributed_sends_its_host_bytes_without_a_copy_of_them(host):
    from distributed.protocol import deserialize, serialize

    header, frames = serialize(on(1, host))
    assert header["serializer"] == "pickle"
    assert sum(memoryview(frame).nbytes for frame in frames) < 1.1 * host.nbytes
    with Device(3):
        arrived = deserialize(header, frames)
    assert arrived.device is Device(3)
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


@pytest.mark.parametrize(
    "compute",
    [
        pytest.param(lambda m, x: m.concatenate([x, x]), id="concatenate"),
        pytest.param(lambda m, x: m.stack([x, x]), id="stack"),
        pytest.param(lambda m, x: m.tensordot(x, x, axes=1), id="tensordot"),
        pytest.param(lambda m, x: m.einsum("ij,jk->ik", x, x), id="einsum"),
        pytest.param(lambda m, x: m.where(x > 0.5, x, 0), id="where"),
        pytest.param(lambda m, x: m.exp(x), id="exp"),
    ],
)
def test_functions_of_dask_array_on_chunks_of_it(host, compute):
    x = da.from_array(SimulatedArray.asarray(host), chunks=25, asarray=False)
    got = compute(da, x).compute(scheduler="sync")
    assert isinstance(got, SimulatedArray)
    np.testing.assert_allclose(got.get(), compute(np, host), rtol=1e-12)


def test_map_blocks_gets_arrays_on_the_device(host):
    x = da.from_array(SimulatedArray.asarray(host), chunks=25, asarray=False)
    seen = x.map_blocks(lambda block: block * block.device.device_id, dtype=float)
    assert (seen.compute(scheduler="sync").get() == 0).all()
