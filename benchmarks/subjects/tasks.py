"""What the plugin costs each task: the same tasks on the same cluster, with and without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks import field
from benchmarks.case import CannotRunError, Case, Contender, Size
from benchmarks.host import Entry, Host, started

TITLE = "the plugin's cost per task"
_RATIO, _MORE_S = 1.03, 30e-6
# What a large input that has not to move may add to that.
_INPUT_MORE_S = 3e-6
# By the function that makes it: what all tasks are given, the size, and where they run.
_INPUTS = {
    "tuples": ("a list of {:,} tuples", 10**6, None),
    "cube": ("a nested list of {:,} numbers", 10**6, None),
    "frame": ("a DataFrame of {:,} rows", 10**6, None),
    "arrays": ("a dictionary of {:,} arrays there", 10**4, 0),
}


def cases(size: Size) -> Iterator[Case]:
    n_devices = field.n_devices()
    tasks = 20 if size.tiny else 2000
    entry = Entry("noops", "benchmarks.subjects.tasks_hosted:noops", (n_devices,))
    with started([entry]) as (hosts, failed):
        if failed:
            raise CannotRunError(failed[0].reason)
        host = hosts[0][1]
        for annotation in (None, min(1, n_devices - 1)):
            said = "not annotated" if annotation is None else f"device={annotation}"
            yield Case(
                f"{tasks} tasks that do nothing, {said}{field.where()}",
                per="task",
                single=True,
                rounds=None if size.tiny else 21,
                target=None if size.tiny else _RATIO,
                contenders=[
                    Contender("with the plugin", _turn(host, tasks, annotation, True), "ours"),
                    Contender(
                        "without it",
                        _turn(host, tasks, annotation, False),
                        remark="the same cluster",
                        at_most_more=None if size.tiny else _MORE_S,
                    ),
                ],
            )
        for kind, (given, n, annotation) in _INPUTS.items():
            n = n // 1000 if size.tiny else n
            yield Case(
                f"{tasks} tasks that are given {given.format(n)}{field.where()}",
                per="task",
                single=True,
                rounds=None if size.tiny else 11,
                contenders=[
                    Contender(
                        "with the plugin", _turn(host, tasks, annotation, True, kind, n), "ours"
                    ),
                    Contender(
                        "without it",
                        _turn(host, tasks, annotation, False, kind, n),
                        remark="the same cluster",
                        at_most_more=None if size.tiny else _MORE_S + _INPUT_MORE_S,
                    ),
                ],
            )


def _turn(
    host: Host, tasks: int, annotation: int | None, plugin: bool, *given: str | int
) -> Callable[[int], float]:
    def run(count: int) -> float:
        turns = [host.call("turn", tasks, annotation, plugin, *given) for _ in range(count)]
        return sum(map(float, turns)) / tasks

    return run
