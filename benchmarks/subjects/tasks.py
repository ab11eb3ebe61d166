"""What the plugin costs each task: the same tasks on the same cluster, with and without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks import field
from benchmarks.case import CannotRunError, Case, Contender, Size
from benchmarks.host import Entry, Host, started

TITLE = "the plugin's cost per task"
_RATIO, _MORE_S = 1.03, 30e-6


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


def _turn(host: Host, tasks: int, annotation: int | None, plugin: bool) -> Callable[[int], float]:
    def run(count: int) -> float:
        return (
            sum(float(host.call("turn", tasks, annotation, plugin)) for _ in range(count)) / tasks
        )

    return run
