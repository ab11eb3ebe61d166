"""A process that starts a cluster on request."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import clusters
from benchmarks.clusters import dask_cuda, ours

__all__ = ["dask_cuda", "ours", "waiting"]


@contextlib.contextmanager
def waiting(factory: str) -> Iterator[Starting]:
    with contextlib.ExitStack() as stack:
        yield Starting(factory, stack)


class Starting:
    """A cluster that is not started yet.

    Parameters
    ----------
    factory
        The function that makes it.
    stack
        The stack whose close ends it.
    """

    def __init__(self, factory: str, stack: contextlib.ExitStack) -> None:
        self._factory, self._stack = factory, stack

    def start(self, *args: Any) -> float:
        """Return the seconds until all workers are there, including the imports of libraries."""
        started = time.perf_counter()
        module, _, name = self._factory.partition(":")
        make = getattr(importlib.import_module(module), name)
        self._cluster: clusters.Cluster = self._stack.enter_context(make(*args))
        return time.perf_counter() - started

    def touch_all(self) -> float:
        """Return the seconds of a first task on each GPU."""
        cluster, started = self._cluster, time.perf_counter()
        everywhere = range(cluster.n_devices)
        futures = [cluster.submit(touch, cluster.library, device=device) for device in everywhere]
        cluster.client.gather(futures)
        return time.perf_counter() - started

    def use_array(self, nbytes: int) -> None:
        """Let a task on each GPU read an array that another task made in host memory."""
        cluster = self._cluster
        self._array = cluster.submit(host_array, nbytes, device=0)
        everywhere = range(cluster.n_devices)
        self._uses = [cluster.submit(last, self._array, device=device) for device in everywhere]
        found = cluster.client.gather(self._uses)
        if found != [1] * cluster.n_devices:
            raise RuntimeError(f"the tasks read {found} at the end of an array of ones")


def touch(library: str) -> float:
    return float(clusters.zeros(library, (1,), "float64")[0])


def host_array(nbytes: int) -> Any:
    import numpy

    return numpy.ones(nbytes, "uint8")


def last(array: Any) -> int:
    return int(array[-1])
