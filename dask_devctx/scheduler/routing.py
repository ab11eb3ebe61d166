"""The scheduler's half: a task that names a device goes to a worker that has it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed import Scheduler, SchedulerPlugin
from distributed.metrics import time

from dask_devctx import config
from dask_devctx.annotations import ANNOTATION, carried_device, requested_device
from dask_devctx.cuda import naming
from dask_devctx.cuda.inventory import DeviceInfo, Inventory
from dask_devctx.cuda.naming import AUTO
from dask_devctx.dask_internals import check_scheduler
from dask_devctx.dask_internals import scheduler as internals
from dask_devctx.errors import DeviceNotFoundError, DevicesInUseError, LockDirectoryError
from dask_devctx.scheduler import suspects

logger = logging.getLogger(__name__)

# What workers call on the scheduler.
ANNOUNCE = "devctx_announce"
WITHDRAW = "devctx_withdraw"
REFUSE = "devctx_refuse"

# Why a worker leaves that could not take its devices.
_REFUSALS: Mapping[str, Callable[..., Exception]] = {
    kind.__name__: kind for kind in (DevicesInUseError, LockDirectoryError)
}

# A restriction to no worker: the task waits in "no-worker", as dask's own do, until it is lifted.
_NOBODY = frozenset({"devctx://waiting-for-the-device"})


@dataclass(frozen=True)
class Holdings:
    """What one worker said of its devices.

    Parameters
    ----------
    seen
        The devices that its process sees: ordinals are positions in it.
    used
        The UUIDs of those that it uses.
    """

    seen: Inventory
    used: frozenset[str]

    def have(self, wanted: object) -> bool:
        """Return whether the worker uses the device; the one that is current is any worker's.

        Raises
        ------
        TypeError
            It is no way to name a device.
        """
        try:
            info = naming.find(wanted, self.seen)
        except DeviceNotFoundError:
            return False
        return info is None or info.uuid in self.used


@dataclass(eq=False)
class _Wish:
    """What a task asks for, and the restrictions that its user gave it."""

    wanted: object
    workers: set[str] | None
    hosts: set[str] | None


@dataclass
class _Cluster:
    """Which worker has what, and whom to wait for. Addresses are the scheduler's."""

    grace_s: float
    holdings: dict[str, Holdings] = field(default_factory=dict)
    # Workers that joined without having said yet what they have, and when.
    joined: dict[str, float] = field(default_factory=dict)
    # What workers had that left, and when.
    left: dict[str, tuple[Holdings, float]] = field(default_factory=dict)


class DeviceRouting(SchedulerPlugin):  # type: ignore[misc]
    """Lead each task that names a device to the workers that have it.

    Attributes
    ----------
    refused
        The errors of workers that could not use their devices and left, by name.

    Notes
    -----
    Tasks that every worker can run are left alone, so where one worker has all devices nothing is
    restricted. An ordinal is a worker's own: every worker that has it will do. Where no worker has
    the device, the task goes to one that fails it with
    :class:`~dask_devctx.errors.DeviceNotFoundError`; but it waits for
    ``devctx.missing-device-timeout`` if a worker that had it has just left, since it may be
    restarting, or if a worker has just joined that has not said yet what it has.

    The restrictions that a user gave (``workers=``) hold as well.

    Workers bring this plugin to the scheduler; ``dask scheduler --preload dask_devctx`` does too.
    """

    name = "devctx-routing"
    idempotent = True

    def __init__(self) -> None:
        self.refused: dict[object, Exception] = {}

    # -- dask's hooks

    async def start(self, scheduler: Scheduler) -> None:
        """Take up the work; tasks that are there already are led as well.

        Raises
        ------
        UnsupportedDaskError
            The scheduler's dask lacks a name that this uses.
        """
        check_scheduler(scheduler)
        self.scheduler = scheduler
        grace = config.seconds("missing-device-timeout") or 0
        self._cluster = _Cluster(grace)
        self._cluster.joined = dict.fromkeys(scheduler.workers, time())
        # A TaskState is equal to any other of its key, so an entry is taken out before it is put
        # in: else the key of the old one would stay.
        self._wishes: weakref.WeakKeyDictionary[Any, _Wish] = weakref.WeakKeyDictionary()
        internals.answer(
            scheduler,
            {ANNOUNCE: self._announced, WITHDRAW: self._withdrawn, REFUSE: self._refused},
        )
        for ts in list(scheduler.tasks.values()):
            if (wanted := _wanted(ts)) is not None:
                self._wishes[ts] = _Wish(wanted, *internals.restrictions(ts))
        self._review()
        self._look_again_later()

    async def close(self) -> None:
        """Stop serving the workers."""
        internals.answer_no_more(self.scheduler, (ANNOUNCE, WITHDRAW, REFUSE))

    def update_graph(
        self,
        scheduler: Scheduler,
        *,
        tasks: Iterable[Hashable],
        annotations: Mapping[str, Mapping[Hashable, Any]],
        **kwargs: Any,
    ) -> None:
        """Restrict new tasks, before they are scheduled."""
        annotated = annotations.get(ANNOTATION, {})
        touched = [ts for key in tasks if (ts := scheduler.tasks.get(key)) is not None]
        self._note_wishes(
            ts
            for ts in touched
            if ts.key in annotated
            # one that was noted before has restrictions that are not its user's
            or (carried_device(ts.run_spec) is not None and ts not in self._wishes)
        )

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        if worker not in self._cluster.holdings:  # else it spoke before it joined
            self._cluster.joined[worker] = time()
        self._look_again_later()
        self._review()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        self._cluster.joined.pop(worker, None)
        holdings = self._cluster.holdings.pop(worker, None)
        if holdings is not None:
            self._cluster.left[worker] = holdings, time()
            self._look_again_later()
        self._review()

    def log_event(self, topic: str, msg: Any) -> None:
        """Mark the tasks that may have broken a worker's devices."""
        suspects.mark(self.scheduler, topic, msg)

    # -- what workers say

    def _announced(
        self, address: str, seen: Sequence[Mapping[str, Any]], used: Iterable[str]
    ) -> str:
        address = internals.resolved(self.scheduler, address)
        devices = tuple(DeviceInfo(**fields) for fields in seen)
        self._cluster.joined.pop(address, None)
        self._cluster.holdings[address] = Holdings(Inventory(devices), frozenset(used))
        self._review()
        return "OK"

    def _withdrawn(self, address: str) -> str:
        self._cluster.holdings.pop(internals.resolved(self.scheduler, address), None)
        self._review()
        return "OK"

    def _refused(self, address: str, kind: str, arguments: Sequence[Any]) -> str:
        address = internals.resolved(self.scheduler, address)
        worker = self.scheduler.workers.get(address)
        # Plain data, made an error of ours here: nothing is unpickled that a worker sends.
        self.refused[worker.name if worker else address] = _REFUSALS[kind](*arguments)
        self._cluster.joined.pop(address, None)
        self._review()
        return "OK"

    # -- from a wish to a restriction

    def _note_wishes(self, tasks: Iterable[Any]) -> None:
        """Restrict the tasks that name a device; they are not scheduled yet."""
        known: dict[object, set[str] | frozenset[str] | None] = {}
        for ts in tasks:
            wanted = _wanted(ts)
            if wanted is not None:
                wish = _Wish(wanted, *internals.restrictions(ts))
                self._wishes.pop(ts, None)
                self._wishes[ts] = wish
                self._restrict(ts, wish, known)

    def _review(self) -> None:
        """Restrict every task anew, and move those on that this concerns."""
        known: dict[object, set[str] | frozenset[str] | None] = {}
        led_elsewhere = [
            ts
            for ts, wish in list(self._wishes.items())
            if self.scheduler.tasks.get(ts.key) is ts and self._restrict(ts, wish, known)
        ]
        internals.schedule_again(self.scheduler, led_elsewhere)

    def _restrict(
        self, ts: Any, wish: _Wish, known: dict[object, set[str] | frozenset[str] | None]
    ) -> bool:
        may_wait = not ts.actor  # dask lets no actor wait
        what = (type(wish.wanted), str(wish.wanted), may_wait)
        cacheable = isinstance(wish.wanted, (int, str))
        if cacheable and what in known:
            targets = known[what]
        else:
            targets = known[what] = self._targets(wish.wanted, may_wait)
        workers, hosts = wish.workers, wish.hosts
        if targets is not None:
            allowed = self._allowed(wish)
            both = targets if allowed is None else targets & allowed
            if both or targets is _NOBODY:
                workers, hosts = set(both or targets), None
            # else the user sends it where the device is not: let it fail there
        return internals.restrict(ts, workers, hosts)

    def _targets(self, wanted: object, may_wait: bool) -> set[str] | frozenset[str] | None:
        """Return the addresses of the workers to choose from; None for all."""
        cluster = self._cluster
        there = self.scheduler.workers.keys() & cluster.holdings.keys()
        try:
            holders = {address for address in there if cluster.holdings[address].have(wanted)}
            lost = any(holdings.have(wanted) for holdings, _ in cluster.left.values())
        except TypeError:  # no device at all: whoever gets it says so
            holders, lost = there, False
        if not holders and (lost or cluster.joined) and may_wait:
            return _NOBODY
        # Else whoever has devices at all tells best that this one is not there.
        holders = holders or {a for a in there if cluster.holdings[a].used} or there
        return None if not holders or len(holders) == len(self.scheduler.workers) else holders

    def _allowed(self, wish: _Wish) -> set[str] | None:
        """Return the addresses of the workers that the user allows; None for all."""
        if not wish.workers and not wish.hosts:
            return None
        allowed = set(wish.workers or ())
        for host in wish.hosts or ():
            allowed |= internals.addresses_at(self.scheduler, host)
        return allowed

    # -- waiting

    def _look_again_later(self) -> None:
        self.scheduler.loop.call_later(self._cluster.grace_s + 0.01, self._stop_waiting)

    def _stop_waiting(self) -> None:
        """Wait no longer for workers that have had their time."""
        cluster, before = self._cluster, time() - self._cluster.grace_s
        cluster.joined = {a: since for a, since in cluster.joined.items() if since > before}
        cluster.left = {a: entry for a, entry in cluster.left.items() if entry[1] > before}
        self._review()


def _wanted(ts: Any) -> object:
    """Return the device that a task names, or None where it names none."""
    try:
        wanted = requested_device(ts.annotations, ts.key, "leave", ts.run_spec)
    except Exception:  # a user's callable: the worker calls it again, and fails the task
        return None
    return None if isinstance(wanted, str) and wanted == AUTO else wanted
