"""Whole jobs on arrays over all GPUs: the operations of dask-cuda's benchmark ``local_cupy``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks import field
from benchmarks.case import CannotRunError, Case, Missing, Size
from benchmarks.host import Entry, Host, started

TITLE = "whole jobs"
_MODULE = "benchmarks.subjects.jobs_hosted"
_CAP_S = 1.0

# The shape of the array and of its chunks, large and small. `svd` wants a tall one, `fft` whole
# columns, and the last three one column each.
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
}


def cases(size: Size) -> Iterator[Case]:
    n_devices = field.n_devices()
    peers, missing = field.dask_cuda(_MODULE, n_devices)
    ours = _ours(n_devices)
    over_ucxx = f"{n_devices} × 1 workers × GPUs, UCXX and RMM pool"
    if n_devices > 1:
        absent = field.lacking(over_ucxx, *field.UCXX_NEEDS)
        if absent is not None:
            missing.append(absent)
        else:
            args = field.library(), n_devices, n_devices, "ucxx", field.pool_nbytes(0.2)
            ours.append(Entry(over_ucxx, f"{_MODULE}:ours", args, {"role": "variant"}))
    with started([*ours, *peers]) as (hosts, failed):
        if not hosts or hosts[0][0] is not ours[0]:
            raise CannotRunError(failed[0].reason)
        for which, chunks in enumerate(("large", "small")):
            for operation, shapes in (_TINY_SHAPES if size.tiny else _SHAPES).items():
                if which < len(shapes):
                    yield _case(operation, chunks, shapes[which], hosts, [*missing, *failed], size)


def _ours(n_devices: int) -> list[Entry]:
    """Every even share of the devices among workers, the default first."""
    shares = [n_devices, 1, 2] if n_devices % 2 == 0 else [n_devices, 1]
    return [
        Entry(
            f"{n} × {n_devices // n} workers × GPUs",
            f"{_MODULE}:ours",
            (field.library(), n_devices, n),
            {
                "role": "ours" if n == n_devices else "variant",
                "remark": "LocalDeviceCluster()" if n == n_devices else "",
            },
        )
        for n in dict.fromkeys(shares)
    ]


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
        best_of_ours=True,
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
