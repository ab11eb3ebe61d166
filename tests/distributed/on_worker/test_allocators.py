"""Allocators: RMM's resources for each device, CuPy's pool, and the libraries that use them.

The libraries are stand-ins; ``tests/gpu/test_allocators.py`` has the libraries themselves.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest

from dask_devctx import Device, LocalDeviceCluster
from dask_devctx.cuda.out_of_memory import release_library_caches
from tests.distributed.devices import plugin_with, started, submit_on

STANDINS = str(Path(__file__).parents[2] / "standins")
GB, GIB = 10**9, 2**30


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes that are started now find the stand-ins, also when they import distributed."""
    monkeypatch.syspath_prepend(STANDINS)
    with dask.config.set({"distributed.worker.multiprocessing-method": "spawn"}):
        yield


def chains() -> dict[int, list[tuple[Any, ...]]]:
    """Each device's resource and those below it: the class and its numbers."""
    from rmm import mr

    found = {}
    for ordinal in range(4):
        one: Any = mr.get_per_device_resource(ordinal)
        found[ordinal] = []
        while one is not None:
            found[ordinal].append((type(one).__name__, *getattr(one, "given", ())))
            one = getattr(one, "upstream_mr", None)
    return found


PLAIN: list[tuple[Any, ...]] = [("CudaMemoryResource",)]
RESOURCES: list[tuple[dict[str, Any], list[tuple[Any, ...]]]] = [
    ({"rmm_pool_size": "2GB"}, [("PoolMemoryResource", 2 * GB, None), *PLAIN]),
    (
        {"rmm_pool_size": 0.2, "rmm_maximum_pool_size": "0.3"},
        [
            ("PoolMemoryResource", 16 * GIB // 5 // 256 * 256, 16 * GIB * 3 // 10 // 256 * 256),
            *PLAIN,
        ],
    ),
    ({"rmm_managed_memory": True}, [("ManagedMemoryResource",)]),
    (
        {"rmm_async": True, "rmm_release_threshold": "3GB"},
        [("CudaAsyncMemoryResource", None, 3 * GB)],
    ),
    (
        {"rmm_async": True, "rmm_maximum_pool_size": "4GB"},
        [("LimitingResourceAdaptor", 4 * GB), ("CudaAsyncMemoryResource", None, None)],
    ),
    (
        {"rmm_track_allocations": True, "rmm_pool_size": 2 * GB},
        [("TrackingResourceAdaptor",), ("PoolMemoryResource", 2 * GB, None), *PLAIN],
    ),
    ({"rmm_pool_size": 0, "rmm_allocator_external_lib_list": "cupy"}, PLAIN),
]


def _libraries() -> tuple[str, str, str]:
    import cupy
    import numba.cuda
    import torch.cuda.memory

    current = torch.cuda.memory.current
    return (
        cupy.cuda.get_allocator().__name__,
        current.path if current else "torch's own",
        numba.cuda.manager.__name__ if numba.cuda.manager else "numba's own",
    )


def _pools() -> tuple[str, dict[int, int], list[int]]:
    import cupy

    runtime = cupy.cuda.runtime
    return cupy.cuda.get_allocator().__name__, dict(runtime.thresholds), list(runtime.trimmed)


def _released_on_device_3() -> None:
    with Device(3):
        release_library_caches()


def _cudf() -> tuple[object, object]:
    import cudf

    return cudf.get_option("spill"), cudf.get_option("spill_stats")


def test_each_device_has_its_resource(libraries: None, tmp_path: Path) -> None:
    with started(n_workers=1, devices=[1, 3], processes=True) as client:

        def run(function: Any) -> Any:
            (found,) = client.run(function).values()
            return found

        def registered(**options: Any) -> None:
            client.register_plugin(plugin_with(devices=[1, 3], **options))

        def unregistered() -> None:
            client.unregister_worker_plugin("devctx")
            assert run(chains) == dict.fromkeys(range(4), PLAIN)

        for options, expected in RESOURCES:
            registered(**options)
            assert run(chains) == {0: PLAIN, 1: expected, 2: PLAIN, 3: expected}, options
        unregistered()

        registered(rmm_pool_size="1GB", rmm_log_directory=tmp_path / "logs")
        metrics = run(lambda dask_worker: dask_worker.metrics["rmm"](dask_worker))
        assert metrics == {"rmm-used": 0, "rmm-total": 2 * GB // 256 * 256}
        names = sorted(path.name for path in (tmp_path / "logs").iterdir())
        assert names == ["rmm_log_0.dev1.txt", "rmm_log_0.dev3.txt"]
        unregistered()

        assert run(_libraries) == ("_malloc", "torch's own", "numba's own")
        through_rmm = ("rmm_cupy_allocator", "_torch_allocator.so", "RMMNumbaManager")
        registered(rmm_allocator_external_lib_list=["torch", "cupy", "numba"])
        assert run(_libraries) == through_rmm
        registered(rmm_allocator_external_lib_list="torch,numba,cupy")  # torch allows it once
        assert run(_libraries) == through_rmm
        unregistered()
        assert run(_libraries) == ("_malloc", *through_rmm[1:])

        registered(allocator="cupy-async")
        kept = {1001: 2**64 - 1, 1003: 2**64 - 1}
        assert run(_pools) == ("malloc_async", kept, [])
        run(_released_on_device_3)  # as when a device's memory runs out
        assert run(_pools) == ("malloc_async", kept, [1003])
        unregistered()
        assert run(_pools) == ("_malloc", dict.fromkeys(kept, 0), [1003, 1003, 1001])

        registered(enable_cudf_spill=True, cudf_spill_stats=2)
        assert run(_cudf) == (True, 2)
        unregistered()
        assert run(_cudf) == (False, 0)

        assert not run(lambda: "wave" in sys.modules)
        registered(pre_import="wave, colorsys")
        assert run(lambda: {"wave", "colorsys"} <= sys.modules.keys())


async def _pool_twice() -> list[str]:
    import asyncio

    first, _ = _pool_and_pid()
    await asyncio.sleep(0)
    return [first, _pool_and_pid()[0]]


def _pool_and_pid() -> tuple[str, int]:
    import os

    from rmm import mr

    return type(mr.get_current_device_resource()).__name__, os.getpid()


def test_a_worker_that_was_restarted_has_its_resource_before_its_first_task(
    libraries: None,
) -> None:
    with started(n_workers=2, devices=[0, 2], rmm_pool_size=0.5, processes=True) as client:
        assert {kind for kind, _ in client.run(_pool_and_pid).values()} == {"PoolMemoryResource"}
        assert [*client.run(_pool_twice).values()] == [["PoolMemoryResource"] * 2] * 2
        kind, pid = submit_on(client, 2, _pool_and_pid, pure=False).result(timeout=30)
        assert kind == "PoolMemoryResource"
        psutil.Process(pid).kill()
        kind, other = submit_on(client, 2, _pool_and_pid, pure=False).result(timeout=30)
        assert (kind, other != pid) == ("PoolMemoryResource", True)


NEEDED = [
    ({"rmm_pool_size": "1GB"}, "rmm_pool_size needs the package rmm,.*pip install rmm-cu13"),
    ({"rmm_async": True}, "rmm_async needs the package rmm,"),
    ({"rmm_managed_memory": True}, "rmm_managed_memory needs the package rmm,"),
    ({"rmm_track_allocations": True}, "rmm_track_allocations needs the package rmm,"),
    ({"rmm_allocator_external_lib_list": ["cupy"]}, "lib_list needs the package rmm,"),
    ({"allocator": "cupy-async"}, "allocator needs the package cupy,.*pip install cupy-cuda13x"),
    ({"enable_cudf_spill": True}, "enable_cudf_spill needs the package cudf,"),
    ({"pre_import": "no_such_module"}, "pre_import needs the package no_such_module,"),
    ({"nvtx": True}, "pip install nvtx"),
]


@pytest.mark.parametrize(("options", "said"), NEEDED)
def test_a_package_that_is_missing_is_named_before_anything_starts(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rmm", "cupy", "cudf", "nvtx"):
        monkeypatch.setitem(sys.modules, name, None)
    threads = threading.active_count()
    with pytest.raises(ImportError, match=said):
        plugin_with(LocalDeviceCluster, **options)
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rmm_async": True, "rmm_managed_memory": True}, "incompatible with rmm_async"),
        ({"rmm_release_threshold": "1GB"}, "rmm_release_threshold requires rmm_async=True"),
        ({"rmm_maximum_pool_size": "1GB"}, "limits a pool, and there is none"),
        ({"rmm_pool_size": "auto"}, "rmm_pool_size must be a fraction of a device's memory"),
        ({"rmm_allocator_external_lib_list": "jax"}, "some of 'cupy', 'torch', 'numba', got 'jax'"),
        ({"allocator": "rmm"}, "allocator must be 'cupy-async', or RMM's settings .*, got 'rmm'"),
        ({"allocator": {"pool_sizes": 1}}, "no setting 'pool_sizes'. Did you mean 'pool_size'"),
        ({"allocator": {"pool-size": -1}}, "rmm_pool_size must be a fra.*, got -1"),
        ({"pre_import": 3}, "pre_import must be a list of names"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plugin_with(**options)
