"""dask's P2P rechunk of arrays on devices: through host memory, to the devices of its tasks."""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from cuda.bindings.driver import CUresult
from distributed.shuffle._rechunk import ArrayRechunkRun

from dask_devctx import Device, SimulatedArray
from dask_devctx.errors import DeviceMemoryError
from dask_devctx.worker.comms import marked
from tests.distributed.devices import with_plugin

N = 480


def numbers() -> Any:
    return np.random.default_rng(0).integers(0, 10**9, (N, N))


def on_devices(chunk: int, kind: type = SimulatedArray) -> da.Array:
    x = da.from_array(numbers(), chunks=chunk)
    return x.map_blocks(kind.asarray, dtype=x.dtype, meta=np.empty((0, 0), x.dtype))


def home(x: SimulatedArray) -> tuple[Any, int]:
    here = Device.current()
    assert here is not None
    assert x.device is here
    return x.get(), here.device_id


@pytest.mark.parametrize("chunk", [160, 40], ids=["large", "small"])  # dask sends them differently
@pytest.mark.parametrize("disk", [True, False])
@with_plugin(8, 8)
async def test_arrays_are_on_devices_again(client: Any, chunk: int, disk: bool) -> None:
    how = {"array.rechunk.method": "p2p", "distributed.p2p.storage.disk": disk}
    with dask.config.set(how):
        columns = on_devices(chunk).rechunk((N, chunk // 2))
    expected, begin, used = numbers(), 0, set()
    for future in client.compute(columns.to_delayed().ravel().tolist()):
        block, device = await client.submit(home, future)
        assert (block == expected[:, begin : begin + chunk // 2]).all()
        begin += chunk // 2
        used.add(device)
    assert begin == N
    assert len(used) > 1


def on(x: SimulatedArray) -> Any:
    return np.full(x.shape, x.device.device_id)


@with_plugin(8)
async def test_on_the_device_of_the_task_or_on_the_host_where_it_has_none(client: Any) -> None:
    x = on_devices(160)
    with dask.annotate(device=3):
        rows = x.rechunk((40, N), method="p2p").map_blocks(on, dtype=int)
        assert (await client.compute(rows) == 3).all()
    with dask.annotate(device="none"):
        found = await client.compute(x.rechunk((40, N), method="p2p"))
    assert type(found) is np.ndarray
    assert (found == numbers()).all()
    assert "add_partition" in vars(ArrayRechunkRun)
    await client.unregister_worker_plugin("devctx")
    assert "add_partition" not in vars(ArrayRechunkRun), "dask's own is back"


class Other(SimulatedArray):
    """An array on a device, of a type that nobody knows to make of host memory."""

    __slots__ = ()


@with_plugin(8)
async def test_other_arrays_are_refused_with_the_remedy(client: Any) -> None:
    future = client.compute(on_devices(N, Other).rechunk((40, N), method="p2p"))
    error: BaseException | None = await future.exception()
    while error is not None and not isinstance(error, TypeError):
        error = error.__cause__
    assert "cannot take a Other on cuda:" in str(error)
    assert "x.rechunk(..., method='tasks')" in str(error)


@pytest.mark.parametrize("disk", [True, False])
@with_plugin(8)
async def test_memory_that_runs_out_for_the_result(client: Any, disk: bool) -> None:
    """The task is tried again; dask may have given its result away by then."""
    failed: list[int] = []

    def first_out_of_memory(array: Any) -> SimulatedArray:
        if not failed:
            failed.append(1)
            status = CUresult.CUDA_ERROR_OUT_OF_MEMORY
            raise DeviceMemoryError("cuMemAlloc", status.name, int(status))
        return SimulatedArray.asarray(array)

    x = on_devices(160)
    with (
        pytest.MonkeyPatch.context() as patch,
        dask.config.set({"distributed.p2p.storage.disk": disk}),
    ):
        patch.setattr(marked.FromSimulated, "on_device", first_out_of_memory)
        rows = x.rechunk((40, N), method="p2p").map_blocks(SimulatedArray.get, dtype=x.dtype)
        assert (await client.compute(rows) == numbers()).all()
    assert failed
