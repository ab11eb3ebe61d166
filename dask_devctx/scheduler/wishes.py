"""Which workers a task may go to that names a device: dask's restrictions, kept up to date.

Tasks that ask for the same device on the same terms share one set of addresses, which dask reads
as their ``worker_restrictions``; an empty set restricts nothing. Where workers come and go, the set
changes and the tasks are not touched, however many they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Set
from itertools import chain
from typing import Any, Final

from dask_devctx.cuda import naming
from dask_devctx.cuda.naming import Name
from dask_devctx.dask_internals.scheduler import restrict, restrictions
from dask_devctx.scheduler.holdings import Cluster, Holdings

# A restriction to no worker: the task waits in "no-worker", as dask's own do, until it is lifted.
_NOBODY: Final = frozenset({"devctx://waiting-for-the-device"})
# What a task's state is called where it waits for a worker.
_WAITING: Final = frozenset({"no-worker", "queued"})
# Devices that no task names any more are forgotten when there are more than this and twice as many
# as are named.
_KEPT: Final = 1000

Terms = tuple[bool, frozenset[str], frozenset[str], bool]
_ANYWHERE: Final[Terms] = (True, frozenset(), frozenset(), False)


class Demand:
    """A device that tasks name.

    Attributes
    ----------
    holders
        The addresses of the workers that have it.
    groups
        The tasks, by the terms on which they ask for it.
    said
        The ways in which they do, where that is a number or a text.
    """

    __slots__ = ("groups", "holders", "name", "said")

    def __init__(self, name: Name, holders: set[str]) -> None:
        self.name = name
        self.holders = holders
        self.groups: dict[Terms, Group] = {}
        self.said: list[tuple[type, object]] = []


class Group:
    """Tasks that name the same device on the same terms.

    Attributes
    ----------
    terms
        Whether they may wait for a worker; the workers and hosts that their user gave; and whether
        these are a preference only.
    restrictions
        The addresses of the workers that they may go to, empty for all: dask reads this very set.
    hosts, loose
        dask's other two restrictions, which apply where the user's own do.
    tasks
        The tasks, by key.
    waiting
        The keys of those that wait for a worker.
    """

    __slots__ = ("demand", "hosts", "loose", "restrictions", "tasks", "terms", "waiting")

    def __init__(self, demand: Demand, terms: Terms) -> None:
        self.demand = demand
        self.terms = terms
        self.restrictions: set[str] = set()
        self.hosts: frozenset[str] | None = None
        self.loose = False
        self.tasks: dict[Hashable, Any] = {}
        self.waiting: dict[Hashable, None] = {}

    def restrict(self, ts: Any) -> None:
        """Make a task one that goes where the group goes."""
        restrict(ts, self.restrictions, self.hosts, loose=self.loose)


class Wishes:
    """The tasks that name devices.

    Parameters
    ----------
    cluster
        Who has which device. Whoever changes it says so by :meth:`review`.
    workers_on
        Returns the addresses of a host's workers.
    """

    def __init__(self, cluster: Cluster, workers_on: Callable[[str], Iterable[str]]) -> None:
        self._cluster = cluster
        self._workers_on = workers_on
        self._demands: dict[Name, Demand] = {}
        # The same by how many workers have the device: none and all are what matters.
        self._by_count: defaultdict[int, set[Demand]] = defaultdict(set)
        # Tasks by their keys, and what most of them say, by what they say.
        self._groups: dict[Hashable, Group] = {}
        self._usual: dict[tuple[type, object], Group] = {}

    def __len__(self) -> int:
        """Return for how many devices and terms the restrictions are kept up to date."""
        return sum(len(demand.groups) for demand in self._demands.values())

    # -- tasks

    def note(self, ts: Any, wanted: object) -> None:
        """Restrict a task that names a device; it is not scheduled yet, or waits for a worker."""
        key = ts.key
        old = self._groups.get(key)
        if old is not None:
            if old.tasks[key] is ts:
                return  # its restrictions are not its user's
            self.forget(key)
        said = wanted.__class__, wanted
        common = said[0] in (int, str) and not (ts.actor or any(restrictions(ts)))
        group = self._usual.get(said) if common else None
        if group is None:
            group = self._group(ts, _name(wanted))
            if common:
                self._usual[said] = group
                group.demand.said.append(said)
        group.tasks[key] = ts
        self._groups[key] = group
        if ts.state in _WAITING:
            group.waiting[key] = None
        group.restrict(ts)

    def moved(self, key: Hashable, state: str) -> None:
        """Follow a task, of which dask says where it is now."""
        group = self._groups.get(key)
        if group is None:
            return
        if state in _WAITING:
            group.waiting[key] = None
            return
        group.waiting.pop(key, None)
        if state == "forgotten":
            self.forget(key)

    def forget(self, key: Hashable) -> None:
        """Follow a task no longer."""
        group = self._groups.pop(key)
        del group.tasks[key]
        group.waiting.pop(key, None)
        if not group.tasks and group.terms[1:] != _ANYWHERE[1:]:  # there may be many of its kind
            del group.demand.groups[group.terms]

    def _group(self, ts: Any, name: Name) -> Group:
        demand = self._demands.get(name)
        if demand is None:
            demand = self._demand(name)
        may_wait = not ts.actor and name.kind != "unknown"  # dask lets no actor wait
        workers, hosts, loose = restrictions(ts)
        terms = _ANYWHERE
        if workers or hosts or loose or not may_wait:
            terms = (may_wait, frozenset(workers or ()), frozenset(hosts or ()), loose)
        group = demand.groups.get(terms)
        if group is None:
            group = demand.groups[terms] = Group(demand, terms)
            self._lead(group)
        return group

    def _demand(self, name: Name) -> Demand:
        if len(self._demands) > _KEPT and len(self._demands) > 2 * len(self._groups):
            self._forget_unnamed(list(self._demands.values()))
        demand = self._demands[name] = Demand(name, self._cluster.present.holders(name))
        self._by_count[len(demand.holders)].add(demand)
        return demand

    def _forget_unnamed(self, demands: Iterable[Demand]) -> None:
        for demand in demands:
            if not any(group.tasks for group in demand.groups.values()):
                del self._demands[demand.name]
                self._by_count[len(demand.holders)].discard(demand)
                for said in demand.said:
                    del self._usual[said]

    # -- workers

    def review(
        self, address: str, before: Holdings | None, now: Holdings | None, joined: int = 0
    ) -> list[Any]:
        """Lead tasks according to what has changed with one worker.

        Parameters
        ----------
        address
            The worker's.
        before, now
            What it had, and what it has.
        joined
            1 where it has just joined, -1 where it has just left.

        Returns
        -------
        list
            The tasks that wait for a worker and may now go to others than before.
        """
        there = len(self._cluster.workers)
        self._forget_unnamed(list(self._by_count[0]))
        touched = set(self._by_count[there - joined])
        names = chain.from_iterable(h.names() for h in (before, now) if h is not None)
        for name in names:
            demand = self._demands.get(name)
            if demand is None:
                continue
            has = now is not None and now.have(name)
            if has is not (address in demand.holders):
                self._by_count[len(demand.holders)].discard(demand)
                (demand.holders.add if has else demand.holders.discard)(address)
                self._by_count[len(demand.holders)].add(demand)
                touched.add(demand)
        # Devices that everybody had or has now, or that nobody has, concern all who name them.
        return self._lead_all(touched | self._by_count[there] | self._by_count[0])

    def review_absent(self) -> list[Any]:
        """Do so where workers are not waited for any longer."""
        return self._lead_all(self._by_count[0])

    def _lead_all(self, demands: Iterable[Demand]) -> list[Any]:
        changed = [g for demand in demands for g in demand.groups.values() if self._lead(g)]
        return [group.tasks[key] for group in changed for key in group.waiting]

    def _lead(self, group: Group) -> bool:
        """Bring a group's restrictions up to date; return whether they have changed."""
        workers, hosts, loose = self._restrictions(group)
        others = hosts != group.hosts or loose is not group.loose
        if workers == group.restrictions and not others:
            return False
        group.restrictions.clear()
        group.restrictions.update(workers)
        if others:  # of tasks alone whose user restricted them
            group.hosts, group.loose = hosts, loose
            for ts in group.tasks.values():
                group.restrict(ts)
        return True

    def _restrictions(self, group: Group) -> tuple[Set[str], frozenset[str] | None, bool]:
        cluster, holders = self._cluster, group.demand.holders
        may_wait, workers, hosts, loose = group.terms
        targets: Set[str] = holders
        if not holders:
            if may_wait and (cluster.unheard or cluster.left.has(group.demand.name)):
                return _NOBODY, None, False
            # Whoever has devices at all tells best that this one is not there.
            targets = cluster.present.using or cluster.present.by_worker.keys()
        if targets and len(targets) < len(cluster.workers):
            if not workers and not hosts:
                return targets, None, False
            allowed = workers.union(*(self._workers_on(host) for host in hosts))
            both = allowed & targets
            if both or loose:
                # A preference that cannot be had is none. dask's own way to see it would send the
                # task to workers that do not have the device.
                return both or targets, None, False
            # else the user sends it where the device is not: let it fail there
        return workers, hosts or None, loose


def _name(wanted: object) -> Name:
    try:
        return naming.read(wanted)
    except Exception:  # no name at all, or a user's object that cannot be asked: the worker says so
        return Name("unknown")
