"""Copies of arrays between two GPUs, by a cluster or inside one of its tasks."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any

from benchmarks import clusters

_SETTLE_S = 0.03


class Transfers:
    """Copies from the first GPU to the second. Each method returns the seconds of one."""

    def __init__(self, cluster: clusters.Cluster) -> None:
        self._cluster = cluster
        self._marks = itertools.cycle(range(1, 251))
        self._source: tuple[int, Any] | None = None

    def round_trip(self, nbytes: int) -> float:
        """Submit a task with a fresh input, and wait for its result, which needs the copy."""
        from distributed import wait

        cluster, mark = self._cluster, next(self._marks)
        self._source = None
        array = cluster.submit(make, cluster.library, nbytes, mark, device=0)
        wait(array)
        if array.status != "finished":
            array.result()  # raises the task's exception
        # dask holds messages back for up to 5 ms: a faster task before this one would look slower
        time.sleep(_SETTLE_S)
        started = time.perf_counter()
        use = cluster.submit(last, array, device=1)
        found = use.result()
        took = time.perf_counter() - started
        if found != mark:
            raise RuntimeError(f"the task read {found} at the end of an array of {mark}")
        return took

    def copy_in_task(self, nbytes: int) -> float:
        """Copy with ``to_device``, inside a task on the source's GPU."""
        return self._in_task(copy_in_task, nbytes)

    def bare_copy(self, nbytes: int) -> float:
        """Copy with the runtime's function alone, into memory that exists already."""
        return self._in_task(bare_copy, nbytes)

    def _in_task(self, function: Any, nbytes: int) -> float:
        cluster = self._cluster
        if self._source is None or self._source[0] != nbytes:
            self._source = nbytes, cluster.submit(make, cluster.library, nbytes, 7, device=0)
        task = cluster.submit(function, cluster.library, self._source[1], device=0)
        return float(task.result())


ours, dask_cuda, plain = clusters.hosted(Transfers)


# -- on the workers


def make(library: str, nbytes: int, mark: int) -> Any:
    array = clusters.zeros(library, (nbytes,), "uint8")
    array[...] = mark
    clusters.sync(library)
    return array


def last(array: Any) -> int:
    return int(array[-1].item())  # waits for the earlier work of the array's stream


def copy_in_task(library: str, array: Any) -> float:
    from dask_devctx import Device, to_device

    there = Device(1)

    def copy() -> Any:
        moved = to_device(array, there)
        with there:
            clusters.sync(library)
        return moved

    copy()  # the first copy also allocates memory and enables peer access
    started = time.perf_counter()
    moved = copy()
    took = time.perf_counter() - started
    _check(moved, array)
    return took


def _check(moved: Any, array: Any) -> None:
    from dask_devctx import Device, device_of

    with Device(1):
        found = int(moved[-1].item())
    if device_of(moved) is not Device(1) or found != 7 or moved.shape != array.shape:
        raise RuntimeError(f"the copy is on {device_of(moved)} and ends with {found}")


def bare_copy(library: str, array: Any) -> float:
    if library == "simulated":
        from dask_devctx import Device

        started = time.perf_counter()
        array.copy_to(Device(1))
        return time.perf_counter() - started
    import cupy

    runtime = cupy.cuda.runtime
    with cupy.cuda.Device(1) as device:
        with contextlib.suppress(runtime.CUDARuntimeError):  # enabled already
            runtime.deviceEnablePeerAccess(0)
        moved = cupy.empty_like(array)
        stream = cupy.cuda.Stream(non_blocking=True)
        device.synchronize()
        took = 0.0
        for _ in range(2):  # the first warms up
            started = time.perf_counter()
            runtime.memcpyPeerAsync(moved.data.ptr, 1, array.data.ptr, 0, array.nbytes, stream.ptr)
            stream.synchronize()
            took = time.perf_counter() - started
    _check(moved, array)
    return took
