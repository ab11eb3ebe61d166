"""The clusters that are measured, and what is done on their workers. Runs in a contender's process.

Nothing of a contender is imported here before it is asked for: the workers of all of them import
this module.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up.

    Parameters
    ----------
    library
        What makes arrays on its GPUs: ``"cupy"``, or ``"simulated"``.
    n_devices
        How many GPUs it has.
    addresses
        Its workers. Where there is one per device, a task is placed by these.
    """

    client: Any
    library: str
    n_devices: int
    addresses: list[str]

    def submit(self, function: Any, *args: Any, device: int) -> Any:
        """Submit a task that is to run on one device."""
        import dask

        if len(self.addresses) == self.n_devices:
            where = {"workers": [self.addresses[device]]}
            return self.client.submit(function, *args, pure=False, **where)
        with dask.annotate(device=device):
            return self.client.submit(function, *args, pure=False)


@contextlib.contextmanager
def ours(
    library: str,
    n_devices: int,
    n_workers: int | None,
) -> Iterator[Cluster]:
    """``LocalDeviceCluster``, with so many workers; None for as many as it starts by itself."""
    import dask
    from distributed import Client

    from dask_devctx import LocalDeviceCluster

    with (
        # Its own locks: clusters of other shapes have the same GPUs at the same time.
        tempfile.TemporaryDirectory() as locks,
        _environment(DASK_DEVCTX__LOCK_DIRECTORY=locks),
        dask.config.set({"devctx.lock-directory": locks}),
        LocalDeviceCluster(
            **({} if n_workers is None else {"n_workers": n_workers}),
            devices=range(n_devices),
            memory_limit=0,
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        yield _ready(client, library, n_devices, len(cluster.workers))


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Have the processes that are started inside see these variables."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def dask_cuda(
    library: str, n_devices: int, protocol: str, pool_nbytes: int | None
) -> Iterator[Cluster]:
    """``LocalCUDACluster`` with a worker for each GPU; CuPy takes memory from RMM's pool if any."""
    from dask_cuda import LocalCUDACluster
    from distributed import Client

    with (
        LocalCUDACluster(
            n_workers=n_devices,
            CUDA_VISIBLE_DEVICES=list(range(n_devices)),
            protocol=protocol,
            rmm_pool_size=pool_nbytes,
            memory_limit=0,
            device_memory_limit=0,
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        cluster = _ready(client, library, n_devices, n_devices)
        if pool_nbytes is not None:
            client.run(_use_rmm)
        yield cluster


def _ready(client: Any, library: str, n_devices: int, n_workers: int) -> Cluster:
    client.wait_for_workers(n_workers, timeout=60)
    return Cluster(client, library, n_devices, sorted(client.run(_nothing)))


def _nothing() -> None:
    return None


def _use_rmm() -> None:
    import cupy
    from rmm.allocators.cupy import rmm_cupy_allocator

    cupy.cuda.set_allocator(rmm_cupy_allocator)


# -- on the workers, with whichever device is current


def zeros(library: str, shape: Any, dtype: str) -> Any:
    """Return an array on the current device."""
    if library == "cupy":
        import cupy

        return cupy.zeros(shape, dtype)
    from dask_devctx import SimulatedArray

    return SimulatedArray(shape, dtype)


def sync(library: str) -> None:
    """Wait for the device that is current."""
    if library == "cupy":
        import cupy

        cupy.cuda.Device().synchronize()


def sync_all(library: str, dask_worker: Any = None) -> None:
    """Wait for the devices of a worker, and for no other: that would begin to use it."""
    for device in _devices(dask_worker):
        with device:
            sync(library)


def free_all(library: str, dask_worker: Any = None) -> None:
    """Give the memory that CuPy keeps back to a worker's devices."""
    for device in _devices(dask_worker):
        with device:
            if library == "cupy":
                import cupy

                cupy.get_default_memory_pool().free_all_blocks()


def _devices(worker: Any) -> Iterable[contextlib.AbstractContextManager[Any]]:
    """Return what makes each device of a worker current; dask-cuda's have one, current always."""
    plugin = worker.plugins.get("devctx")
    return plugin.worker_devices if plugin else [contextlib.nullcontext()]
