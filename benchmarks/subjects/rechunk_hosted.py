"""Rechunks on a cluster; every outcome is checked."""

from __future__ import annotations

import time
from typing import Any

from benchmarks import clusters


class Rechunks:
    """Rechunks on one cluster."""

    def __init__(self, cluster: clusters.Cluster) -> None:
        self._cluster = cluster

    def turn(self, side: int, n: int, method: str) -> float:
        """Return the seconds that a fresh array takes from columns to rows.

        Raises
        ------
        Exception
            A task failed; this is its exception.
        ValueError
            The outcome is wrong.
        """
        import dask.array as da

        client, library = self._cluster.client, self._cluster.library
        meta = clusters.zeros(library, (0, 0), "float64")
        columns = da.map_blocks(
            numbered,
            library,
            time.time(),
            side,
            chunks=((side,), (side // n,) * n),
            dtype="float64",
            meta=meta,
        )
        (columns,) = clusters.computed(client, columns)
        client.run(clusters.sync_all, library)
        started = time.perf_counter()
        (rows,) = clusters.computed(client, columns.rechunk((side // n, side), method=method))
        client.run(clusters.sync_all, library)
        took = time.perf_counter() - started
        del columns
        wrong = rows.map_blocks(differs, side, dtype=bool, chunks=(1, 1), meta=meta)
        if any(client.gather(client.compute(list(wrong.to_delayed().ravel())))):
            raise ValueError("the rechunked array is wrong")
        return took


ours, dask_cuda, _ = clusters.hosted(Rechunks)


# -- on the workers


def numbered(library: str, token: float, side: int, block_info: Any = None) -> Any:
    """Return a block of an array of which each element tells its place."""
    rows, columns = block_info[None]["array-location"]
    return _expected(clusters.zeros(library, (1, 1), "float64"), rows, columns, side)


def differs(block: Any, side: int, block_info: Any = None) -> Any:
    rows, columns = block_info[0]["array-location"]
    return bool((block != _expected(block[:1, :1], rows, columns, side)).any())


def _expected(one: Any, rows: Any, columns: Any, side: int) -> Any:
    import numpy

    def count(begin: int, end: int) -> Any:
        if type(one).__name__ == "SimulatedArray":
            return type(one).asarray(numpy.arange(begin, end, dtype="float64"))
        import cupy

        return cupy.arange(begin, end, dtype="float64")

    return count(*rows)[:, None] * side + count(*columns)[None, :]
