"""Operations on an array of which only a part fits into the memory that it may take."""

from __future__ import annotations

import time
from typing import Any

from benchmarks import clusters
from benchmarks.subjects.jobs_hosted import Jobs, Shape


class Memory(Jobs):
    """The operations, on one cluster; they share one array."""

    def __init__(self, cluster: clusters.Cluster) -> None:
        super().__init__(cluster)
        self._array: list[Any] = []

    def job(self, name: str, shape: Shape, chunk: Shape) -> float:
        """Return the seconds of one operation; ``"make"`` makes the array of the others."""
        client, library = self._cluster.client, self._cluster.library
        started = time.perf_counter()
        if name == "make" or not self._array:
            self._array.clear()
            client.run(clusters.sync_all, library)
            started = time.perf_counter()
            self._array = self._done(self._random(shape, chunk))
            client.run(clusters.sync_all, library)
        if name != "make":
            (x,) = self._array
            started = time.perf_counter()
            self._done(JOBS[name](x))
            client.run(clusters.sync_all, library)
        return time.perf_counter() - started

    def there_and_back(self, nbytes: int) -> float:
        """Move an array out of a device's memory and back, as the worker does with its values."""
        cluster = self._cluster
        task = cluster.submit(there_and_back, cluster.library, nbytes, device=0)
        return float(task.result())

    def bare(self, nbytes: int) -> float:
        """Copy as many bytes to page-locked memory and back, with the runtime's function alone."""
        return float(self._cluster.submit(bare, self._cluster.library, nbytes, device=0).result())


ours, dask_cuda, _ = clusters.hosted(Memory)


JOBS = {
    "sum": lambda x: x.sum(),
    "transpose_sum": lambda x: (x + x.T).sum(),
    "standard_deviation": lambda x: (x - x.mean(axis=0)).std(),
}


# -- on the workers


def there_and_back(library: str, nbytes: int) -> float:
    from distributed import get_worker

    from dask_devctx import Device
    from dask_devctx.transfer import Stamp
    from dask_devctx.worker.values.host_form import Copying

    device = Device.current()
    assert device is not None
    pool = get_worker().plugins["devctx"].extension.store.spill.pool
    array = clusters.zeros(library, (nbytes,), "uint8")
    took = 0.0
    for turn in range(2):  # the first warms up: it locks pages and allocates
        array[...] = 7 + turn
        clusters.sync(library)
        started = time.perf_counter()
        form = Copying(array, device, Stamp.of_devices([device]), pool.take).finish()
        back, stamp = form.on_device(device)
        while not stamp.done():
            pass
        took = time.perf_counter() - started
        if int(back[-1].item()) != 7 + turn:
            raise RuntimeError(f"the array came back with {back[-1]}")
        del back, form
    return took


def bare(library: str, nbytes: int) -> float:
    array = clusters.zeros(library, (nbytes,), "uint8")
    if library == "simulated":
        from dask_devctx import SimulatedArray

        started = time.perf_counter()
        SimulatedArray.asarray(array.get())
        return time.perf_counter() - started
    import cupy

    runtime = cupy.cuda.runtime
    out, into = runtime.memcpyDeviceToHost, runtime.memcpyHostToDevice
    host = cupy.cuda.alloc_pinned_memory(nbytes)
    back = cupy.empty_like(array)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    took = 0.0
    for _ in range(2):  # the first warms up
        started = time.perf_counter()
        runtime.memcpyAsync(host.ptr, array.data.ptr, nbytes, out, stream.ptr)
        stream.synchronize()
        runtime.memcpyAsync(back.data.ptr, host.ptr, nbytes, into, stream.ptr)
        stream.synchronize()
        took = time.perf_counter() - started
    return took
