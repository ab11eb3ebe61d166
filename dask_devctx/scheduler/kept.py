"""The parts of devices that actors keep, and the tasks that stay away from them.

An actor with a claim keeps its part of its devices while it lives. A task that can never start on a
worker meanwhile goes to another worker, if any other may run it. If none may, the task waits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

from distributed import Scheduler

from dask_devctx.annotations import (
    ANY_DEVICE,
    HOST_ONLY,
    NAMES,
    Request,
    Unannotated,
    carried_device,
    requested_device,
)
from dask_devctx.cuda import naming
from dask_devctx.dask_internals import scheduler as internals
from dask_devctx.scheduler.holdings import Cluster, Holdings
from dask_devctx.scheduler.wishes import name_of

# Shares are counted in millionths.
_SMALLEST: Final = 1e-6


class Left(NamedTuple):
    """The parts of one worker's devices that its actors leave for tasks.

    Parameters
    ----------
    unannotated
        The worker's rule for tasks that name no device.
    place
        The share of a task that says nothing.
    devices
        The share and the bytes that are left, by the UUID of each device with an actor; None for
        unlimited bytes.
    """

    unannotated: Unannotated
    place: float
    devices: Mapping[str, tuple[float, int | None]]

    def lacks(self, held: Holdings, asked: Request) -> bool:
        """Return whether a task can never start on the worker while its actors live.

        Parameters
        ----------
        held
            The worker's devices.
        asked
            The request of the task.
        """
        if asked is HOST_ONLY:
            return False
        uuids = held.used
        if asked.names:
            found = [naming.among(name_of(name), held.seen) for name in asked.names]
            uuids = frozenset(infos[0].uuid for infos in found if infos)
        fit = sum(self._fits(uuid, asked, held.limits.get(uuid)) for uuid in uuids)
        return fit < (asked.number or len(uuids))

    def _fits(self, uuid: str, asked: Request, limit: int | None) -> bool:
        if uuid not in self.devices:
            return True
        share, nbytes = self.devices[uuid]
        wanted = self.place if asked.share is None else asked.share
        if asked.share is None and asked.nbytes and limit:
            wanted = min(asked.nbytes / limit, wanted)
        enough = nbytes is None or (asked.nbytes or 0) <= nbytes
        return enough and wanted <= share + _SMALLEST


class Kept:
    """Keeps tasks away from workers where actors leave no room for them.

    Parameters
    ----------
    scheduler
        The scheduler. It is changed only while such actors live.
    cluster
        The workers and their devices. Its owner calls :meth:`review` after each change.
    """

    def __init__(self, scheduler: Scheduler, cluster: Cluster) -> None:
        self._scheduler = scheduler
        self._cluster = cluster
        self._left: dict[str, Left] = {}
        # The workers where no plain task can start, and those of them that shall get none.
        self._no_place: set[str] = set()
        self._full: set[str] = set()
        self._steps = ExitStack()

    def close(self) -> None:
        """Let tasks go to all workers."""
        self._left.clear()
        self.review()

    def told(self, address: str, left: Left, keys: Iterable[Hashable]) -> list[Hashable]:
        """Note what actors leave on a worker; return those of its tasks that others may run."""
        if left.devices:
            self._left[address] = left
        else:
            self._left.pop(address, None)
        self.review()
        return [key for key in keys if internals.may_leave(self._scheduler, key, address)]

    def forget(self, address: str) -> None:
        """Forget the actors of a worker."""
        self._left.pop(address, None)
        self.review()

    def review(self) -> None:
        """Look again which workers get tasks."""
        if not self._left and not self._full and not self._no_place:
            return
        self._no_place = {
            address
            for address, left in self._left.items()
            if self._lacks(address, ANY_DEVICE if left.unannotated == "assign" else HOST_ONLY)
        }
        full = self._no_place if self._cluster.workers - self._no_place else set()
        changed = full ^ self._full
        self._full.clear()
        self._full.update(full)
        self._steps.close()
        if self._left:
            self._steps.enter_context(
                internals.avoiding(self._scheduler, self._avoided, self._can_queue, self._full)
            )
        if changed:
            internals.look_at_queue(self._scheduler, changed)

    def _lacks(self, address: str, wanted: Request) -> bool:
        held = self._cluster.present.by_worker.get(address)
        return held is not None and self._left[address].lacks(held, wanted)

    def _avoided(self, ts: Any) -> set[str]:
        if _is_plain(ts):
            return self._no_place
        wanted = {}
        for rule in {left.unannotated for left in self._left.values()}:
            try:
                wanted[rule] = requested_device(ts.annotations, ts.key, rule, ts.run_spec)
            except Exception:  # a worker fails the task with it
                return set()
        return {a for a, left in self._left.items() if self._lacks(a, wanted[left.unannotated])}

    def _can_queue(self, ts: Any) -> bool:
        return _is_plain(ts) and internals.queues_tasks(self._scheduler)


def _is_plain(ts: Any) -> bool:
    """Return whether a task says nothing about devices."""
    named = ts.annotations and not NAMES.isdisjoint(ts.annotations)
    return not named and carried_device(ts.run_spec) is None
