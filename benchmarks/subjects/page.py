"""The cost of the page of the devices, for the scheduler of a busy cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.case import CannotRunError, Case, Contender, Size
from benchmarks.host import Entry, Host, started

TITLE = "the scheduler's part in the page /devices"
_DEVICES, _TASKS_PER_S = 8, 1000
# The CPU time of the scheduler's process that a page may take: 5% of a core.
_PAGE_S = 0.05


def cases(size: Size) -> Iterator[Case]:
    turn_s, settle_s = (1.0, 0.1) if size.tiny else (30.0, 5.0)
    for n_workers in (1,) if size.tiny else (1, _DEVICES):
        args = (n_workers, _DEVICES // n_workers, _TASKS_PER_S, settle_s)
        with started([Entry("page", "benchmarks.subjects.page_hosted:page", args)]) as found:
            hosts, failed = found
            if failed:
                raise CannotRunError(failed[0].reason)
            host = hosts[0][1]
            workers = f"{n_workers} SIMULATED worker{'s' if n_workers > 1 else ''}"
            yield Case(
                f"{_DEVICES} devices at {_TASKS_PER_S:,} tasks a second: {workers}",
                per="second",
                single=True,
                rounds=None if size.tiny else 3,
                contenders=[
                    Contender(
                        "a page is open",
                        _turn(host, "open", turn_s),
                        "ours",
                        remark="CPU time of the scheduler's process: 50 ms are 5% of a core",
                    ),
                    Contender(
                        "nobody looks",
                        _turn(host, "closed", turn_s),
                        "floor",
                        remark="heartbeats only",
                        at_most_more=None if size.tiny else _PAGE_S,
                    ),
                ],
            )


def _turn(host: Host, state: str, seconds: float) -> Callable[[int], float]:
    def run(count: int) -> float:
        return sum(float(host.call("cpu", state == "open", seconds)) for _ in range(count))

    return run
