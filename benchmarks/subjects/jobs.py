"""Whole jobs over all GPUs: those of dask-cuda's benchmark ``local_cupy``, and five others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks import field
from benchmarks.case import CannotRunError, Case, Missing, Size
from benchmarks.host import Entry, Host, started

TITLE = "whole jobs"
_MODULE = "benchmarks.subjects.jobs_hosted"
_CAP_S = 4.0
_DEFAULT = {"role": "ours", "remark": "LocalDeviceCluster()"}
_ONE = {"role": "variant", "remark": "n_workers=1"}

# The shapes of the array and of its chunks, large and small. `svd` needs a tall array, `fft` whole
# columns, and the last three need one column.
_SQUARE = ((32_000, 32_000), (4_000, 4_000)), ((8_000, 8_000), (400, 400))
_COLUMN = ((400_000_000,), (25_000_000,)), ((4_000_000,), (20_000,))
_SHAPES = {
    "transpose_sum": _SQUARE,
    "dot": (((16_000, 16_000), (4_000, 4_000)), ((4_000, 4_000), (500, 500))),
    "svd": (((400_000, 1_000), (25_000, 1_000)), ((40_000, 100), (400, 100))),
    "fft": (((16_000, 16_000), (16_000, 1_000)), ((8_000, 8_000), (8_000, 40))),
    "sum": _SQUARE,
    "mean": _SQUARE,
    "slice": _SQUARE,
    "col_sum": _COLUMN,
    "col_mask": _COLUMN,
    "col_gather": _COLUMN,
    # operations that dask-cuda's benchmark does not have
    "rechunk": (((24_000, 24_000), (24_000, 1_500)),),
    "map_overlap": (((24_000, 24_000), (4_000, 4_000)),),
    "row_statistics": (((40_000, 20_000), (5_000, 5_000)),),
    "inference": (((400_000, 1_000), (25_000, 1_000)),),
    "shuffle": (((160_000_000,), (10_000_000,)),),
}
_TINY_SQUARE = (((16, 16), (8, 8)),)
_TINY_COLUMN = (((64,), (16,)),)
_TINY_SHAPES = dict.fromkeys(_SHAPES, _TINY_SQUARE) | {
    "sum": (*_TINY_SQUARE, ((16, 16), (4, 4))),
    "svd": (((64, 4), (16, 4)),),
    "fft": (((16, 16), (16, 4)),),
    "col_sum": _TINY_COLUMN,
    "col_mask": _TINY_COLUMN,
    "col_gather": _TINY_COLUMN,
    "rechunk": (((16, 16), (16, 4)),),
    "inference": (((64, 4), (16, 4)),),
    "shuffle": _TINY_COLUMN,
}


def cases(size: Size) -> Iterator[Case]:
    n_devices = field.n_devices()
    peers, missing = field.dask_cuda(_MODULE, n_devices)
    ours = [
        Entry("as it comes", f"{_MODULE}:ours", (field.library(), n_devices, None), _DEFAULT),
        Entry("one worker for all", f"{_MODULE}:ours", (field.library(), n_devices, 1), _ONE),
    ]
    floor = Entry("plain dask", f"{_MODULE}:plain", (field.library(), n_devices))
    with started([*ours, *peers, floor]) as (hosts, failed):
        if not hosts or hosts[0][0] is not ours[0]:
            raise CannotRunError(failed[0].reason)
        for which, chunks in enumerate(("large", "small")):
            for operation, shapes in (_TINY_SHAPES if size.tiny else _SHAPES).items():
                if which < len(shapes):
                    yield _case(operation, chunks, shapes[which], hosts, [*missing, *failed], size)


def _case(
    operation: str,
    chunks: str,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    hosts: list[tuple[Entry, Host]],
    missing: list[Missing],
    size: Size,
) -> Case:
    whole, chunk = (" × ".join(f"{n:,}" for n in shape) for shape in shapes)
    return Case(
        f"{operation}, {chunks} chunks: {whole} in {chunk}{field.where()}",
        per="job",
        single=True,
        rounds=None if size.tiny else 5,
        cap_s=_CAP_S,
        target=None if size.tiny else 1.0,
        contenders=[entry.contender(_turn(host, operation, *shapes)) for entry, host in hosts],
        missing=missing,
    )


def _turn(
    host: Host, operation: str, shape: tuple[int, ...], chunk: tuple[int, ...]
) -> Callable[[int], float]:
    def run(count: int) -> float:
        return sum(float(host.call("turn", operation, shape, chunk)) for _ in range(count))

    return run
