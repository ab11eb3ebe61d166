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

    from dask_devctx.dask_internals.scheduler import LOOK_AHEAD

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


class Noops:
    """Tasks that do nothing."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._numbers = itertools.count()
        self._has_plugin = False
        self._inputs: dict[str, Any] = {}

    def turn(
        self, tasks: int, annotation: int | None, plugin: bool | None, kind: str = "", n: int = 0
    ) -> float:
        """Return the seconds from the submission of the tasks to the end of the last one.

        Parameters
        ----------
        plugin
            Whether the plugin is registered; None leaves that as it is.
        kind
            The name of a function below that makes, once, one more argument for all tasks; ``n``
            is its size.
        """
        from dask_devctx import DevicePlugin

        if plugin is not None and plugin != self._has_plugin:
            if plugin:
                self._client.register_plugin(DevicePlugin())
            else:
                self._client.unregister_worker_plugin(DevicePlugin.name)
            self._has_plugin = plugin
            self._run(tasks // 10, annotation, [])  # warm up: threads and contexts start once
        given = []
        if kind:
            if kind not in self._inputs:
                with self._at(annotation):
                    self._inputs[kind] = self._client.submit(globals()[kind], n, pure=False)
            given.append(self._inputs[kind])
            self._run(tasks // 10, annotation, given)
        return self._run(tasks, annotation, given)

    def _at(self, annotation: int | None) -> Any:
        import dask

        return dask.annotate(**({} if annotation is None else {"device": annotation}))

    def _run(self, tasks: int, annotation: int | None, given: list[Any]) -> float:
        from distributed import wait

        numbers = [next(self._numbers) for _ in range(tasks)]
        started = time.perf_counter()
        with self._at(annotation):
            futures = self._client.map(nothing, numbers, *([one] * tasks for one in given))
        wait(futures)
        took = time.perf_counter() - started
        for future in futures:
            if future.status != "finished":
                future.result()  # raises the task's exception
        self._client.cancel(futures)
        return took


ours, dask_cuda, _ = clusters.hosted(lambda cluster: Noops(cluster.client))


def nothing(number: int, given: object = None) -> None:
    return None


def tuples(n: int) -> list[tuple[int, str]]:
    return [(index, "x") for index in range(n)]


def cube(n: int) -> list[list[list[int]]]:
    side = round(n ** (1 / 3))
    return [[list(range(side)) for _ in range(side)] for _ in range(side)]


def frame(n: int) -> Any:
    import pandas

    return pandas.DataFrame({"number": range(n)})


def arrays(n: int) -> dict[int, Any]:
    from dask_devctx import Device, driver

    with Device(0):
        if driver.backend().simulated:
            from dask_devctx import SimulatedArray

            return {index: SimulatedArray(1) for index in range(n)}
        import cupy

        return {index: cupy.zeros(1) for index in range(n)}
