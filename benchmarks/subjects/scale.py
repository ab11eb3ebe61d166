"""The cost of leading tasks to devices, for the scheduler of a large cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.case import CannotRunError, Case, Contender, Size
from benchmarks.host import Entry, Host, started

TITLE = "the scheduler's part in large clusters"
_TASK_S, _WORKER_S, _AWAITED = 5e-6, 10e-3, 1.5
# The timed events by their methods: the event, its unit, and the target in seconds per unit.
_EVENTS = {
    "submit": ("a task is submitted", "task", _TASK_S),
    "join": ("a worker joins", "worker", _WORKER_S),
    "leave": ("a worker leaves", "worker", _WORKER_S),
}


def cases(size: Size) -> Iterator[Case]:
    n_tasks = 50 if size.tiny else 10_000
    for n_workers in (2,) if size.tiny else (8, 1000):
        for naming in ("ordinals", "UUIDs"):
            args = (n_workers, n_tasks, naming)
            entry = Entry("scale", "benchmarks.subjects.scale_hosted:scale", args)
            with started([entry]) as (hosts, failed):
                if failed:
                    raise CannotRunError(failed[0].reason)
                yield from _cases(hosts[0][1], size, f"{n_workers} workers, {n_tasks} {naming}")


def _cases(host: Host, size: Size, named: str) -> Iterator[Case]:
    for method, (event, per, more_s) in _EVENTS.items():
        yield Case(
            f"{event}: {named}, SIMULATED workers",
            per=per,
            single=True,
            rounds=None if size.tiny else 7,
            contenders=[
                Contender("with the routing", _turn(host, method, True), "ours"),
                Contender(
                    "a plugin that does nothing",
                    _turn(host, method, False),
                    "floor",
                    remark="time within the plugin's hooks",
                    at_most_more=None if size.tiny else more_s,
                ),
            ],
        )
    yield Case(
        f"a worker joins that all of the tasks wait for: {named}, SIMULATED workers",
        per="worker",
        single=True,
        rounds=None if size.tiny else 5,
        contenders=[
            Contender("with the routing", _turn(host, "awaited", True), "ours"),
            Contender(
                "dask's own restriction to the worker",
                _turn(host, "awaited", False),
                remark="the scheduler's whole time",
                at_most=None if size.tiny else _AWAITED,
            ),
        ],
    )


def _turn(host: Host, method: str, routing: bool) -> Callable[[int], float]:
    def run(count: int) -> float:
        return sum(float(host.call(method, routing)) for _ in range(count))

    return run
