"""Values of each library leave a real device and come back, right to the last bit and sharing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from distributed import Client, Worker, wait

from dask_devctx import LocalDeviceCluster, report
from dask_devctx.transfer.location import memories
from tests.gpu.own_process import answer_of

pytestmark = [pytest.mark.gpu(count=1), pytest.mark.timeout(320)]
MIB = 2**20
LIMIT = 256 * MIB


@contextmanager
def limited() -> Iterator[Client]:
    with (
        LocalDeviceCluster(
            n_workers=1,
            devices=[0],
            device_memory_limit=LIMIT,
            memory_limit=0,
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def cupy_array(n: int) -> Any:
    import cupy

    return cupy.random.default_rng(n).integers(0, 1000, (8 * MIB,), dtype=cupy.int64)


def cupy_view(n: int) -> Any:
    x = cupy_array(n).reshape(2048, 4096)
    return [x, x.T, x[::3, 5:]]


def torch_tensor(n: int) -> Any:
    import torch

    generator = torch.Generator("cuda").manual_seed(n)
    x = torch.rand(4096, 4096, generator=generator, device="cuda")
    return [x, x[1:, ::2], x.T]


def torch_module(n: int) -> Any:
    import torch

    torch.manual_seed(n)
    module = torch.nn.Linear(4096, 4096, device="cuda")
    module.tied = module.weight
    return module


LIBRARIES = {cupy_view: "cupy", torch_tensor: "torch", torch_module: "torch"}


def plain(value: Any) -> Any:
    if isinstance(value, list):
        return [plain(one) for one in value]
    if hasattr(value, "state_dict"):
        return [*(plain(one) for one in value.state_dict().values()), value.tied is value.weight]
    host = value.get() if hasattr(value, "get") else value.detach().cpu().numpy()
    return host.tobytes()


def seen(value: Any) -> Any:
    found = memories(value)
    return plain(value), None if found is None else len(found)


def same(value: Any, n: int, make: Any) -> bool:
    return bool(seen(value) == seen(make(n)))


def leave_and_come_back(name: str) -> dict[str, Any]:
    """Return what became of 24 values of 64 MiB, in a limit of 256 MiB."""
    make = globals()[name]
    with limited() as client:
        futures = client.map(make, range(24), pure=False)
        wait(futures)
        (before,) = report(client).devices
        right = client.gather(client.map(same, futures, range(24), make=make, pure=False))
        (after,) = report(client).devices
    return {
        "right": sum(right),
        "left": before.spills > 0 and (before.memory_spilled or 0) > 0,
        "came back": after.unspills > 0,
        "in the limit": (after.memory_held or 0) <= LIMIT,
    }


def taken(dask_worker: Worker) -> tuple[int, int]:
    """Return the page-locked bytes in use, and the bytes of the values that left."""
    plugin = dask_worker.plugins["devctx"]
    memory = plugin.extension.store.spill
    return memory.pool.taken, memory.count("spilled", plugin.worker_devices[0])


def host_memory() -> dict[str, Any]:
    with limited() as client:
        futures = client.map(cupy_array, range(32), pure=False)  # 2 GiB
        wait(futures)
        ((locked, spilled),) = client.run(taken).values()
    return {"locked": locked, "spilled": spilled}


@pytest.mark.parametrize("make", LIBRARIES, ids=lambda make: make.__name__)
def test_values_leave_and_come_back(make: Any) -> None:
    pytest.importorskip(LIBRARIES[make])
    expected = {"right": 24, "left": True, "came back": True, "in the limit": True}
    assert answer_of("tests.gpu.test_memory", "leave_and_come_back", make.__name__) == expected


def test_host_memory_of_a_value_is_taken_once() -> None:
    pytest.importorskip("cupy")
    seen = answer_of("tests.gpu.test_memory", "host_memory")
    assert 0 < seen["spilled"] <= seen["locked"] <= seen["spilled"] * 1.05


if __name__ == "__main__":
    # Workers import this module by its name.
    from tests.gpu import test_memory

    print(json.dumps(getattr(test_memory, sys.argv[1])(*sys.argv[2:])))
