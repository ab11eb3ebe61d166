"""The device that is current where a worker packs and unpacks values, and the size of messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dask.utils import parse_bytes
from distributed import Worker
from distributed.comm import connect
from distributed.protocol import deserialize, register_generic, serialize
from distributed.utils_test import async_poll_for

from dask_devctx import Device, DevicePlugin, DriverUnavailableError, device_of, driver
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.simulated_array import SimulatedArray
from dask_devctx.worker.values.host_form import send_as_host_forms
from tests.conftest import no_gpus
from tests.distributed.devices import current_context, here, on_cluster, submit_on, with_plugin

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


def unpacked_on(seen: Seen) -> int | None:
    return seen.unpacked_on


async def coroutine() -> set[int | None]:
    found = {here()}
    for _ in range(3):
        await asyncio.sleep(0.001)
        found.add(here())
    return found


async def fails_later() -> None:
    await asyncio.sleep(0)
    raise RuntimeError("later")


@with_plugin(4, devices=[2])
async def test_coroutines_that_are_for_no_device_see_none(client: Any, worker: Worker) -> None:
    for device in (None, "none"):
        assert await submit_on(client, device, coroutine, pure=False) == {None}
    assert await client.submit(coroutine, pure=False) == {2}
    assert await client.run(coroutine) == {worker.address: {2}}
    with pytest.raises(RuntimeError, match="later"):
        await submit_on(client, None, fails_later)
    cancelled = submit_on(client, None, asyncio.sleep, 60)
    await async_poll_for(lambda: worker.state.executing_count == 1, timeout=10)
    await cancelled.cancel()
    assert await submit_on(client, None, unpacked_on, Seen(), pure=False) == 2
    await client.unregister_worker_plugin("devctx")
    assert current_context() == 0
    assert await client.run(here) == {worker.address: None}


@pytest.mark.parametrize("nbytes", [0, 20_000_000], ids=["event loop", "offload"])
@with_plugin(4, devices=[2])
async def test_values_are_unpacked_on_the_workers_device(
    client: Any, worker: Worker, nbytes: int
) -> None:
    [seen] = await client.scatter([Seen(bytes(nbytes))])
    assert worker.data[seen.key].unpacked_on == 2
    assert await submit_on(client, "none", unpacked_on, seen) == 2
    assert await submit_on(client, "none", unpacked_on, Seen(), pure=False) == 2  # in the task
    await client.scatter({"x": SimulatedArray.asarray(np.ones(3))}, hash=False)
    assert device_of(worker.data["x"]) is Device(2)
    packed.clear()
    assert (await client.gather(seen)).padding == bytes(nbytes)
    assert 2 in packed
    await client.unregister_worker_plugin("devctx")


@with_plugin(4)
async def test_a_connection_that_broke_keeps_no_value(
    client: Any, worker: Worker, machine: SimulatedMachine
) -> None:
    x = submit_on(client, 0, SimulatedArray, 1000, "u1")
    await x
    comm = await connect(worker.address)
    await comm.write({"op": "get_data", "keys": [x.key], "who": None, "reply": True})
    await comm.read()
    comm.abort()

    async def is_logged() -> bool:
        logs = await client.get_worker_logs()
        return any("failed during get data" in line for _, line in logs[worker.address])

    while not await is_logged():
        await asyncio.sleep(0.01)
    assert machine.gpus[0].used_memory == 1000
    x.release()
    await async_poll_for(lambda: not worker.state.tasks, timeout=10)
    await async_poll_for(lambda: machine.gpus[0].used_memory == 0, timeout=10)


@pytest.mark.parametrize(("configured", "ipc"), [("20MB", True), ("2GB", True), ("50MB", False)])
def test_other_workers_ask_for_as_much_as_dask_is_configured_to(configured: str, ipc: bool) -> None:
    name = "distributed.worker.transfer.message-bytes-limit"

    async def body(client: Any, scheduler: Any, worker: Any) -> None:
        await client.register_plugin(DevicePlugin(ipc=ipc))
        assert worker.state.transfer_message_bytes_limit == parse_bytes(configured)

    one_worker = on_cluster(1, config={name: configured})
    one_worker(body)()


class Box:
    """Holds an array twice, as a module of torch may."""

    def __init__(self, array: Any) -> None:
        self.arrays = [array, array]


def unbox(box: Box) -> tuple[list[float], bool, Device | None]:
    one, other = box.arrays
    return one.tolist(), one is other, device_of(one)


def test_what_a_client_scatters_goes_as_a_host_form(machine: SimulatedMachine) -> None:
    register_generic(Box)  # as dask does for a module of torch
    send_as_host_forms(Box)
    with Device(2):
        on_device = Box(SimulatedArray.asarray(np.arange(3.0)))
    for box, device in ((on_device, Device(0)), (Box(np.arange(3.0)), None)):
        header, frames = serialize(box)
        assert header["serializer"] == "dask"
        arrived = deserialize(header, [bytes(frame) for frame in frames])
        assert unbox(arrived)[::2] == ([0.0, 1.0, 2.0], device)
    assert unbox(deserialize(*serialize(on_device)))[1], "parts are one, as they were"
    large = np.arange(9 * 2**20 + 3, dtype="u4")
    with Device(1):
        header, frames = serialize(Box(SimulatedArray.asarray(large)))
        arrived = deserialize(header, frames).arrays[0]
    assert device_of(arrived) is Device(1)
    assert np.array_equal(arrived.get(), large)
    with driver.use(no_gpus()), pytest.raises(DriverUnavailableError) as caught:
        deserialize(header, frames)
    assert "client.gather(client.map(to_device, futures, " in caught.value.__notes__[0]
