"""Copies of an array from one GPU to another: bare, inside a task, and by dask."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks import field
from benchmarks.case import CannotRunError, Case, Contender, Missing, Size
from benchmarks.host import Entry, Host, started

TITLE = "from GPU to GPU"
_JUDGED = 2**30
_BANDWIDTH, _OF_UCXX, _OF_TCP = 0.85, 1.0, 0.02
MODULE = "benchmarks.subjects.transfer_hosted"


def cases(size: Size) -> Iterator[Case]:
    n_devices = 2
    field.n_devices(at_least=n_devices)
    peers, missing = field.dask_cuda(MODULE, n_devices)
    each, one = (
        Entry(f"dask_devctx, {name}", f"{MODULE}:ours", (field.library(), n_devices, n_workers))
        for name, n_workers in (("a worker for each GPU", n_devices), ("one worker", 1))
    )
    with started([each, one, *peers]) as (hosts, failed):
        if [entry for entry, _ in hosts[:2]] != [each, one]:
            raise CannotRunError(failed[0].reason)
        for nbytes in (2**10, 2**16) if size.tiny else (2**10, 2**26, 2**30, 2**33):
            yield _inside_a_task(hosts[1][1], nbytes, size)
            yield _round_trip(hosts, nbytes, size, [*missing, *failed])


def _inside_a_task(host: Host, nbytes: int, size: Size) -> Case:
    return Case(
        f"a copy of {named(nbytes)}{field.where()}",
        per="copy",
        single=True,
        rounds=None if size.tiny else 21,
        cap_s=5.0,
        target=1 / _BANDWIDTH if nbytes == _JUDGED else None,
        contenders=[
            Contender(
                "to_device in a task",
                several(host, "copy_in_task", nbytes),
                "ours",
                remark="until the copy is done",
            ),
            Contender("bare copy", several(host, "bare_copy", nbytes), remark=_bare()),
        ],
    )


def _round_trip(
    hosts: list[tuple[Entry, Host]], nbytes: int, size: Size, missing: list[Missing]
) -> Case:
    targets = {} if size.tiny else {field.UCXX: _OF_UCXX}
    if nbytes == _JUDGED:
        targets[field.TCP] = _OF_TCP
    contenders = [
        entry.contender(
            several(host, "round_trip", nbytes),
            role=("ours", "variant", "peer")[min(place, 2)],
            at_most=targets.get(entry.name),
        )
        for place, (entry, host) in enumerate(hosts)
    ]
    bare = Contender(
        "bare copy", several(hosts[1][1], "bare_copy", nbytes), "floor", remark=_bare()
    )
    name = (
        f"a task on one GPU with an input of {named(nbytes)} on another, from submission to result"
    )
    return task_case(name, 21, [*contenders, bare], missing, size)


def task_case(
    name: str, rounds: int, contenders: list[Contender], missing: list[Missing], size: Size
) -> Case:
    """Return the case of a task whose input another worker has."""
    return Case(
        f"{name}{field.where()}",
        per="task",
        single=True,
        rounds=None if size.tiny else rounds,
        cap_s=10.0,
        contenders=contenders,
        missing=missing,
    )


def several(host: Host, method: str, nbytes: int) -> Callable[[int], float]:
    def run(count: int) -> float:
        return sum(float(host.call(method, nbytes)) for _ in range(count))

    return run


def _bare() -> str:
    return "SimulatedArray.copy_to" if field.library() == "simulated" else "cudaMemcpyPeerAsync"


def named(nbytes: int) -> str:
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= scale:
            return f"{nbytes // scale} {unit}"
    return f"{nbytes} B"
