"""Operations on dask arrays whose chunks are on the GPUs of a cluster.

As in dask-cuda's benchmark, an operation's arrays are made before, and its result stays where it is
made. The time ends when the whole result is there and the devices are idle.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

from benchmarks import clusters

Shape = tuple[int, ...]
Random = Callable[..., Any]


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
            client.run(clusters.free_all, library)  # every operation begins in the same state
        make, function = OPERATIONS[operation]
        inputs = self._done(make(self._random, shape, chunk))
        client.run(clusters.sync_all, library)
        client.run(gc.collect)  # a full collection takes longer than some operations
        gc.collect()
        started = time.perf_counter()
        self._done(function(*inputs))
        client.run(clusters.sync_all, library)
        return time.perf_counter() - started

    def _done(self, result: Any) -> list[Any]:
        return clusters.computed(self._cluster.client, result)

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


ours, dask_cuda, plain = clusters.hosted(Jobs)


# -- the measured operations: one function makes the arrays, another one uses them


def _one(random: Random, shape: Shape, chunk: Shape) -> Any:
    return (random(shape, chunk),)


def _two(random: Random, shape: Shape, chunk: Shape) -> Any:
    return random(shape, chunk), random(shape, chunk)


def _with_indices(random: Random, shape: Shape, chunk: Shape) -> Any:
    """A column, and random places in it, a thousandth as many as it has rows."""
    count = max(shape[0] // 1000, 8)
    return random(shape, chunk), random((count,), (count,), shape[0])


def _svd(x: Any) -> Any:
    import numpy

    return tuple(numpy.linalg.svd(x))


def _fft(x: Any) -> Any:
    import numpy

    return numpy.fft.fft(x, axis=0)


def _overlapped(x: Any) -> Any:
    return x.map_overlap(blurred, depth=16, boundary="reflect", dtype=x.dtype, meta=x._meta)


def _row_statistics(x: Any) -> tuple[Any, Any]:
    return x.mean(axis=1), x.std(axis=1)


def _inference(x: Any) -> Any:
    return x.map_blocks(infer, dtype="float32", chunks=(x.chunks[0], (10,)), meta=x._meta)


def _shuffled(x: Any) -> list[Any]:
    """Send each number to the partition of its value, as a frame is shuffled by a key."""
    import dask

    blocks = x.to_delayed().ravel()
    split = dask.delayed(split_by_value, nout=len(blocks), pure=True)
    pieces = [split(block, len(blocks)) for block in blocks]
    join = dask.delayed(joined, pure=True)
    return [join([several[place] for several in pieces]) for place in range(len(blocks))]


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
    # the subject `rechunk` has dask's other way
    "rechunk": (_one, lambda x: x.rechunk((x.chunksize[1], x.shape[1]), method="tasks")),
    "map_overlap": (_one, _overlapped),
    "row_statistics": (_one, _row_statistics),
    "inference": (_one, _inference),
    "shuffle": (_one, _shuffled),
}


# -- on the workers


def blurred(block: Any) -> Any:
    import numpy

    around = (numpy.roll(block, step, axis) for axis in (0, 1) for step in (-1, 1))
    return (block + sum(around)) / 5


def infer(block: Any) -> Any:
    """Apply a network of two layers to a block: with torch on a GPU, with NumPy if simulated."""
    if type(block).__module__.partition(".")[0] != "cupy":
        import numpy

        return numpy.repeat(numpy.maximum(block[:, :1], 0.0), 10, axis=1)
    import cupy
    import torch

    with torch.inference_mode():
        batch = torch.from_dlpack(block).float()
        return cupy.from_dlpack(_model(block.shape[1], batch.device)(batch))


@functools.cache
def _model(width: int, device: Any) -> Any:
    import torch

    torch.manual_seed(0)
    layers = torch.nn.Linear(width, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10)
    return torch.nn.Sequential(*layers).to(device)


def split_by_value(block: Any, count: int) -> tuple[Any, ...]:
    place = (block * count).astype("int64")
    return tuple(block[place == which] for which in range(count))


def joined(pieces: list[Any]) -> Any:
    import numpy

    return numpy.concatenate(pieces)


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
