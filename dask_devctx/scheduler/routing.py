"""The scheduler's plugin: it hears of workers and tasks, and asks the other modules here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from distributed import Scheduler, SchedulerPlugin
from distributed.metrics import time

from dask_devctx import config
from dask_devctx.annotations import (
    ANY_DEVICE,
    HOST_ONLY,
    NAMES,
    Request,
    answer,
    requested_device,
)
from dask_devctx.annotations.names import TOLD, about_no_plugin, mistaken
from dask_devctx.annotations.runs import GONE, PRESENT
from dask_devctx.dask_internals import check_scheduler
from dask_devctx.dask_internals import scheduler as internals
from dask_devctx.scheduler.announcements import (
    ANNOUNCE,
    CLAIM,
    KEEP,
    REFUSE,
    SHARE,
    WITHDRAW,
    MalformedError,
    read_address,
    read_claim,
    read_holdings,
    read_kept,
    read_memory_limit,
    read_refusal,
)
from dask_devctx.scheduler.counts import Counts
from dask_devctx.scheduler.dashboard import DevicePages
from dask_devctx.scheduler.history import DeviceHistory
from dask_devctx.scheduler.holdings import Cluster
from dask_devctx.scheduler.kept import Kept
from dask_devctx.scheduler.sharing import Sharing
from dask_devctx.scheduler.suspects import FAILED, TOPIC, SuspectTasks
from dask_devctx.scheduler.wishes import Wishes

logger = logging.getLogger(__name__)

Handler = Callable[[str, Mapping[str, Any]], None]

# How long the scheduler waits for a worker that gives up devices.
_ANSWER_S = 10.0


class DeviceRouting(SchedulerPlugin):  # type: ignore[misc]
    """Send each task that names a device to the workers that have it.

    Attributes
    ----------
    refused
        The errors of workers that could not use their devices and left, by worker name.
    history
        What happened on the devices, collected while somebody reads it.
    counts
        The counts of tasks on the devices of workers that left.

    Notes
    -----
    A task that every worker can run is not restricted. An ordinal belongs to a worker: any worker
    that has this ordinal can run the task. If no worker has the device, the task goes to a worker
    that fails it with :class:`~dask_devctx.errors.DeviceNotFoundError`. But first the task waits
    for ``devctx.missing-device-timeout`` if a worker that had the device has just left and may be
    restarting, or if a worker has just joined and has not announced its devices yet. A worker that
    was closed, retired or scaled down does not come back.

    The restrictions that a user gave (``workers=``) hold as well. With
    ``allow_other_workers=True`` they are a preference among the workers that have the device.

    Workers send this plugin to the scheduler; ``dask scheduler --preload dask_devctx`` installs it
    too.
    """

    name = "devctx-routing"
    idempotent = True

    def __init__(self) -> None:
        self.refused: dict[object, Exception] = {}
        self._warned: set[str] = set()
        self._cluster = Cluster(set())

    @property
    def devices(self) -> dict[str, frozenset[str]]:
        """The UUIDs of the devices that each worker uses, by the worker's address."""
        known = list(self._cluster.present.by_worker.items())  # another thread may ask
        return {address: held.used for address, held in known}

    # -- dask's hooks

    async def start(self, scheduler: Scheduler) -> None:
        """Start to restrict tasks, also those that are on the scheduler already."""
        check_scheduler(scheduler)
        self.scheduler = scheduler
        self._grace_s = config.seconds("missing-device-timeout") or 0
        self._cluster = Cluster(set())
        self._wishes = Wishes(self._cluster, lambda host: internals.addresses_at(scheduler, host))
        self._kept = Kept(scheduler, self._cluster)
        self._pages = DevicePages(scheduler)
        self.history = DeviceHistory(scheduler, lambda: self._cluster.present.using)
        self.counts = Counts(scheduler)
        for address in scheduler.workers:
            self._cluster.join(address, time())
        self._suspects = SuspectTasks(scheduler)
        self.failures = self._suspects.latest
        acts = {
            ANNOUNCE: self._announced,
            WITHDRAW: self._withdrawn,
            REFUSE: self._refused,
            FAILED: self._suspects.failed,
        }
        self._sharing = Sharing(self._share, scheduler.workers, self._grace_s)
        handlers: dict[str, Callable[..., Any]] = {
            op: self._handler(op, act) for op, act in acts.items()
        }
        internals.answer(scheduler, {**handlers, CLAIM: self._claimed, KEEP: self._keeps})
        tasks = list(scheduler.tasks.values())
        self._note(tasks)
        self._move(tasks)
        self._look_again_later()

    async def close(self) -> None:
        """Stop answering the workers' messages."""
        internals.answer_no_more(self.scheduler, (ANNOUNCE, WITHDRAW, REFUSE, FAILED, CLAIM, KEEP))
        self._kept.close()
        self._pages.close()
        self.history.close()

    def update_graph(
        self,
        scheduler: Scheduler,
        *,
        tasks: Iterable[Hashable],
        annotations: Mapping[str, Mapping[Hashable, Any]],
        **kwargs: Any,
    ) -> None:
        """Restrict new tasks, before they are scheduled."""
        ours = sorted(NAMES & annotations.keys())
        told = set().union(*annotations.get(TOLD, {}).values())
        given = {name: next(iter(by_key.values()), None) for name, by_key in annotations.items()}
        for name, text in mistaken(given).items():
            self._warn(text, also_clients=name not in told)
        # Where the plugin failed, tasks that ask for a device err with the reason.
        if ours and not (self._cluster.present.by_worker or self._cluster.unheard):
            self._warn_if_unused(ours[0])
        annotated = set().union(*(annotations[name] for name in ours))
        asking = []
        for key in tasks:
            ts = scheduler.tasks.get(key)
            if ts is None:
                continue
            function = getattr(ts.run_spec, "func", None)
            if key in annotated or getattr(function.__class__, "carries_device", False):
                asking.append(ts)
        self._note(asking)

    def _warn_if_unused(self, name: str) -> None:
        """Warn that no worker of the cluster heeds an annotation, if there are workers."""
        if self._cluster.workers and not self._cluster.left.by_worker:
            self._warn(about_no_plugin(name))

    def _warn(self, text: str, *, also_clients: bool = True) -> None:
        """Warn once: by an event, and in the clients if theirs has not told its user itself."""
        if text not in self._warned:
            self._warned.add(text)
            logger.info("%s", text)
            event = {"action": "annotation-mistaken", "message": text}
            self.scheduler.log_event(TOPIC, event)
            if also_clients:
                internals.warn_clients(self.scheduler, text)

    def transition(self, key: Hashable, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Note the end of a task; dask calls this six times for each, so it calls little itself."""
        if finish == "forgotten" and key in self._wishes.groups:
            self._wishes.forget(key)
        if start == "processing" and "startstops" in kwargs:
            self.counts.ended(finish, kwargs)
        if self._suspects.failed_workers or self._suspects.refused:
            self._suspects.moved(key, finish, kwargs.get("worker"))

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        holdings = self._cluster.join(worker, time())
        self.counts.joined(worker)
        if holdings is None:
            self._look_again_later()
        else:
            self._pages.open()
        self._move(self._wishes.review(worker, None, holdings, joined=1))
        self._kept.review()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        self._suspects.worker_left(worker)
        for_good = worker in self._cluster.leaving
        # The others get the devices that it shared with them; tasks wait for that.
        shares = self._sharing.left(worker, may_return=not for_good)
        holdings = self._cluster.leave(worker, time(), may_return=shares or not for_good)
        if for_good and shares:
            self.scheduler.loop.add_callback(self._sharing.even_out)
        self.counts.left(worker)
        self.history.left(worker)
        if holdings is not None:
            self._look_again_later()
        changed = self._wishes.review(worker, holdings, None, joined=-1)
        for ts, last in self._wishes.gone() if for_good else ():
            internals.annotate(ts, GONE, last)
        self._move(changed)
        self._kept.forget(worker)

    def log_event(self, topic: str, msg: Any) -> None:
        """Mark the tasks that may have broken a worker's devices; note who leaves for good."""
        leaving = internals.leaves_for_good(topic, msg)
        if leaving in self._cluster.workers:
            self._cluster.leaving.add(leaving)
        self._suspects.read_event(topic, msg)
        self.history.event(topic, msg)

    # -- messages of workers

    def _handler(self, op: str, act: Handler) -> Callable[..., str]:
        """Return a handler for dask, which refuses a malformed message with a log line."""

        def handle(**message: Any) -> str:
            try:
                act(self._address(message), message)
            except MalformedError as error:
                logger.warning("A message %s was refused: %s", op, error)
                return f"refused: {error}"
            return "OK"

        return handle

    def _announced(self, address: str, message: Mapping[str, Any]) -> None:
        holdings, memory_limit = read_holdings(message), read_memory_limit(message)
        if address not in self._cluster.workers:
            self._cluster.announce_early(address, holdings, time())
            return
        self._pages.open()
        self.counts.announced(address, holdings.used)
        before = self._cluster.announce(address, holdings)
        if memory_limit is not None:
            internals.set_memory_limit(self.scheduler, address, memory_limit)
        self._move(self._wishes.review(address, before, holdings))

    def _withdrawn(self, address: str, message: Mapping[str, Any]) -> None:
        self._known(address)
        self._sharing.left(address, may_return=False)
        self.counts.forget(address)
        before = self._cluster.withdraw(address)
        if not self._cluster.present.using:
            self.counts.forget_all()
            self._pages.close()
        self._move(self._wishes.review(address, before, None))
        self._kept.forget(address)

    def _refused(self, address: str, message: Mapping[str, Any]) -> None:
        self._known(address)
        self._sharing.left(address, may_return=False)
        self.refused[self.scheduler.workers[address].name] = read_refusal(message)
        self._cluster.unheard.pop(address, None)
        self._move(self._wishes.review_absent())

    async def _claimed(self, **message: Any) -> dict[str, Any] | str:
        """Return the devices of a worker that shares a machine's devices with others."""
        try:
            address, (process, candidates) = self._address(message), read_claim(message)
        except MalformedError as error:
            logger.warning("A message %s was refused: %s", CLAIM, error)
            return f"refused: {error}"
        return await self._sharing.claim(address, process, candidates)

    def _keeps(self, **message: Any) -> dict[str, Any] | str:
        """Note the devices that actors keep on a worker; answer which of its tasks others run."""
        try:
            address, (left, keys) = self._address(message), read_kept(message)
            self._known(address)
        except MalformedError as error:
            logger.warning("A message %s was refused: %s", KEEP, error)
            return f"refused: {error}"
        return {"elsewhere": self._kept.told(address, left, keys)}

    async def _share(self, address: str, uuids: Sequence[str], version: int) -> None:
        told = internals.ask(self.scheduler, address, SHARE, uuids=list(uuids), version=version)
        await asyncio.wait_for(told, _ANSWER_S)

    def _address(self, message: Mapping[str, Any]) -> str:
        address = read_address(message)
        if address in self._cluster.workers:
            return address
        try:
            return internals.resolved(self.scheduler, address)
        except Exception as error:  # each transport has its own
            raise MalformedError(f"'address' is no address: {address!r:.80} ({error})") from None

    def _known(self, address: str) -> None:
        if address not in self._cluster.workers:
            raise MalformedError(f"no worker of this cluster has the address {address!r:.80}")

    # -- tasks

    def _note(self, tasks: Iterable[Any]) -> None:
        """Restrict the tasks that name a device."""
        for ts in tasks:
            try:
                annotations = answer(ts.annotations, ts.key)
                internals.set_annotations(ts, annotations)
                wanted = requested_device(annotations, ts.key, "leave", ts.run_spec)
            except Exception as error:  # of a user's function or object; a worker fails the task
                wanted = Request((error.with_traceback(None),))
            if wanted is not ANY_DEVICE and wanted is not HOST_ONLY:
                self._wishes.note(ts, wanted)
                if (last := self._wishes.last_worker(ts.key)) is not None:
                    internals.annotate(ts, GONE, last)
                elif self._wishes.is_for_nobody(ts.key):
                    internals.annotate(ts, PRESENT, self._cluster.shown())

    def _move(self, tasks: Iterable[Any]) -> None:
        """Let dask look again for a worker for tasks that wait."""
        internals.schedule_again(self.scheduler, tasks)

    # -- waiting

    def _look_again_later(self) -> None:
        self.scheduler.loop.call_later(self._grace_s + 0.01, self._stop_waiting)

    def _stop_waiting(self) -> None:
        """Stop waiting for the workers whose time is over."""
        self.scheduler.loop.add_callback(self._sharing.even_out)
        if self._cluster.expire(time() - self._grace_s):
            self._move(self._wishes.review_absent())
