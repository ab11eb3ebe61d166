"""Rechunks of arrays on all GPUs from columns to rows: dask's P2P, and by tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks import field
from benchmarks.case import CannotRunError, Case, Size
from benchmarks.host import Entry, Host, started

TITLE = "rechunks"
_MODULE = "benchmarks.subjects.rechunk_hosted"
_CAP_S = 5.0
# The length of a side of the array, and the numbers of its blocks.
_SHAPES = ((24_000, 16), (24_000, 48), (16_000, 80), (40_000, 400))
_TASKS_AT_MOST = 100  # more pieces by tasks take minutes


def cases(size: Size) -> Iterator[Case]:
    n_devices = field.n_devices()
    peers, missing = field.dask_cuda(_MODULE, n_devices)
    ours = field.library(), n_devices
    entries = [
        Entry("P2P", f"{_MODULE}:ours", (*ours, None), {"role": "ours"}),
        Entry("P2P, one worker for all", f"{_MODULE}:ours", (*ours, 1), {"role": "variant"}),
        *peers,
    ]
    with started(entries) as (hosts, failed):
        if not hosts or hosts[0][0] is not entries[0]:
            raise CannotRunError(failed[0].reason)
        for side, n in ((32, 4),) if size.tiny else _SHAPES:
            method = {entry.name: "tasks" if entry in peers else "p2p" for entry, _ in hosts}
            contenders = [
                entry.contender(_turn(host, side, n, method[entry.name]))
                for entry, host in hosts
                if method[entry.name] == "p2p" or n <= _TASKS_AT_MOST
            ]
            if n <= _TASKS_AT_MOST:
                by_tasks = Entry("by tasks", "", (), {"role": "variant"})
                contenders.insert(1, by_tasks.contender(_turn(hosts[0][1], side, n, "tasks")))
            yield Case(
                f"{n} × {n} pieces of {side:,} × {side:,}{field.where()}",
                per="rechunk",
                single=True,
                rounds=None if size.tiny else 5,
                cap_s=_CAP_S,
                contenders=contenders,
                missing=[*missing, *failed],
            )


def _turn(host: Host, side: int, n: int, method: str) -> Callable[[int], float]:
    def run(count: int) -> float:
        return sum(float(host.call("turn", side, n, method)) for _ in range(count))

    return run
