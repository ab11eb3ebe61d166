"""The clusters that are measured, and functions for their workers; for a contender's process.

The workers of all contenders import this module. So a contender's library is imported only inside
the functions that need it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Opened = Callable[..., contextlib.AbstractContextManager[T]]


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    Parameters
    ----------
    library
        The library of the arrays on its GPUs: ``"cupy"``, or ``"simulated"``.
    n_devices
        How many GPUs it has.
    addresses
        Its workers. Where each device has one, a task's worker decides its device.
    """

    client: Any
    library: str
    n_devices: int
    addresses: list[str]

    def submit(self, function: Any, *args: Any, device: int) -> Any:
        """Submit a task that runs on the given device."""
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
    limit: Any = "auto",
    options: dict[str, Any] | None = None,
) -> Iterator[Cluster]:
    """``LocalDeviceCluster`` with this number of workers; None for its default number.

    ``limit`` is its limit of device memory; ``options`` are further ones.
    """
    import dask
    from distributed import Client

    from dask_devctx import LocalDeviceCluster

    with (
        # Locks of its own, because other clusters use the same GPUs at the same time.
        tempfile.TemporaryDirectory() as locks,
        _environment(DASK_DEVCTX__LOCK_DIRECTORY=locks),
        dask.config.set({"devctx.lock-directory": locks}),
        LocalDeviceCluster(
            **({} if n_workers is None else {"n_workers": n_workers}),
            devices=range(n_devices),
            memory_limit=0,
            device_memory_limit=limit,
            dashboard_address=":0",
            **(options or {}),
        ) as cluster,
        Client(cluster) as client,
    ):
        yield _ready(client, library, n_devices, len(cluster.workers))


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set variables for the processes that are started inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def dask_cuda(
    library: str, n_devices: int, protocol: str, pool_nbytes: int | None, limit: Any = 0
) -> Iterator[Cluster]:
    """``LocalCUDACluster`` with a worker for each GPU; CuPy uses RMM's pool if there is one.

    With a limit of device memory, the workers have dask's own limit of host memory, too: dask-cuda
    moves nothing to the host without it.
    """
    from dask_cuda import LocalCUDACluster
    from distributed import Client

    with (
        LocalCUDACluster(
            n_workers=n_devices,
            CUDA_VISIBLE_DEVICES=list(range(n_devices)),
            protocol=protocol,
            rmm_pool_size=pool_nbytes,
            memory_limit="auto" if limit else 0,
            device_memory_limit=limit,
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        cluster = _ready(client, library, n_devices, n_devices)
        if pool_nbytes is not None:
            client.run(_use_rmm)
        yield cluster


@contextlib.contextmanager
def plain(library: str, n_devices: int) -> Iterator[Cluster]:
    """dask alone: a worker for each GPU, which its environment shows it."""
    from distributed import Client, Nanny, Scheduler, SpecCluster

    options = {"nthreads": 1, "memory_limit": 0}  # as those of the others
    workers = {
        n: {"cls": Nanny, "options": options | {"env": {"CUDA_VISIBLE_DEVICES": str(n)}}}
        for n in range(n_devices)
    }
    scheduler = {"cls": Scheduler, "options": {"dashboard_address": ":0"}}
    with SpecCluster(workers, scheduler) as cluster, Client(cluster) as client:
        yield _ready(client, library, n_devices, n_devices)


def hosted(subject: Callable[[Cluster], T]) -> tuple[Opened[T], Opened[T], Opened[T]]:
    """Return the functions that open a subject on a cluster: ours, dask-cuda's and plain dask's."""

    def on(cluster: Opened[Cluster]) -> Opened[T]:
        @contextlib.contextmanager
        def opened(*args: Any) -> Iterator[T]:
            with cluster(*args) as started:
                yield subject(started)

        return opened

    return on(ours), on(dask_cuda), on(plain)


def computed(client: Any, result: Any) -> list[Any]:
    """Return one or several arrays whose chunks are computed and stay on the workers.

    Raises
    ------
    Exception
        One of the tasks failed; this is its exception.
    """
    from distributed import futures_of, wait

    several = list(result) if isinstance(result, tuple | list) else [result]
    done: list[Any] = client.persist(several)
    futures = futures_of(done)
    wait(futures)
    for future in futures:
        if future.status != "finished":
            future.result()
    return done


def _ready(client: Any, library: str, n_devices: int, n_workers: int) -> Cluster:
    client.wait_for_workers(n_workers, timeout=60)
    return Cluster(client, library, n_devices, sorted(client.run(_nothing)))


def _nothing() -> None:
    return None


def _use_rmm() -> None:
    import cupy
    from rmm.allocators.cupy import rmm_cupy_allocator

    cupy.cuda.set_allocator(rmm_cupy_allocator)


# -- on the workers, for the current device


def zeros(library: str, shape: Any, dtype: str) -> Any:
    """Return an array on the current device."""
    if library == "cupy":
        import cupy

        return cupy.zeros(shape, dtype)
    if library == "numpy":
        import numpy

        return numpy.zeros(shape, dtype)
    from dask_devctx import SimulatedArray

    return SimulatedArray(shape, dtype)


def sync(library: str) -> None:
    """Wait for the current device."""
    if library == "cupy":
        import cupy

        cupy.cuda.Device().synchronize()


def sync_all(library: str, dask_worker: Any = None) -> None:
    """Wait for the devices of a worker only: waiting for another one would begin to use it."""
    for device in _devices(dask_worker):
        with device:
            sync(library)


def free_all(library: str, dask_worker: Any = None) -> None:
    """Free the memory that CuPy keeps on a worker's devices."""
    for device in _devices(dask_worker):
        with device:
            if library == "cupy":
                import cupy

                cupy.get_default_memory_pool().free_all_blocks()


def _devices(worker: Any) -> Iterable[contextlib.AbstractContextManager[Any]]:
    """Return a context manager per device of a worker; dask-cuda's one device is always current."""
    plugin = worker.plugins.get("devctx")
    return plugin.worker_devices if plugin else [contextlib.nullcontext()]
