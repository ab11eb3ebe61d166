"""The parts of devices that actors keep, and the tasks that stay away from them.

An actor with a claim keeps its part of its devices while it lives. A task that can never start on a
worker meanwhile goes to another worker, if any other may run it. If none may, the task waits.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Final

from distributed import Scheduler

from dask_devctx.annotations import (
    ANY_DEVICE,
    HOST_ONLY,
    NAMES,
    Request,
    carried_device,
    requested_device,
)
from dask_devctx.dask_internals import scheduler as internals
from dask_devctx.scheduler.cluster import Cluster
from dask_devctx.scheduler.messages import KeptByActors
from dask_devctx.scheduler.restrictions import name_of

# Shares are counted in millionths.
_SMALLEST: Final = 1e-6


class ActorDevices:
    """Keeps tasks away from workers where actors leave no room for them.

    The scheduler is changed only while such actors live. Call :meth:`review` after each change of
    the cluster.
    """

    def __init__(self, scheduler: Scheduler, cluster: Cluster) -> None:
        self._scheduler = scheduler
        self._cluster = cluster
        self._kept: dict[str, KeptByActors] = {}
        # The workers where no plain task can start, and those of them that shall get none.
        self._no_slot: set[str] = set()
        self._full: set[str] = set()
        self._steps = ExitStack()

    def close(self) -> None:
        """Let tasks go to all workers."""
        self._kept.clear()
        self.review()

    def told(self, address: str, kept: KeptByActors) -> list[Any]:
        """Note what actors leave on a worker; return those of its tasks that others may run."""
        if kept.left and address in self._cluster.workers:
            self._kept[address] = kept
        else:
            self._kept.pop(address, None)
        self.review()
        return [key for key in kept.keys if internals.may_leave(self._scheduler, key, address)]

    def forget(self, address: str) -> None:
        """Forget the actors of a worker."""
        self._kept.pop(address, None)
        self.review()

    def review(self) -> None:
        """Look again which workers get tasks."""
        self._steps.close()
        if not self._kept and not self._full and not self._no_slot:
            return
        self._no_slot = {
            address
            for address, kept in self._kept.items()
            if self._lacks(address, ANY_DEVICE if kept.unannotated == "assign" else HOST_ONLY)
        }
        full = self._no_slot if self._cluster.workers - self._no_slot else set()
        changed = full ^ self._full
        self._full.clear()
        self._full.update(full)
        if self._kept:
            self._steps.enter_context(
                internals.avoiding(self._scheduler, self._avoided, self._can_queue, self._full)
            )
        if changed:
            internals.look_at_queue(self._scheduler, changed)

    def _avoided(self, ts: Any) -> set[str]:
        if _is_plain(ts):
            return self._no_slot
        wanted = {}
        for rule in {kept.unannotated for kept in self._kept.values()}:
            try:
                wanted[rule] = requested_device(ts.annotations, ts.key, rule, ts.run_spec)
            except Exception:  # a worker fails the task with it
                return set()
        return {a for a, kept in self._kept.items() if self._lacks(a, wanted[kept.unannotated])}

    def _can_queue(self, ts: Any) -> bool:
        return _is_plain(ts) and internals.queues_tasks(self._scheduler)

    def _lacks(self, address: str, asked: Request) -> bool:
        """Return whether a task can never start on a worker while its actors live."""
        devices, kept = self._cluster.present.get(address), self._kept[address]
        if devices is None or asked is HOST_ONLY:
            return False
        uuids = devices.used
        if asked.names:
            uuids = devices.uuids_of(tuple(map(name_of, asked.names)))
        fit = sum(_fits(kept, uuid, asked, devices.limits.get(uuid)) for uuid in uuids)
        return fit < (asked.number or len(uuids))


def _fits(kept: KeptByActors, uuid: str, asked: Request, limit: int | None) -> bool:
    share, nbytes = kept.left.get(uuid, (1.0, None))
    wanted = kept.place if asked.share is None else asked.share
    if asked.share is None and asked.nbytes and limit:
        wanted = min(asked.nbytes / limit, wanted)
    enough = nbytes is None or (asked.nbytes or 0) <= nbytes
    return enough and wanted <= share + _SMALLEST


def _is_plain(ts: Any) -> bool:
    """Return whether a task says nothing about devices."""
    named = ts.annotations and not NAMES.isdisjoint(ts.annotations)
    return not named and carried_device(ts.run_spec) is None
