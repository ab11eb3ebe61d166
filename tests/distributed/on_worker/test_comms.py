"""The device that is current where a worker packs and unpacks values, and the size of messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import import_module
from typing import Any

import dask
import numpy as np
import pytest
from cuda.bindings.driver import CUresult
from dask.utils import parse_bytes
from distributed import Worker
from distributed.utils_test import gen_cluster

from dask_devctx import Device, DevicePlugin, device_of
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.simulated_array import SimulatedArray
from tests.distributed.changes import changes_of
from tests.distributed.devices import current_context, here, with_plugin

serialize = import_module("distributed.protocol.serialize")  # the package has a function so named
packed: list[int | None] = []


class Seen:
    """Knows the device that was current where it was unpacked; notes those of packing."""

    unpacked_on: int | None = None

    def __init__(self, padding: bytes = b"") -> None:
        self.padding = padding

    def __reduce__(self) -> tuple[Callable[..., Seen], tuple[bytes]]:
        packed.append(here())
        return unpack, (self.padding,)


def unpack(padding: bytes) -> Seen:
    seen = Seen(padding)
    seen.unpacked_on = here()
    return seen


def fails_there() -> None:
    raise RuntimeError("it cannot be unpacked")


class Unreadable:
    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return fails_there, ()


def unpacked_on(seen: Seen) -> int | None:
    return seen.unpacked_on


async def coroutine() -> list[int | None]:
    found = [here()]
    for _ in range(3):
        await asyncio.sleep(0.001)
        found.append(here())
    return found


@with_plugin(4, devices=[2])
async def test_nothing_is_current_on_the_event_loop(
    client: Any, scheduler: Any, worker: Worker
) -> None:
    assert current_context() == 0
    with dask.annotate(device="none"):
        assert set(await client.submit(coroutine)) == {None}
    assert await client.run(coroutine) == {worker.address: [None] * 4}
    assert await client.run(here) == {worker.address: None}


@pytest.mark.parametrize("nbytes", [0, 20_000_000], ids=["event loop", "offload"])
@with_plugin(4, devices=[2])
async def test_values_are_unpacked_on_the_workers_device(
    client: Any, scheduler: Any, worker: Worker, nbytes: int
) -> None:
    [seen] = await client.scatter([Seen(bytes(nbytes))])
    assert worker.data[seen.key].unpacked_on == 2
    with dask.annotate(device="none"):
        assert await client.submit(unpacked_on, seen) == 2
        assert await client.submit(unpacked_on, Seen(), pure=False) == 2  # in the task itself
    packed.clear()
    assert (await client.gather(seen)).padding == bytes(nbytes)
    assert 2 in packed
    assert current_context() == 0


@with_plugin(4, devices=[2])
async def test_arrays_arrive_on_the_workers_device(
    client: Any, scheduler: Any, worker: Worker
) -> None:
    await client.scatter({"x": SimulatedArray.asarray(np.ones(3))}, hash=False)
    assert device_of(worker.data["x"]) is Device(2)


@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 4)],
    worker_kwargs={"memory_limit": "1 GB"},
    config={"distributed.worker.memory.pause": False},
    timeout=60,
)
async def test_values_from_disk_come_back_to_the_workers_device(
    client: Any, scheduler: Any, worker: Any
) -> None:
    await client.register_plugin(DevicePlugin(devices=[3]))
    seen = client.submit(Seen)
    await seen
    worker.data.evict()
    assert seen.key in worker.data.slow
    assert worker.data[seen.key].unpacked_on == 3


@with_plugin(4, devices=[2])
async def test_a_device_stays_current_where_one_is(
    client: Any, scheduler: Any, worker: Worker
) -> None:
    with Device(1):
        assert serialize.deserialize(*serialize.serialize(Seen())).unpacked_on == 1
        assert Device.current() is Device(1)
    assert serialize.deserialize(*serialize.serialize(Seen())).unpacked_on == 2
    assert (
        await asyncio.to_thread(
            lambda: serialize.deserialize(*serialize.serialize(Seen())).unpacked_on
        )
        is None
    )


@with_plugin(4, devices=[2])
async def test_a_value_that_cannot_be_unpacked_leaves_nothing_current(
    client: Any, scheduler: Any, worker: Worker
) -> None:
    header, frames = serialize.serialize(Unreadable())
    with pytest.raises(RuntimeError, match="cannot be unpacked"):
        serialize.deserialize(header, frames)
    assert current_context() == 0


@with_plugin(4, devices=[2])
async def test_values_arrive_although_the_device_cannot_be_made_current(
    client: Any, scheduler: Any, worker: Worker, machine: SimulatedMachine
) -> None:
    machine.faults.inject("cuCtxSetCurrent", CUresult.CUDA_ERROR_UNKNOWN, times=100)
    [seen] = await client.scatter([Seen()])
    assert worker.data[seen.key].unpacked_on is None
    machine.faults.clear()
    [seen] = await client.scatter([Seen(b"another")])
    assert worker.data[seen.key].unpacked_on == 2


@pytest.mark.parametrize("first", ["older", "newer"])
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, timeout=60)
async def test_workers_of_one_process_end_in_any_order(
    client: Any, scheduler: Any, a: Any, b: Any, first: str
) -> None:
    def unpacked() -> int | None:
        return serialize.deserialize(*serialize.serialize(Seen())).unpacked_on

    changes = changes_of(a)
    plugins = [DevicePlugin(devices=[2]), DevicePlugin(devices=[3])]
    for plugin, worker in zip(plugins, (a, b), strict=True):
        await plugin.setup(worker)
    assert unpacked() in (2, 3)
    [ends, stays] = plugins if first == "older" else plugins[::-1]
    await ends.teardown(a if first == "older" else b)
    assert unpacked() == stays.worker_devices[0].device_id
    await stays.teardown(b if first == "older" else a)
    assert unpacked() is None
    assert "functions" not in changes()


@pytest.mark.parametrize(("configured", "ipc"), [("20MB", True), ("2GB", True), ("50MB", False)])
def test_other_workers_ask_for_as_much_as_dask_is_configured_to(configured: str, ipc: bool) -> None:
    name = "distributed.worker.transfer.message-bytes-limit"

    async def body(client: Any, scheduler: Any, worker: Any) -> None:
        await client.register_plugin(DevicePlugin(ipc=ipc))
        assert worker.state.transfer_message_bytes_limit == parse_bytes(configured)

    one_worker = gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config={name: configured})
    one_worker(body)()
