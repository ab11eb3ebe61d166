"""The workers on which a task that names a device may run; kept up to date.

Tasks that ask for the same device on the same terms share one set of addresses. dask reads this set
as their ``worker_restrictions``; an empty set restricts nothing. When workers come and go, only the
set changes, for any number of tasks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Set
from itertools import chain
from typing import Any, Final

from dask_devctx.annotations import Request
from dask_devctx.cuda import naming
from dask_devctx.cuda.naming import Name
from dask_devctx.dask_internals.scheduler import restrict, restrictions
from dask_devctx.scheduler.holdings import Cluster, Holdings, Several

# A restriction to no worker: the task waits in dask's state "no-worker" until it is lifted.
_NOBODY: Final = frozenset({"devctx://waiting-for-the-device"})
# The states of a task that waits for a worker.
_WAITING: Final = frozenset({"no-worker", "queued"})
# Devices that no task names any more are forgotten when there are more devices than this, and more
# than twice as many devices as tasks.
_KEPT: Final = 1000

Terms = tuple[bool, frozenset[str], frozenset[str], bool]
_ANYWHERE: Final[Terms] = (True, frozenset(), frozenset(), False)


class Demand:
    """A device that tasks name, or several devices at once.

    Attributes
    ----------
    holders
        The addresses of the workers that have it.
    groups
        The tasks, by the terms on which they ask for it.
    said
        The requests with which tasks name it.
    """

    __slots__ = ("groups", "holders", "name", "said")

    def __init__(self, name: Name | Several, holders: set[str]) -> None:
        self.name = name
        self.holders = holders
        self.groups: dict[Terms, Group] = {}
        self.said: list[Request] = []


class Group:
    """Tasks that name the same device on the same terms.

    Attributes
    ----------
    terms
        Whether the tasks may wait for a worker; the workers and hosts that their user gave; and
        whether these are only a preference.
    restrictions
        The addresses of the workers that the tasks may go to, empty for all. dask reads this set
        itself, not a copy.
    hosts, loose
        dask's other two restrictions, which are set where the user's own restrictions apply.
    tasks
        The tasks, by key.
    """

    __slots__ = ("demand", "hosts", "loose", "restrictions", "tasks", "terms")

    def __init__(self, demand: Demand, terms: Terms) -> None:
        self.demand = demand
        self.terms = terms
        self.restrictions: set[str] = set()
        self.hosts: frozenset[str] | None = None
        self.loose = False
        self.tasks: dict[Hashable, Any] = {}

    def restrict(self, ts: Any) -> None:
        """Give a task the restrictions of the group."""
        restrict(ts, self.restrictions, self.hosts, loose=self.loose)


class Wishes:
    """The tasks that name devices.

    Parameters
    ----------
    cluster
        The workers and their devices. Its owner calls :meth:`review` after each change.
    workers_on
        Returns the addresses of a host's workers.

    Attributes
    ----------
    groups
        The group of each task that names devices, by key.
    """

    def __init__(self, cluster: Cluster, workers_on: Callable[[str], Iterable[str]]) -> None:
        self._cluster = cluster
        self._workers_on = workers_on
        self._demands: dict[Name | Several, Demand] = {}
        self._for_several: set[Demand] = set()
        # The same, by the number of workers that have the device: none and all matter.
        self._by_count: defaultdict[int, set[Demand]] = defaultdict(set)
        self.groups: dict[Hashable, Group] = {}
        # The usual groups by what their tasks ask for.
        self._usual: dict[Request, Group] = {}

    def __len__(self) -> int:
        """Return the number of groups whose restrictions are kept up to date."""
        return sum(len(demand.groups) for demand in self._demands.values())

    # -- tasks

    def note(self, ts: Any, wanted: Request) -> None:
        """Restrict a task that names a device. It is not scheduled yet, or waits for a worker."""
        key = ts.key
        old = self.groups.get(key)
        if old is not None:
            if old.tasks[key] is ts:
                return  # its restrictions are those of its group, not its user's
            self.forget(key)
        common = _is_lasting(wanted) and not (ts.actor or any(restrictions(ts)))
        group = self._usual.get(wanted) if common else None
        if group is None:
            group = self._group(ts, _name(wanted))
            if common:
                self._usual[wanted] = group
                group.demand.said.append(wanted)
        group.tasks[key] = ts
        self.groups[key] = group
        group.restrict(ts)

    def forget(self, key: Hashable) -> None:
        """Forget a task."""
        group = self.groups.pop(key)
        del group.tasks[key]
        if not group.tasks and group.terms[1:] != _ANYWHERE[1:]:  # there may be many such groups
            del group.demand.groups[group.terms]

    def _group(self, ts: Any, name: Name | Several) -> Group:
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

    def _demand(self, name: Name | Several) -> Demand:
        if len(self._demands) > _KEPT and len(self._demands) > 2 * len(self.groups):
            self._forget_unnamed(list(self._demands.values()))
        demand = self._demands[name] = Demand(name, self._cluster.present.holders(name))
        self._by_count[len(demand.holders)].add(demand)
        if isinstance(name, Several):
            self._for_several.add(demand)
        return demand

    def _forget_unnamed(self, demands: Iterable[Demand]) -> None:
        for demand in demands:
            if not any(group.tasks for group in demand.groups.values()):
                del self._demands[demand.name]
                self._by_count[len(demand.holders)].discard(demand)
                self._for_several.discard(demand)
                for said in demand.said:
                    del self._usual[said]

    def gone(self) -> Iterator[tuple[Any, str]]:
        """Yield the tasks for a device whose last worker left for good, and this worker."""
        for demand in self._by_count[0]:
            address = self._cluster.had(demand.name)
            if address is not None:
                for group in demand.groups.values():
                    yield from ((ts, address) for ts in group.tasks.values())

    def last_worker(self, key: Hashable) -> str | None:
        """Return the last worker with a task's device if it left for good and no worker has it."""
        group = self.groups.get(key)
        if group is None or group.demand.holders:
            return None
        return self._cluster.had(group.demand.name)

    def is_for_nobody(self, key: Hashable) -> bool:
        """Return whether a task goes to a worker that fails it, since no worker has its device."""
        group = self.groups.get(key)
        if group is None or group.demand.holders or not self._cluster.present.using:
            return False
        return group.restrictions.isdisjoint(_NOBODY)

    # -- workers

    def review(
        self, address: str, before: Holdings | None, now: Holdings | None, joined: int = 0
    ) -> list[Any]:
        """Update the restrictions of tasks after a change of one worker.

        Parameters
        ----------
        address
            The worker's address.
        before, now
            Its devices before the change and now.
        joined
            1 if the worker has just joined, -1 if it has just left.

        Returns
        -------
        list
            The tasks that wait for a worker and may now go to other workers than before.
        """
        there = len(self._cluster.workers)
        self._forget_unnamed(list(self._by_count[0]))
        touched = set(self._by_count[there - joined])
        names = chain.from_iterable(h.names() for h in (before, now) if h is not None)
        named = (demand for name in names if (demand := self._demands.get(name)) is not None)
        for demand in chain(named, tuple(self._for_several)):
            has = now is not None and now.have(demand.name)
            if has is not (address in demand.holders):
                self._by_count[len(demand.holders)].discard(demand)
                (demand.holders.add if has else demand.holders.discard)(address)
                self._by_count[len(demand.holders)].add(demand)
                touched.add(demand)
        # A device that all workers had or have now, or that no worker has: all its tasks change.
        return self._lead_all(touched | self._by_count[there] | self._by_count[0])

    def review_absent(self) -> list[Any]:
        """Update the restrictions for devices that no worker has, after the wait for workers."""
        return self._lead_all(self._by_count[0])

    def _lead_all(self, demands: Iterable[Demand]) -> list[Any]:
        changed = [g for demand in demands for g in demand.groups.values() if self._lead(g)]
        tasks = (ts for group in changed for ts in group.tasks.values())
        return [ts for ts in tasks if ts.state in _WAITING]

    def _lead(self, group: Group) -> bool:
        """Bring a group's restrictions up to date; return whether they have changed."""
        workers, hosts, loose = self._restrictions(group)
        others = hosts != group.hosts or loose is not group.loose
        if workers == group.restrictions and not others:
            return False
        group.restrictions.clear()
        group.restrictions.update(workers)
        if others:  # only for tasks that their user restricted
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
            # A worker that has devices gives the best error about one that is not there.
            targets = cluster.present.using or cluster.present.by_worker.keys()
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


def _is_lasting(wanted: Request) -> bool:
    """Return whether a request always means the same, and can be looked up."""
    return all(one.__class__ in (int, str) for one in wanted.names)


def _name(wanted: Request) -> Name | Several:
    names = tuple(map(name_of, wanted.names))
    unknown = [name for name in names if name.kind == "unknown"]
    if unknown or (len(names) == 1 and wanted.nbytes is None):
        return (unknown or names)[0]
    return Several(names, wanted.number, wanted.nbytes or 0)


def name_of(wanted: object) -> Name:
    """Return the name that one device is asked for by; of kind "unknown" if it is no name."""
    try:
        return naming.read(wanted)
    except Exception:  # no name, or a user's object that raises: the worker reports it
        return Name("unknown")
