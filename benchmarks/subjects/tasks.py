"""The cost of a task that does nothing: with and without the plugin, and beside dask-cuda."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks import field
from benchmarks.case import CannotRunError, Case, Contender, Size
from benchmarks.host import Entry, Host, started

TITLE = "the cost of a task that does nothing"
_RATIO, _MORE_S, _OF_DASK_CUDA = 1.03, 30e-6, 0.55
_MODULE = "benchmarks.subjects.tasks_hosted"
# The most seconds that a large input may add if it does not move.
_INPUT_MORE_S = 3e-6
# The inputs by the function that makes each: a description, the size, and the tasks' device.
_INPUTS = {
    "tuples": ("a list of {:,} tuples", 10**6, None),
    "cube": ("a nested list of {:,} numbers", 10**6, None),
    "frame": ("a DataFrame of {:,} rows", 10**6, None),
    "arrays": ("a dictionary of {:,} arrays there", 10**4, 0),
}


def cases(size: Size) -> Iterator[Case]:
    n_devices = field.n_devices()
    tasks = 20 if size.tiny else 2000
    yield from _beside_dask_cuda(n_devices, tasks, size)
    entry = Entry("noops", f"{_MODULE}:noops", (n_devices,))
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


def _beside_dask_cuda(n_devices: int, tasks: int, size: Size) -> Iterator[Case]:
    """The same tasks on whole clusters with their default settings."""
    peers, missing = field.dask_cuda(_MODULE, n_devices)
    ours = Entry("ours", f"{_MODULE}:ours", (field.library(), n_devices, None), {"role": "ours"})
    with started([ours, *peers]) as (hosts, failed):
        if not hosts or hosts[0][0] is not ours:
            raise CannotRunError(failed[0].reason)
        yield Case(
            f"{tasks} tasks that do nothing, {n_devices} GPUs{field.where()}",
            per="task",
            single=True,
            rounds=None if size.tiny else 11,
            target=None if size.tiny else _OF_DASK_CUDA,
            contenders=[entry.contender(_turn(host, tasks, None, None)) for entry, host in hosts],
            missing=[*missing, *failed],
        )


def _turn(
    host: Host, tasks: int, annotation: int | None, plugin: bool | None, *given: str | int
) -> Callable[[int], float]:
    def run(count: int) -> float:
        turns = [host.call("turn", tasks, annotation, plugin, *given) for _ in range(count)]
        return sum(map(float, turns)) / tasks

    return run
