"""Which values of a device may be spilled, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import attrgetter, itemgetter
from typing import Any, Final

from distributed import Worker

from dask_devctx.worker.values.accounting import Account, living
from dask_devctx.worker.values.value import Value

# The tasks in these states need their inputs soon.
_NEED_INPUTS: Final = frozenset({"waiting", "ready", "constrained", "executing", "resumed"})


def in_order(account: Account, next_use: Callable[[Hashable], Any]) -> list[Value]:
    """Return the values of a device that may be spilled, in order.

    First those that no known task needs, the least recently used first; then those whose task
    runs last; small ones after all. Values that share memory leave or stay together.
    """
    blocks = account.blocks.items()
    shared = {memory: [*living(entries)] for memory, entries in blocks if len(entries) > 1}
    stays = {memory for memory, values in shared.items() if not all(map(may_leave, values))}
    idle: list[tuple[Any, Value]] = []
    needed, last = idle[:], idle[:]
    for value in sorted(account.values(), key=attrgetter("touched")):
        under = value.entry.memories
        if may_leave(value) and stays.isdisjoint(under):
            use = next_use(value.key)
            rest = last if sum(memory.nbytes for memory in under) < account.small else idle
            (rest if use is None else needed).append((use, value))
    needed.sort(key=itemgetter(0), reverse=True)
    found: dict[Value, None] = {}
    for _, value in (*idle, *needed, *last):
        if value not in found:
            found[value] = None
            for memory in shared.keys() & value.entry.memories:
                found.update(dict.fromkeys(shared[memory]))
    return [*found]


def may_leave(value: Value) -> bool:
    """Return whether a value may be spilled now."""
    return not (value.pins or value.stays or value.is_away)


def next_use(worker: Worker, key: Hashable) -> Any:
    """Return the priority of the next task on a worker that needs a key's value, or None."""
    ts = worker.state.tasks.get(key)
    if ts is None or not ts.dependents:
        return None
    of_those = list(ts.dependents)  # at once: the event loop changes it
    priorities = (dep.priority for dep in of_those if dep.state in _NEED_INPUTS)
    return min((one for one in priorities if one is not None), default=None)
