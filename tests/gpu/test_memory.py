"""The host memory of values that leave a real device; ``test_values`` has the values themselves."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import Worker, wait

from tests.gpu.own_process import answer_of, connected

pytestmark = [pytest.mark.gpu(count=1), pytest.mark.timeout(320)]
MIB = 2**20


def cupy_array(n: int) -> Any:
    import cupy

    return cupy.random.default_rng(n).integers(0, 1000, (8 * MIB,), dtype=cupy.int64)


def taken(dask_worker: Worker) -> tuple[int, int]:
    """Return the page-locked bytes in use, and the bytes of the values that left."""
    plugin = dask_worker.plugins["devctx"]
    memory = plugin.extension.store.spill
    return memory.pool.taken, memory.counts(plugin.worker_devices[0])["spilled"]


def host_memory() -> dict[str, Any]:
    limits = {"device_memory_limit": 256 * MIB, "memory_limit": 0}
    with connected(n_workers=1, devices=[0], **limits) as client:
        futures = client.map(cupy_array, range(32), pure=False)  # 2 GiB
        wait(futures)
        ((locked, spilled),) = client.run(taken).values()
    return {"locked": locked, "spilled": spilled}


def test_host_memory_of_a_value_is_taken_once() -> None:
    pytest.importorskip("cupy")
    seen = answer_of(host_memory)
    assert 0 < seen["spilled"] <= seen["locked"] <= seen["spilled"] * 1.05
