"""Arrays larger than the memory that they may take: moved to the host and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks import field
from benchmarks.case import CannotRunError, Case, Contender, Missing, Size
from benchmarks.host import Entry, Host, started

TITLE = "more than the devices' memory"
_MODULE = "benchmarks.subjects.memory_hosted"
_NOOPS = "benchmarks.subjects.tasks_hosted"
_JOBS = ("make", "sum", "transpose_sum", "standard_deviation")
_OF_BARE, _OF_DASK_CUDA, _OF_OFF = 1.2, 0.2, 1.02
_ANSWER_S = 120.0
# The limit of each device, and an array of about twice that on two devices.
_LIMIT, _SHAPE, _CHUNK = 8 * 10**9, (64_000, 64_000), (4_000, 4_000)
_TINY_LIMIT, _TINY_SHAPE, _TINY_CHUNK = 2 * 2**20, (512, 512), (64, 64)


def cases(size: Size) -> Iterator[Case]:
    n_devices = field.n_devices()
    limit = _TINY_LIMIT if size.tiny else _LIMIT
    ours = Entry(
        "LocalDeviceCluster",
        f"{_MODULE}:ours",
        (field.library(), n_devices, None, limit),
        {"role": "ours"},
    )
    peers, missing = field.dask_cuda(_MODULE, n_devices)
    peers = [replace(peer, args=(*peer.args, limit)) for peer in peers]
    with started([ours, *peers]) as (hosts, failed):
        if not hosts or hosts[0][0] is not ours:
            raise CannotRunError(failed[0].reason)
        yield _there_and_back(hosts[0][1], size)
        for job in _JOBS:
            yield _job(job, hosts, [*missing, *failed], size)
    yield from _empty_tasks(n_devices, size)


def _there_and_back(host: Host, size: Size) -> Case:
    nbytes = 2**20 if size.tiny else 2**30

    def turn(method: str) -> Callable[[int], float]:
        return lambda count: sum(float(host.call(method, nbytes)) for _ in range(count))

    return Case(
        f"an array of {nbytes // 2**20} MiB to host memory and back{field.where()}",
        per="array",
        single=True,
        rounds=None if size.tiny else 11,
        contenders=[
            Contender("as values leave and come back", turn("there_and_back"), "ours"),
            Contender(
                "bare page-locked copies",
                turn("bare"),
                "floor",
                at_most=None if size.tiny else _OF_BARE,
            ),
        ],
    )


def _job(job: str, hosts: list[tuple[Entry, Host]], missing: list[Missing], size: Size) -> Case:
    shape, chunk = (_TINY_SHAPE, _TINY_CHUNK) if size.tiny else (_SHAPE, _CHUNK)

    def turn(host: Host) -> Callable[[int], float]:
        def run(count: int) -> float:
            turns = [host.call("job", job, shape, chunk, timeout_s=_ANSWER_S) for _ in range(count)]
            return sum(map(float, turns))

        return run

    whole, part = (" × ".join(f"{n:,}" for n in one) for one in (shape, chunk))
    limit = _TINY_LIMIT if size.tiny else _LIMIT
    return Case(
        f"{job}: {whole} in {part}, {limit // 10**6:,} MB of each device{field.where()}",
        per="job",
        single=True,
        rounds=None if size.tiny else 3,
        target=None if size.tiny else _OF_DASK_CUDA,
        contenders=[entry.contender(turn(host)) for entry, host in hosts],
        missing=missing,
    )


def _empty_tasks(n_devices: int, size: Size) -> Iterator[Case]:
    tasks = 20 if size.tiny else 2000
    on, off = (
        Entry(name, f"{_NOOPS}:ours", (field.library(), n_devices, None, limit), {"role": role})
        for name, limit, role in (("with limits", "auto", "ours"), ("without", 0, "variant"))
    )
    with started([on, off]) as (hosts, failed):
        if failed:
            raise CannotRunError(failed[0].reason)

        def turn(host: Host) -> Callable[[int], float]:
            return lambda count: sum(
                float(host.call("turn", tasks, None, None)) / tasks for _ in range(count)
            )

        yield Case(
            f"{tasks} tasks that do nothing, with limits and without{field.where()}",
            per="task",
            single=True,
            rounds=None if size.tiny else 21,
            contenders=[
                on.contender(turn(hosts[0][1])),
                off.contender(turn(hosts[1][1]), at_most=None if size.tiny else _OF_OFF),
            ],
        )
