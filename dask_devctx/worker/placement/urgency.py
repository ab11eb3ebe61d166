"""The order of the tasks that wait for a device."""

from __future__ import annotations

from typing import Any


def urgency_of(ts: Any) -> tuple[Any, ...]:
    """Return a task's priority in the queue of its device, then its prefix; the smallest is first.

    It is dask's own priority, with one change. Among tasks of the same user priority, tasks that
    use up an input that no other task waits for run first: the device holds less data when they are
    done. Without this, a device fills up with the results of many tasks before the first is used.
    """
    by_user, *others = ts.priority
    for dep in ts.dependencies:
        if len(dep.dependents) == 1:
            return (by_user, 0, *others, ts.prefix)
    return (by_user, 1, *others, ts.prefix)
