"""Allocators with the libraries themselves: RMM on each device, CuPy, torch and Numba through it.

Each scenario has a process of its own, whose workers use two GPUs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from typing import Any

import dask
import pytest

from dask_devctx import Device, DevicePlugin, devices
from tests.gpu.own_process import answer_of, connected

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(320)]

needs_cupy = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="CuPy is not installed"
)
needs_rmm = pytest.mark.skipif(
    importlib.util.find_spec("rmm") is None, reason="RMM is not installed"
)
GIB = 2**30
LIBRARIES = ("cupy", "torch", "numba")


def installed() -> list[str]:
    return [name for name in LIBRARIES if importlib.util.find_spec(name) is not None]


# -- what the tasks do


def allocate(libraries: list[str]) -> dict[str, Any]:
    device = Device.current()
    assert device is not None
    seen: dict[str, Any] = {"device": device.device_id, "pid": os.getpid()}
    if "cupy" in libraries:
        import cupy

        array = cupy.arange(1_000_000)
        seen["cupy"] = [type(array.data.mem).__name__, int(array.sum()), array.device.id]
    if "torch" in libraries:
        import torch

        tensor = torch.arange(1_000_000, device="cuda")
        backend = torch.cuda.memory.get_allocator_backend()
        seen["torch"] = [backend, int(tensor.sum()), tensor.device.index]
    if "numba" in libraries:
        from numba import cuda

        there = cuda.to_device(list(range(10)))
        manager = type(cuda.current_context().memory_manager).__name__
        seen["numba"] = [manager, int(there.copy_to_host().sum()), device.device_id]
    return seen


def resources(dask_worker: Any) -> dict[str, list[str]]:
    from rmm import mr

    found = {}
    for device in dask_worker.plugins["devctx"].worker_devices:
        one: Any = mr.get_per_device_resource(device.device_id)
        found[str(device.device_id)] = chain = []
        while one is not None:
            chain.append(type(one).__name__)
            one = getattr(one, "upstream_mr", None)
    return found


def allocator_and_contexts() -> list[Any]:
    import cupy

    active = [d.device_id for d in devices() if Device(d).primary_context.is_active]
    return [getattr(cupy.cuda.get_allocator(), "__name__", ""), active]


def make() -> Any:
    import cupy

    return cupy.arange(1_000_000, dtype="int64")


def total(array: Any) -> list[int]:
    return [int(array.sum()), array.device.id]


# -- the scenarios


def through_rmm() -> dict[str, Any]:
    """A pool for each worker and device, before the first task and after a restart."""
    seen: dict[str, Any] = {"libraries": installed()}
    pool = {"rmm_pool_size": "2 GiB", "rmm_maximum_pool_size": "4 GiB"}
    libraries = {"rmm_allocator_external_lib_list": installed()}
    with connected(devices=[0, 1], n_workers=2, **pool, **libraries) as client:
        seen["used"] = [
            (d.info.total_memory or 0) - (d.memory_info.free or 0) for d in devices()[:2]
        ]
        seen["resources"] = [*client.run(resources).values()]
        seen["current"] = [*client.run(current_resource).values()]
        for moment in ("before", "after"):
            seen[moment] = []
            for ordinal in (0, 1):
                with dask.annotate(device=ordinal):
                    seen[moment].append(
                        client.submit(allocate, installed(), pure=False).result(timeout=120)
                    )
            if moment == "before":
                os.kill(seen[moment][1]["pid"], signal.SIGKILL)
        with dask.annotate(device=0):
            made = client.submit(make, pure=False)
        with dask.annotate(device=1):
            seen["sent"] = client.submit(total, made).result(timeout=60)
    return seen


def current_resource() -> str:
    from rmm import mr

    return type(mr.get_current_device_resource()).__name__


def each_resource() -> dict[str, Any]:
    """Each kind of resource on both devices of one worker, and the earlier ones afterwards."""
    kinds: dict[str, dict[str, Any]] = {
        "managed": {"managed_memory": True},
        "async": {"async": True, "release_threshold": "1 GiB"},
        "limited": {"async": True, "maximum_pool_size": 0.5},
        "tracked": {"pool_size": "1 GiB", "track_allocations": True},
        "logged": {"pool_size": "1 GiB", "log_directory": "/tmp/rmm-logs-of-a-test"},
        "none": {},
    }
    seen: dict[str, Any] = {}
    with connected(devices=[0, 1], n_workers=1) as client:
        for name, options in kinds.items():
            print(name, file=sys.stderr, flush=True)
            client.register_plugin(DevicePlugin(devices=[0, 1], allocator=options or None))
            ((seen[name]),) = client.run(resources).values()
    return seen


def cupy_async() -> dict[str, Any]:
    """CuPy's asynchronous pools in a worker of the second GPU, and the usual one afterwards."""
    seen: dict[str, Any] = {}
    with connected(devices=[1], n_workers=1, allocator="cupy-async") as client:
        with dask.annotate(device=1):
            made = client.submit(make, pure=False)
            seen["total"] = client.submit(total, made).result(timeout=60)
        ((seen["with"]),) = client.run(allocator_and_contexts).values()
        client.register_plugin(DevicePlugin(devices=[1]))
        ((seen["without"]),) = client.run(allocator_and_contexts).values()
        with dask.annotate(device=1):  # memory of the pool that is not used any more
            seen["kept"] = client.submit(total, made, pure=False).result(timeout=60)
    return seen


# -- what is asserted


@needs_rmm
def test_libraries_allocate_through_a_pool_of_each_worker() -> None:
    seen = answer_of(through_rmm)
    pool = ["PoolMemoryResource", "CudaMemoryResource"]
    assert sorted(map(json.dumps, seen["resources"])) == [
        json.dumps({str(ordinal): pool}) for ordinal in (0, 1)
    ]
    assert seen["current"] == ["PoolMemoryResource"] * 2
    assert all(used >= 2 * GIB for used in seen["used"])
    expected = {
        "cupy": ["UnownedMemory", 499_999_500_000],
        "torch": ["pluggable", 499_999_500_000],
        "numba": ["RMMNumbaManager", 45],
    }
    for moment in ("before", "after"):
        for ordinal, found in enumerate(seen[moment]):
            assert found["device"] == ordinal
            for name in seen["libraries"]:
                assert found[name] == [*expected[name], ordinal], (moment, name)
    assert seen["before"][1]["pid"] != seen["after"][1]["pid"]
    assert seen["sent"] == [499_999_500_000, 1]


@needs_rmm
def test_each_resource_is_on_each_device() -> None:
    seen = answer_of(each_resource)
    plain = ["CudaMemoryResource"]
    expected = {
        "managed": ["ManagedMemoryResource"],
        "async": ["CudaAsyncMemoryResource"],
        "limited": ["LimitingResourceAdaptor", "CudaAsyncMemoryResource"],
        "tracked": ["TrackingResourceAdaptor", "PoolMemoryResource", *plain],
        "logged": ["LoggingResourceAdaptor", "PoolMemoryResource", *plain],
        "none": plain,
    }
    assert seen == {name: {"0": chain, "1": chain} for name, chain in expected.items()}


@needs_cupy
def test_cupy_allocates_from_cudas_own_pool() -> None:
    seen = answer_of(cupy_async)
    assert seen["total"] == seen["kept"] == [499_999_500_000, 1]
    assert seen["with"] == ["malloc_async", [1]]
    assert seen["without"][0] != "malloc_async"
