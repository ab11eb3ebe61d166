"""What is on devices is not counted as host memory, and what comes back from disk is new there."""

from __future__ import annotations

import asyncio
import pickle
from functools import partial
from typing import Any

import distributed.system
import numpy as np
import pytest
from cuda.bindings.driver import CUresult
from dask.sizeof import sizeof
from distributed import Client, Worker, wait
from distributed.utils_test import async_poll_for

from dask_devctx import Device, DevicePlugin, SimulatedArray
from dask_devctx.driver.simulated import SimulatedMachine
from tests.distributed.devices import make, on_cluster, started, submit_on, workers_of

MIB = 2**20


def spilling_worker(plugins: list[DevicePlugin]) -> Any:
    """One worker on this thread's loop, which spills what goes beyond 4 MiB."""
    return on_cluster(
        4,
        worker_kwargs={"plugins": plugins, "memory_limit": 8 * MIB},
        config={
            "distributed.worker.memory.target": 0.5,
            "distributed.worker.memory.spill": False,
            "distributed.worker.memory.pause": False,
            "distributed.worker.memory.terminate": False,
        },
    )


on_a_device = partial(make, n=MIB // 8)


def total(array: SimulatedArray) -> float:
    return float(array.sum())


@spilling_worker([DevicePlugin()])
async def test_what_is_on_devices_is_not_spilled(client: Client, worker: Worker) -> None:
    futures = client.map(on_a_device, range(8), pure=False)
    assert await client.gather(client.map(total, futures)) == [n * MIB / 8 for n in range(8)]
    assert sum(sizeof(worker.data[future.key]) for future in futures) > 8 * MIB
    assert len(worker.data.disk) == 0


@pytest.mark.parametrize("limit", ["auto", None])
def test_what_is_written_to_disk_waits_for_the_work_that_makes_it(
    limit: str | None, machine: SimulatedMachine
) -> None:
    """As if the task had given it to a stream of its own, and that was still at work."""
    waits: list[int] = []

    def note(stream: Any, event: Any, flags: int) -> bool:
        waits.append(Device.current().device_id)  # type: ignore[union-attr]
        return False

    @spilling_worker([DevicePlugin(device_memory_limit=limit)])
    async def body(client: Client, worker: Worker) -> None:
        machine.faults.inject("cuStreamWaitEvent", None, when=note)
        machine.faults.inject("cuEventQuery", CUresult.CUDA_ERROR_NOT_READY, times=10**6)
        x = submit_on(client, 1, lambda: [on_a_device(1), np.full(MIB, 1.0)], pure=False)
        await wait([x])
        assert x.key in worker.data.disk
        assert set(waits) == {1}
        machine.faults.clear()
        assert await submit_on(client, 2, lambda both: total(both[0]), x, pure=False) == MIB / 8

    body()


@spilling_worker([DevicePlugin()])
async def test_a_value_on_disk_keeps_no_host_memory(client: Client, worker: Worker) -> None:
    x = submit_on(client, 0, on_a_device, 1, pure=False)
    await submit_on(client, 1, total, x, pure=False)  # which leaves a copy there
    spill, (value,) = worker.data.spill, worker.data.values_of([x.key])
    await asyncio.to_thread(spill.clear, Device(0))
    assert value.is_away
    assert total(pickle.loads(pickle.dumps(value.form))) == MIB / 8, "it is sent as the array"
    del value
    assert spill.pool.taken >= MIB
    worker.data.fast.evict(x.key)  # as where host memory is nearly full
    assert x.key in worker.data.disk
    await async_poll_for(lambda: not spill.pool.taken, timeout=10)
    assert await submit_on(client, 1, total, x, pure=False) == MIB / 8
    await worker.plugin_remove("devctx")
    await async_poll_for(lambda: not spill.pool.nbytes, timeout=10)


def limits(client: Client) -> tuple[list[int], list[int]]:
    there = client.run(lambda dask_worker: dask_worker.memory_manager.memory_limit)
    known = workers_of(client).values()
    return sorted(there.values()), sorted(worker["memory_limit"] for worker in known)


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({"n_workers": 2}, 2),
        ({"n_workers": 1, "devices_per_worker": 1}, 4),  # it may be scaled up
        ({"n_workers": 2, "memory_limit": "auto"}, 2),
    ],
)
def test_workers_of_a_cluster_have_the_hosts_memory_together(
    arguments: dict[str, Any], count: int
) -> None:
    fair = distributed.system.MEMORY_LIMIT // count
    with started(**arguments) as client:
        cluster: Any = client.cluster
        there, known = limits(client)
        assert there == known == [fair] * arguments["n_workers"]
        cluster.scale(count)
        client.wait_for_workers(count, timeout=20)
        assert limits(client)[0] == [fair] * count
