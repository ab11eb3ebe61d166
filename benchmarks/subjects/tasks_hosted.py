"""Tasks that do nothing, on a cluster that can have the plugin registered or removed."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import clusters


@contextlib.contextmanager
def noops(n_devices: int) -> Iterator[Noops]:
    from distributed import Client, LocalCluster

    from dask_devctx.config.options import LOOK_AHEAD

    with (
        LocalCluster(
            n_workers=1,
            threads_per_worker=LOOK_AHEAD * n_devices,
            memory_limit=0,
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        yield Noops(client)


@contextlib.contextmanager
def ours(*args: Any) -> Iterator[Noops]:
    with clusters.ours(*args) as cluster:
        yield Noops(cluster.client)


@contextlib.contextmanager
def dask_cuda(*args: Any) -> Iterator[Noops]:
    with clusters.dask_cuda(*args) as cluster:
        yield Noops(cluster.client)


class Noops:
    """Tasks that do nothing."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._numbers = itertools.count()
        self._has_plugin = False

    def turn(self, tasks: int, annotation: int | None, plugin: bool | None) -> float:
        """Return the seconds that so many tasks took, from their submission to the last's end.

        ``plugin`` says whether the plugin is registered; None leaves that as it is.
        """
        from dask_devctx import DevicePlugin

        if plugin is not None and plugin != self._has_plugin:
            if plugin:
                self._client.register_plugin(DevicePlugin())
            else:
                self._client.unregister_worker_plugin(DevicePlugin.name)
            self._has_plugin = plugin
            self._run(tasks // 10, annotation)  # what is done once: threads, contexts
        return self._run(tasks, annotation)

    def _run(self, tasks: int, annotation: int | None) -> float:
        import dask
        from distributed import wait

        numbers = [next(self._numbers) for _ in range(tasks)]
        annotations = {} if annotation is None else {"device": annotation}
        started = time.perf_counter()
        with dask.annotate(**annotations):
            futures = self._client.map(nothing, numbers)
        wait(futures)
        took = time.perf_counter() - started
        for future in futures:
            if future.status != "finished":
                future.result()  # raises what the task raised
        self._client.cancel(futures)
        return took


def nothing(number: int) -> None:
    return None
