"""The scheduler's plugin: it hears of workers and tasks, and asks the other modules here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
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
from dask_devctx.annotations.names import about_no_plugin, mistaken
from dask_devctx.annotations.runs import GONE, PRESENT
from dask_devctx.dask_internals import check_scheduler
from dask_devctx.dask_internals import scheduler as internals
from dask_devctx.scheduler.actors import ActorDevices
from dask_devctx.scheduler.cluster import Cluster, WorkerDevices
from dask_devctx.scheduler.counts import Counts
from dask_devctx.scheduler.dashboard import DevicePages
from dask_devctx.scheduler.history import DeviceHistory
from dask_devctx.scheduler.messages import (
    ANNOUNCE,
    CLAIM,
    KEEP,
    REFUSE,
    SHARE,
    WITHDRAW,
    Claim,
    KeptByActors,
    MalformedError,
    Sender,
    read,
    read_devices,
    read_refusal,
)
from dask_devctx.scheduler.restrictions import Restrictions
from dask_devctx.scheduler.sharing import Sharing
from dask_devctx.scheduler.suspects import FAILED, TOPIC, SuspectTasks

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]

# How long the scheduler waits for a worker that gives up devices.
_ANSWER_S = 10.0


class DeviceRouting(SchedulerPlugin):  # type: ignore[misc]
    """Send each task that names a device to the workers that have it.

    Attributes
    ----------
    refused
        The errors of workers that could not use their devices and left, by worker name.
    history, counts
        What happened on the devices, collected while somebody reads it, and the counts of tasks on
        the devices of workers that left.

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
        self._cluster = Cluster()

    @property
    def devices(self) -> dict[str, frozenset[str]]:
        """The UUIDs of the devices that each worker uses, by the worker's address."""
        known = list(self._cluster.present.items())  # another thread may ask
        return {address: devices.used for address, devices in known}

    # -- dask's hooks

    async def start(self, scheduler: Scheduler) -> None:
        """Start to restrict tasks, also those that are on the scheduler already."""
        check_scheduler(scheduler)
        self.scheduler = scheduler
        self._grace_s = config.seconds("missing-device-timeout") or 0
        self._cluster = Cluster()
        self._restricted = Restrictions(
            self._cluster, lambda host: internals.addresses_at(scheduler, host)
        )
        self._actors = ActorDevices(scheduler, self._cluster)
        self._pages = DevicePages(scheduler)
        self.history = DeviceHistory(scheduler, lambda: self._cluster.using)
        self.counts = Counts(scheduler)
        for address in scheduler.workers:
            self._cluster.join(address, time())
        self._suspects = SuspectTasks(scheduler)
        self.failures = self._suspects.latest
        self._sharing = Sharing(self._share, scheduler.workers, self._grace_s)
        self._handlers = {
            ANNOUNCE: _answers(ANNOUNCE, self._announced),
            WITHDRAW: _answers(WITHDRAW, self._withdrawn),
            REFUSE: _answers(REFUSE, self._refused),
            FAILED: _answers(FAILED, lambda one: self._suspects.failed(self._address(one), one)),
            KEEP: _answers(KEEP, self._keeps),
            CLAIM: self._claimed,
        }
        internals.answer(scheduler, self._handlers)
        tasks = list(scheduler.tasks.values())
        self._restrict(tasks)
        internals.schedule_again(scheduler, tasks)
        self._look_again_later()

    async def close(self) -> None:
        """Stop answering the workers' messages."""
        internals.answer_no_more(self.scheduler, self._handlers)
        self._actors.close()
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
        given = {name: next(iter(by_key.values()), None) for name, by_key in annotations.items()}
        for text in mistaken(given):
            self._warn(text)
        cluster = self._cluster
        # Where the plugin failed, tasks that ask for a device err with the reason.
        heeded = cluster.present or cluster.unheard or cluster.left
        if ours and cluster.workers and not heeded:
            self._warn(about_no_plugin(ours[0]))
        annotated = set().union(*(annotations[name] for name in ours))
        asking = []
        for key in tasks:
            ts = scheduler.tasks.get(key)
            if ts is None:
                continue
            function = getattr(ts.run_spec, "func", None)
            if key in annotated or getattr(function.__class__, "carries_device", False):
                asking.append(ts)
        self._restrict(asking)

    def transition(self, key: Hashable, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Note the end of a task; dask calls this six times for each, so it calls little itself."""
        if finish == "forgotten" and key in self._restricted.groups:
            self._restricted.forget(key)
        if start == "processing" and "startstops" in kwargs:
            self.counts.ended(finish, kwargs)
        if self._suspects.failed_workers or self._suspects.refused:
            self._suspects.moved(key, finish, kwargs.get("worker"))

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        devices = self._cluster.join(worker, time())
        self.counts.joined(worker)
        if devices:
            self._pages.open()
        else:
            self._look_again_later()
        self._review(devices)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        self._suspects.worker_left(worker)
        for_good = worker in self._cluster.leaving
        # The others get the devices that it shared with them; tasks wait for that.
        shares = self._sharing.left(worker, may_return=not for_good)
        devices = self._cluster.leave(worker, time(), may_return=shares or not for_good)
        if devices:
            self._look_again_later()
        if for_good and shares:
            self.scheduler.loop.add_callback(self._sharing.even_out)
        self.counts.left(worker)
        self.history.left(worker)
        moved = self._restricted.review(devices)
        for ts, last in self._restricted.gone() if for_good else ():
            internals.annotate(ts, GONE, last)
        internals.schedule_again(scheduler, moved)
        self._actors.forget(worker)

    def log_event(self, topic: str, msg: Any) -> None:
        leaving = internals.leaves_for_good(topic, msg)
        if leaving in self._cluster.workers:
            self._cluster.leaving.add(leaving)
        self._suspects.read_event(topic, msg)
        self.history.event(topic, msg)

    # -- messages of workers

    def _announced(self, message: Message) -> None:
        address = self._address(message)
        devices, memory_limit = read_devices(message)
        changed = self._cluster.announce(address, devices, time())
        if address in self._cluster.workers:
            self._pages.open()
            self.counts.announced(address, devices.used)
            if memory_limit is not None:
                internals.set_memory_limit(self.scheduler, address, memory_limit)
            self._review(changed)

    def _withdrawn(self, message: Message) -> None:
        address = self._member(message)
        self._sharing.left(address, may_return=False)
        self.counts.forget(address)
        changed = self._cluster.withdraw(address)
        if not self._cluster.using:
            self.counts.forget_all()
            self._pages.close()
        self._review(changed)
        self._actors.forget(address)

    def _refused(self, message: Message) -> None:
        address, error = self._member(message), read_refusal(message)
        self._sharing.left(address, may_return=False)
        self.refused[self.scheduler.workers[address].name] = error
        self._cluster.unheard.pop(address, None)
        self._review()

    def _keeps(self, message: Message) -> dict[str, Any]:
        """Note the devices that actors keep on a worker; answer which of its tasks others run."""
        kept = read(KeptByActors, message)
        return {"elsewhere": self._actors.told(self._member(message), kept)}

    async def _claimed(self, **message: Any) -> dict[str, Any] | str:
        """Return the devices of a worker that shares a machine's devices with others."""
        said = _answers(CLAIM, lambda one: (self._address(one), read(Claim, one)))(**message)
        if isinstance(said, str):
            return said
        address, claim = said
        return await self._sharing.claim(address, claim.process, claim.candidates)

    async def _share(self, address: str, uuids: Sequence[str], version: int) -> None:
        told: Awaitable[object] = internals.ask(
            self.scheduler, address, SHARE, uuids=list(uuids), version=version
        )
        await asyncio.wait_for(told, _ANSWER_S)

    def _address(self, message: Message) -> str:
        """Return the address of the worker that sends a message, as the scheduler writes it."""
        address: str = read(Sender, message).address
        if address in self._cluster.workers:
            return address
        try:
            return internals.resolved(self.scheduler, address)
        except Exception as error:  # each transport has its own
            raise MalformedError(f"'address' is no address: {address!r:.80} ({error})") from None

    def _member(self, message: Message) -> str:
        address = self._address(message)
        if address not in self._cluster.workers:
            raise MalformedError(f"no worker of this cluster has the address {address!r:.80}")
        return address

    # -- tasks

    def _restrict(self, tasks: Iterable[Any]) -> None:
        """Restrict the tasks that name a device."""
        restricted = self._restricted
        for ts in tasks:
            try:
                annotations = answer(ts.annotations, ts.key)
                internals.set_annotations(ts, annotations)
                wanted = requested_device(annotations, ts.key, "leave", ts.run_spec)
            except Exception as error:  # of a user's function or object; a worker fails the task
                wanted = Request((error.with_traceback(None),))
            if wanted is ANY_DEVICE or wanted is HOST_ONLY:
                continue
            group = restricted.note(ts, wanted)
            if group.holders:
                continue
            if (last := self._cluster.had(group.terms[0])) is not None:
                internals.annotate(ts, GONE, last)
            elif restricted.are_for_nobody(group):
                internals.annotate(ts, PRESENT, self._cluster.shown())

    def _review(self, devices: Iterable[WorkerDevices] = ()) -> None:
        """Bring all restrictions up to date, and let dask look again for workers."""
        internals.schedule_again(self.scheduler, self._restricted.review(devices))
        self._actors.review()

    def _look_again_later(self) -> None:
        self.scheduler.loop.call_later(self._grace_s + 0.01, self._stop_waiting)

    def _stop_waiting(self) -> None:
        """Stop waiting for the workers whose time is over."""
        self.scheduler.loop.add_callback(self._sharing.even_out)
        if self._cluster.expire(time() - self._grace_s):
            self._review()

    def _warn(self, text: str) -> None:
        """Warn once: by an event, and in the clients."""
        if text not in self._warned:
            self._warned.add(text)
            logger.info("%s", text)
            event = {"action": "annotation-mistaken", "message": text}
            self.scheduler.log_event(TOPIC, event)
            internals.warn_clients(self.scheduler, text)


def _answers(op: str, act: Callable[[Message], Any]) -> Callable[..., Any]:
    """Return a handler for dask, which refuses a malformed message with a log line."""

    def handle(**message: Any) -> Any:
        try:
            said = act(message)
        except MalformedError as error:
            logger.warning("A message %s was refused: %s", op, error)
            return f"refused: {error}"
        return "OK" if said is None else said

    return handle
