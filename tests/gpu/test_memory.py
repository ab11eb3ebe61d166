"""The host memory of values that leave a real device; ``test_values`` has the values themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest
from distributed import Client, Worker, wait

from dask_devctx import LocalDeviceCluster
from tests.gpu.own_process import answer_of

pytestmark = [pytest.mark.gpu(count=1), pytest.mark.timeout(320)]
MIB = 2**20


def cupy_array(n: int) -> Any:
    import cupy

    return cupy.random.default_rng(n).integers(0, 1000, (8 * MIB,), dtype=cupy.int64)


def taken(dask_worker: Worker) -> tuple[int, int]:
    """Return the page-locked bytes in use, and the bytes of the values that left."""
    plugin = dask_worker.plugins["devctx"]
    memory = plugin.extension.store.spill
    return memory.pool.taken, memory.count("spilled", plugin.worker_devices[0])


def host_memory() -> dict[str, Any]:
    with (
        LocalDeviceCluster(
            n_workers=1,
            devices=[0],
            device_memory_limit=256 * MIB,
            memory_limit=0,
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        futures = client.map(cupy_array, range(32), pure=False)  # 2 GiB
        wait(futures)
        ((locked, spilled),) = client.run(taken).values()
    return {"locked": locked, "spilled": spilled}


def test_host_memory_of_a_value_is_taken_once() -> None:
    pytest.importorskip("cupy")
    seen = answer_of("tests.gpu.test_memory")
    assert 0 < seen["spilled"] <= seen["locked"] <= seen["spilled"] * 1.05


if __name__ == "__main__":
    # Workers import this module by its name.
    from tests.gpu import test_memory

    print(json.dumps(test_memory.host_memory()))
