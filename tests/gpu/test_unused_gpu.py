"""A worker that does not use the first GPU leaves it alone: it has no context there.

Values of each library are made, sent, kept, read by a task without a device, and dropped: each can
create a context on the first GPU, which costs half a GiB.
"""

from __future__ import annotations

import gc
import importlib.util
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import dask
import pytest

from dask_devctx import Device, devices
from tests.gpu.kinds import make
from tests.gpu.own_process import answer_of, connected

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(320)]

N = 250_000


def make_cupy_async() -> Any:
    """Return an array in memory of CUDA's own pool."""
    import cupy

    # Not MemoryAsyncPool, which itself makes a context on each GPU.
    with cupy.cuda.using_allocator(cupy.cuda.malloc_async):
        return cupy.ones(N)


def make_rmm() -> Any:
    """Return an array in RMM's memory, as dask-cuda's options for pools make them."""
    import cupy
    import rmm.mr
    from rmm.allocators.cupy import rmm_cupy_allocator

    ordinal = Device.current().device_id  # type: ignore[union-attr]
    rmm.mr.set_per_device_resource(ordinal, rmm.mr.CudaAsyncMemoryResource())
    with cupy.cuda.using_allocator(rmm_cupy_allocator):
        return cupy.ones(N)


KINDS: dict[str, Callable[[], Any]] = {
    "cupy": partial(make, "cupy array"),
    "cupy's async pool": make_cupy_async,
    "rmm": make_rmm,
    "numba": partial(make, "numba array"),
    "torch": partial(make, "torch tensor"),
}


def active(dask_worker: Any) -> list[int]:
    gc.collect()
    return [d.device_id for d in devices() if Device(d).primary_context.is_active]


def read(array: Any) -> Any:
    """Copy an array to the host, in its library's own words."""
    for name in ("get", "copy_to_host", "cpu"):
        if hasattr(array, name):
            return getattr(array, name)()
    raise TypeError(type(array))


def send_everything() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, make_it in KINDS.items():
        if importlib.util.find_spec(re.match(r"\w+", name)[0]) is None:  # type: ignore[index]
            continue
        print(name, file=sys.stderr, flush=True)
        with connected(n_workers=1, devices=[1], memory_limit="60GiB") as client:
            x = client.submit(make_it, pure=False)
            x.result(timeout=60)  # it is packed by the worker
            [y] = client.scatter([x.result(timeout=60)])  # and unpacked
            client.submit(type, y, pure=False).result(timeout=60)
            with dask.annotate(device=None):  # a task without a device may read it
                client.submit(read, x, pure=False).result(timeout=60)
            del x, y
            client.submit(int, pure=False).result(timeout=60)
            [seen[name]] = client.run(active).values()
    return seen


@pytest.fixture(scope="module")
def everything() -> dict[str, Any]:
    seen: dict[str, Any] = answer_of(send_everything)
    return seen


@pytest.mark.parametrize("name", KINDS)
def test_only_the_workers_gpu_has_a_context(name: str, everything: dict[str, Any]) -> None:
    if name not in everything:
        pytest.skip(f"{name} is not installed")
    assert everything[name] == [1]
