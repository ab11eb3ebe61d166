"""The workers on which a task that names a device may run; kept up to date.

Tasks that ask for the same device on the same terms share one set of addresses. dask reads this set
as their ``worker_restrictions``; an empty set restricts nothing. When workers come and go, only the
set changes, for any number of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from dask_devctx.annotations import Request
from dask_devctx.cuda import naming
from dask_devctx.cuda.naming import Name
from dask_devctx.dask_internals.scheduler import restrict, restrictions
from dask_devctx.scheduler.cluster import Cluster, Wanted

# A restriction to no worker: the task waits in dask's state "no-worker" until it is lifted.
_NOBODY: Final = frozenset({"devctx://waiting-for-the-device"})
# The states of a task that waits for a worker.
_WAITING: Final = frozenset({"no-worker", "queued"})
# Groups without tasks are kept for the next task, unless there are more groups than this.
_KEPT: Final = 1000

# The devices; whether the tasks may wait for a worker; the workers and hosts that their user gave;
# and whether these are only a preference.
Terms = tuple[Wanted, bool, frozenset[str], frozenset[str], bool]


@dataclass(eq=False, slots=True)
class Group:
    """Tasks that name the same device on the same terms, by key.

    ``workers``, ``hosts`` and ``loose`` are dask's restrictions of all of them; dask reads the set
    of workers itself, not a copy.
    """

    terms: Terms
    workers: set[str] = field(default_factory=set)
    hosts: frozenset[str] | None = None
    loose: bool = False
    tasks: dict[Hashable, Any] = field(default_factory=dict)


class Restrictions:
    """The restrictions of tasks that name devices; ``groups`` has the group of each, by key.

    Call :meth:`review` after each change of the cluster. ``workers_on`` returns the addresses of a
    host's workers.
    """

    def __init__(self, cluster: Cluster, workers_on: Callable[[str], Iterable[str]]) -> None:
        self._cluster = cluster
        self._workers_on = workers_on
        self._by_terms: dict[Terms, Group] = {}
        self.groups: dict[Hashable, Group] = {}

    def note(self, ts: Any, asked: Request) -> None:
        """Restrict a task that names a device. It is not scheduled yet, or waits for a worker."""
        key = ts.key
        old = self.groups.get(key)
        if old is not None:
            if old.tasks[key] is ts:
                return  # its restrictions are those of its group, not its user's
            self.forget(key)
        always_same = all(one.__class__ in (int, str) for one in asked.names)
        wanted = _wanted(asked) if always_same else _wanted.__wrapped__(asked)
        unknown = any(name.kind == "unknown" for name in wanted.names)
        workers, hosts, loose = restrictions(ts)
        terms = wanted, not unknown, frozenset(workers or ()), frozenset(hosts or ()), loose
        group = self._by_terms.get(terms)
        if group is None:
            group = self._by_terms[terms] = Group(terms)
            self._update(group)
        group.tasks[key] = ts
        self.groups[key] = group
        restrict(ts, group.workers, group.hosts, loose=group.loose)

    def forget(self, key: Hashable) -> None:
        """Forget a task."""
        group = self.groups.pop(key)
        del group.tasks[key]
        if not group.tasks and (any(group.terms[2:]) or len(self._by_terms) > _KEPT):
            del self._by_terms[group.terms]

    def review(self) -> list[Any]:
        """Update the restrictions; return the tasks that wait and may go to other workers now."""
        for terms in [terms for terms, group in self._by_terms.items() if not group.tasks]:
            del self._by_terms[terms]
        changed = [group for group in self._by_terms.values() if self._update(group)]
        tasks = (ts for group in changed for ts in group.tasks.values())
        return [ts for ts in tasks if ts.state in _WAITING]

    def _update(self, group: Group) -> bool:
        """Bring a group's restrictions up to date; return whether they have changed."""
        workers, hosts, loose = self._restrictions(group.terms)
        others = hosts != group.hosts or loose is not group.loose
        if workers == group.workers and not others:
            return False
        group.workers.clear()
        group.workers.update(workers)
        if others:  # only for tasks that their user restricted
            group.hosts, group.loose = hosts, loose
            for ts in group.tasks.values():
                restrict(ts, group.workers, hosts, loose=loose)
        return True

    def _restrictions(self, terms: Terms) -> tuple[Set[str], frozenset[str] | None, bool]:
        cluster = self._cluster
        wanted, may_wait, workers, hosts, loose = terms
        targets: Set[str] = cluster.having(wanted)
        if not targets:
            if may_wait and (
                cluster.unheard or any(had.have(wanted) for had, _ in cluster.left.values())
            ):
                return _NOBODY, None, False
            # A worker that has devices gives the best error about one that is not there.
            targets = cluster.slots.keys() or cluster.present.keys()
        if targets and len(targets) < len(cluster.workers):
            if not workers and not hosts:
                return targets, None, False
            allowed = workers.union(*(self._workers_on(host) for host in hosts))
            both = allowed & targets
            if both or loose:
                # A preference that cannot be met is ignored. dask's own loose restrictions would
                # send the task to workers that do not have the device.
                return both or targets, None, False
            # The user restricts the task to workers without the device: it fails there.
        return workers, hosts or None, loose


@lru_cache(maxsize=4096)
def _wanted(asked: Request) -> Wanted:
    return Wanted(tuple(map(name_of, asked.names)), asked.number, asked.nbytes or 0)


def name_of(wanted: object) -> Name:
    """Return the name that one device is asked for by; of kind "unknown" if it is no name."""
    try:
        return naming.read(wanted)
    except Exception:  # no name, or a user's object that raises: the worker reports it
        return Name("unknown")
