"""Operations on dask arrays whose chunks are on the GPUs of a cluster.

As in dask-cuda's benchmark, an operation's arrays are made before, and its result is left where it
is made: what is timed lasts until all of the result is there and the devices are idle.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import clusters

Shape = tuple[int, ...]
Random = Callable[..., Any]


@contextlib.contextmanager
def ours(*args: Any) -> Iterator[Jobs]:
    with clusters.ours(*args) as cluster:
        yield Jobs(cluster)


@contextlib.contextmanager
def dask_cuda(*args: Any) -> Iterator[Jobs]:
    with clusters.dask_cuda(*args) as cluster:
        yield Jobs(cluster)


class Jobs:
    """The operations, on one cluster."""

    def __init__(self, cluster: clusters.Cluster) -> None:
        self._cluster = cluster
        self._last: tuple[str, Shape, Shape] | None = None
        self._seed = 0

    def turn(self, operation: str, shape: Shape, chunk: Shape) -> float:
        """Return the seconds that one operation takes on fresh arrays."""
        client, library = self._cluster.client, self._cluster.library
        if self._last != (operation, shape, chunk):
            self._last = operation, shape, chunk
            client.run(clusters.free_all, library)  # every operation begins alike
        make, function = OPERATIONS[operation]
        inputs = self._done(make(self._random, shape, chunk))
        client.run(clusters.sync_all, library)
        started = time.perf_counter()
        self._done(function(*inputs))
        client.run(clusters.sync_all, library)
        return time.perf_counter() - started

    def _done(self, result: Any) -> list[Any]:
        """Return one or several arrays with all of their chunks computed, on the workers.

        Raises
        ------
        Exception
            What one of the tasks raised.
        """
        from distributed import futures_of, wait

        several = list(result) if isinstance(result, tuple) else [result]
        done: list[Any] = self._cluster.client.persist(several)
        futures = futures_of(done)
        wait(futures)
        for future in futures:
            if future.status != "finished":
                future.result()
        return done

    def _random(self, shape: Shape, chunk: Shape, limit: int = 0) -> Any:
        """Return an array of random numbers in [0, 1), or of integers below a limit."""
        import dask.array as da

        self._seed += 1
        dtype = "int64" if limit else "float64"
        library = self._cluster.library
        return da.map_blocks(
            draw,
            library,
            limit,
            self._seed,
            chunks=da.core.normalize_chunks(chunk, shape),
            dtype=dtype,
            meta=clusters.zeros(library, (0,) * len(shape), dtype),
        )


# -- what is measured: what makes the arrays, and what is done with them


def _one(random: Random, shape: Shape, chunk: Shape) -> Any:
    return (random(shape, chunk),)


def _two(random: Random, shape: Shape, chunk: Shape) -> Any:
    return random(shape, chunk), random(shape, chunk)


def _with_indices(random: Random, shape: Shape, chunk: Shape) -> Any:
    """A column, and a thousandth as many random places in it."""
    count = max(shape[0] // 1000, 8)
    return random(shape, chunk), random((count,), (count,), shape[0])


def _svd(x: Any) -> Any:
    import numpy

    return tuple(numpy.linalg.svd(x))


def _fft(x: Any) -> Any:
    import numpy

    return numpy.fft.fft(x, axis=0)


OPERATIONS: dict[str, tuple[Random, Callable[..., Any]]] = {
    "transpose_sum": (_one, lambda x: (x + x.T).sum()),
    "dot": (_two, lambda x, y: x.dot(y)),
    "svd": (_one, _svd),
    "fft": (_one, _fft),
    "sum": (_one, lambda x: x.sum()),
    "mean": (_one, lambda x: x.mean()),
    "slice": (_one, lambda x: x[::3].copy()),
    "col_sum": (_two, lambda x, y: x + y),
    "col_mask": (_two, lambda x, y: x[y > 0.5]),
    "col_gather": (_with_indices, lambda x, where: x[where]),
}


# -- on the workers


def draw(library: str, limit: int, seed: int, block_info: Any = None) -> Any:
    place = block_info[None]
    shape = tuple(stop - start for start, stop in place["array-location"])
    seed = (seed * 1_000_003 + hash(tuple(place["chunk-location"]))) % 2**32
    if library == "cupy":
        import cupy

        state = cupy.random.RandomState(seed)
        return state.randint(0, limit, shape) if limit else state.random_sample(shape)
    import numpy

    from dask_devctx import SimulatedArray

    host = numpy.random.RandomState(seed)
    return SimulatedArray.asarray(host.randint(0, limit, shape) if limit else host.random(shape))
