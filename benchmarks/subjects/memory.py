"""Arrays larger than the memory that they may take: moved to the host and back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from benchmarks import field
from benchmarks.case import CannotRunError, Case, Contender, Missing, Size
from benchmarks.host import Entry, Host, started

TITLE = "more than the devices' memory"
_MODULE = "benchmarks.subjects.memory_hosted"
_NOOPS = "benchmarks.subjects.tasks_hosted"
_OF_BARE, _OF_OFF = 1.2, 1.02
_ANSWER_S = 120.0
_CAP_S = 40.0


class _Limited(NamedTuple):
    """A limit in bytes for each device, and jobs on arrays of a multiple of that.

    Each job has the method of its host, its shape and that of its chunks. ``of_dask_cuda`` is the
    most that ours may take of dask-cuda's time.
    """

    limit: int
    of_dask_cuda: float
    jobs: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]]


_ON_ONE = ("make", "sum", "transpose_sum", "standard_deviation")
# About twice what two devices may hold, and more than four times that.
_FULL = (
    _Limited(8 * 10**9, 0.2, dict.fromkeys(_ON_ONE, ("job", (64_000, 64_000), (4_000, 4_000)))),
    _Limited(
        10**9,
        0.3,
        {
            "sum": ("turn", (32_000, 32_000), (4_000, 4_000)),
            "dot": ("turn", (20_000, 20_000), (2_000, 2_000)),
            "inference": ("turn", (1_000_000, 1_000), (25_000, 1_000)),
        },
    ),
)
_TINY = (
    _Limited(2 * 2**20, 0.2, dict.fromkeys(_ON_ONE, ("job", (512, 512), (64, 64)))),
    _Limited(
        2**20,
        0.3,
        {
            "sum": ("turn", (512, 512), (64, 64)),
            "dot": ("turn", (512, 512), (128, 128)),
            "inference": ("turn", (16_384, 32), (512, 32)),
        },
    ),
)


def cases(size: Size) -> Iterator[Case]:
    n_devices = field.n_devices()
    limits = _TINY if size.tiny else _FULL
    nbytes, tasks = (2**20, 20) if size.tiny else (2**30, 2000)
    back = f"an array of {nbytes // 2**20} MiB to host memory and back{field.where()}"
    empty = f"{tasks} empty tasks, with limits and without{field.where()}"
    for limited in limits:  # clusters start for the cases that are wanted
        names = [_name(limited, job) for job in limited.jobs]
        if limited is limits[0]:
            names.append(back)
        if any(map(size.wants, names)):
            with _clusters(n_devices, limited) as (hosts, missing):
                if limited is limits[0]:
                    yield _there_and_back(back, nbytes, hosts[0][1], size)
                yield from _jobs(limited, hosts, missing, size)
    if size.wants(empty):
        yield from _empty_tasks(empty, tasks, n_devices, size)


def _name(limited: _Limited, job: str) -> str:
    whole, part = (" × ".join(f"{n:,}" for n in one) for one in limited.jobs[job][1:])
    return f"{job}, {limited.limit // 10**6:,} MB a device: {whole} in {part}{field.where()}"


@contextlib.contextmanager
def _clusters(
    n_devices: int, limited: _Limited
) -> Iterator[tuple[list[tuple[Entry, Host]], list[Missing]]]:
    """Start ours and its peers with the limit; also return who is missing."""
    args = (field.library(), n_devices, None, limited.limit)
    ours = Entry("LocalDeviceCluster", f"{_MODULE}:ours", args, {"role": "ours"})
    peers, missing = field.dask_cuda(_MODULE, n_devices)
    peers = [replace(peer, args=(*peer.args, limited.limit)) for peer in peers]
    with started([ours, *peers]) as (hosts, failed):
        if not hosts or hosts[0][0] is not ours:
            raise CannotRunError(failed[0].reason)
        yield hosts, [*missing, *failed]


def _there_and_back(name: str, nbytes: int, host: Host, size: Size) -> Case:
    return Case(
        name,
        per="array",
        single=True,
        rounds=None if size.tiny else 11,
        contenders=[
            Contender(
                "as values leave and come back", _turn(host, "there_and_back", nbytes), "ours"
            ),
            Contender(
                "bare page-locked copies",
                _turn(host, "bare", nbytes),
                "floor",
                at_most=None if size.tiny else _OF_BARE,
            ),
        ],
    )


def _jobs(
    limited: _Limited, hosts: list[tuple[Entry, Host]], missing: list[Missing], size: Size
) -> Iterator[Case]:
    for job, (method, *shapes) in limited.jobs.items():
        yield Case(
            _name(limited, job),
            per="job",
            single=True,
            rounds=None if size.tiny else 3,
            target=None if size.tiny else limited.of_dask_cuda,
            cap_s=_CAP_S,
            contenders=[
                entry.contender(_turn(host, method, job, *shapes)) for entry, host in hosts
            ],
            missing=missing,
        )


def _turn(host: Host, method: str, *args: object) -> Callable[[int], float]:
    def run(count: int) -> float:
        turns = [host.call(method, *args, timeout_s=_ANSWER_S) for _ in range(count)]
        return sum(map(float, turns))

    return run


def _empty_tasks(name: str, tasks: int, n_devices: int, size: Size) -> Iterator[Case]:
    on, off = (
        Entry(which, f"{_NOOPS}:ours", (field.library(), n_devices, None, limit), {"role": role})
        for which, limit, role in (("with limits", "auto", "ours"), ("without", 0, "variant"))
    )
    with started([on, off]) as (hosts, failed):
        if failed:
            raise CannotRunError(failed[0].reason)

        def turn(host: Host) -> Callable[[int], float]:
            return lambda count: sum(
                float(host.call("turn", tasks, None, None)) / tasks for _ in range(count)
            )

        yield Case(
            name,
            per="task",
            single=True,
            rounds=None if size.tiny else 21,
            contenders=[
                on.contender(turn(hosts[0][1])),
                off.contender(turn(hosts[1][1]), at_most=None if size.tiny else _OF_OFF),
            ],
        )
