"""The scheduler's plugin: it hears of workers and tasks, and asks the other modules here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, update_wrapper
from typing import Any
from weakref import WeakKeyDictionary, ref

from distributed import Scheduler, SchedulerPlugin
from distributed.metrics import time

from dask_devctx.annotations import (
    ANY_DEVICE,
    HOST_ONLY,
    NAMES,
    RERUN,
    Request,
    about_no_plugin,
    mistaken,
    requested_device,
    runs_once,
)
from dask_devctx.config.checks import missing_device_timeout_s
from dask_devctx.cuda.naming import DeviceInfo, Inventory
from dask_devctx.dask_internals import check_scheduler
from dask_devctx.dask_internals import scheduler as internals
from dask_devctx.dask_internals.connections import answering
from dask_devctx.dask_internals.garbage import collecting_rarely
from dask_devctx.dask_internals.shuffles import lead_outputs
from dask_devctx.errors import DevctxError, DevicesInUseError
from dask_devctx.scheduler.cluster import Cluster, WorkerDevices
from dask_devctx.scheduler.dashboard import device_pages
from dask_devctx.scheduler.division import Sharing
from dask_devctx.scheduler.history import DeviceHistory
from dask_devctx.scheduler.messages import (
    ACTION,
    ANNOUNCE,
    CLAIM,
    FAILED,
    LATE,
    PROTOCOL,
    RECHUNK,
    REFUSE,
    ROUTING,
    TOPIC,
    Failure,
)
from dask_devctx.scheduler.restrictions import Restrictions
from dask_devctx.scheduler.suspects import SuspectTasks

logger = logging.getLogger(__name__)

# The entries of an event that tells of a failure.
_IS_FAILURE = {"action": ACTION, "protocol": PROTOCOL}
_newest: WeakKeyDictionary[Scheduler, ref[DeviceRouting]] = WeakKeyDictionary()


class DeviceRouting(SchedulerPlugin):  # type: ignore[misc]
    """Send each task that names a device to the workers that have it.

    Attributes
    ----------
    refused
        The errors of workers that could not use their devices and left, by worker name.
    history
        What happened on the devices, collected while somebody reads it.

    Notes
    -----
    A task that every worker can run is not restricted. An ordinal belongs to a worker: any worker
    that has this ordinal can run the task. If no worker has the device, the task goes to a worker
    that fails it with :class:`~dask_devctx.errors.DeviceNotFoundError`. But first the task waits
    for ``devctx.missing-device-timeout`` if a worker that had the device has just left and may be
    restarting, or if a worker has just joined and has not announced its devices yet.

    The restrictions that a user gave (``workers=``) hold as well. With
    ``allow_other_workers=True`` they are a preference among the workers that have the device.

    Workers send this plugin to the scheduler; ``dask scheduler --preload dask_devctx`` installs it
    too.
    """

    name = ROUTING
    idempotent = True

    def __init__(self) -> None:
        self.refused: dict[object, Exception] = {}
        self._warned: set[str] = set()
        self._cluster = Cluster()

    @property
    def devices(self) -> dict[str, frozenset[str]]:
        """The UUIDs of the devices that each worker uses, by the worker's address."""
        known = list(self._cluster.present.items())  # another thread may ask
        return {address: frozenset(devices.used) for address, devices in known}

    # -- dask's hooks

    async def start(self, scheduler: Scheduler) -> None:
        """Start to restrict tasks, also those that are on the scheduler already."""
        check_scheduler(scheduler)
        self._grace_s = missing_device_timeout_s()
        known = _newest.get(scheduler)
        if known is not None and (earlier := known()) is not None:
            await earlier.close()  # dask removes a plugin without its end
        _newest[scheduler] = ref(self)
        self.scheduler = scheduler
        self._cluster = Cluster()
        hosted = partial(internals.addresses_at, scheduler)
        self._restricted = Restrictions(self._cluster, hosted)
        self._steps = ExitStack()
        # From the first worker that uses devices until the plugin is withdrawn from all.
        self._while_used: ExitStack | None = None
        self.history = DeviceHistory(scheduler, lambda: self._cluster.slots)
        self._steps.callback(self.history.close)
        for address in scheduler.workers:
            self._cluster.join(address, time())
        self._suspects = SuspectTasks(scheduler)
        self._sharing = Sharing(scheduler, self._grace_s)
        acts: dict[str, Callable[..., Any]] = {
            ANNOUNCE: self._announced,
            REFUSE: self._refused,
            FAILED: lambda address, **row: self._suspects.failed(address, Failure(**row)),
            CLAIM: self._sharing.claim,
            LATE: lambda a, keys: internals.moved_to_idle(scheduler, self._cluster, a, keys),
            RECHUNK: lambda address, **row: lead_outputs(scheduler, **row),
        }
        handlers = {op: update_wrapper(partial(self._answer, op, a), a) for op, a in acts.items()}
        self._steps.enter_context(answering(scheduler, handlers))
        tasks = list(scheduler.tasks.values())
        self._restrict(tasks)
        internals.schedule_again(scheduler, tasks)
        self._look_again_later()

    async def close(self) -> None:
        """Stop answering the workers' messages."""
        self._cluster = Cluster()  # dask still tells of the workers that leave
        self._steps.close()
        self._leave_as_it_was()

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
        annotated = set().union(*(annotations.get(name, ()) for name in (*ours, RERUN)))
        asking = []
        for key in tasks:
            ts = scheduler.tasks.get(key)
            if ts is None:
                continue
            function = getattr(ts.run_spec, "func", None)
            if key in annotated or getattr(function.__class__, "carries_device", False):
                asking.append(ts)
        self._restrict(asking)
        cluster = self._cluster
        # Where the plugin failed, tasks that ask for a device err with the reason.
        heeded = cluster.present or cluster.unheard or cluster.left
        if ours and cluster.workers and not heeded:
            self._warn(about_no_plugin(ours[0]))
        given = {name: next(iter(by_key.values()), None) for name, by_key in annotations.items()}
        for text in mistaken(given):
            self._warn(text)

    def transition(self, key: Hashable, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Note the end of a task; dask calls this six times for each, so it calls little itself."""
        if finish == "forgotten" and key in self._restricted.groups:
            self._restricted.forget(key)
        if self._suspects.failed_workers or self._suspects.refused:
            self._suspects.moved(key, finish, kwargs.get("worker"))
        if self._cluster.late and start == "processing":
            internals.tell_late(self.scheduler, self._cluster, kwargs.get("worker"))

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        self._cluster.join(worker, time())
        if worker not in self._cluster.present:
            self._look_again_later()
        self._review()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        self._suspects.failed_workers.pop(worker, None)  # another one may have its address later
        self._sharing.left(worker, may_return=True)
        self._cluster.leave(worker, time())
        if worker in self._cluster.left:
            self._look_again_later()
        self.history.left(worker)
        self._review()

    def log_event(self, topic: str, msg: Any) -> None:
        if topic == TOPIC and isinstance(msg, Mapping) and _IS_FAILURE.items() <= msg.items():
            failure = Failure(*map(msg.__getitem__, Failure._fields))
            self.history.failed(msg["worker"], failure)  # dask adds the worker
            self._suspects.failed(msg["worker"], failure)

    # -- messages of workers

    def _answer(
        self, op: str, act: Callable[..., Any], /, address: str, protocol: int = 1, **content: Any
    ) -> Any:
        """Answer a worker's message; refuse one of another protocol with a log line."""
        if protocol != PROTOCOL:
            text = (
                f"{address} has another version of dask-devctx, with protocol {protocol} in place "
                f"of {PROTOCOL}. Install the same version on the scheduler and on all workers"
            )
            logger.warning("A message %s was refused: %s", op, text)
            return f"refused: {text}"
        if address not in self._cluster.workers:
            address = internals.resolved(self.scheduler, address)
        said = act(address, **content)
        return "OK" if said is None else said

    def _announced(
        self,
        address: str,
        seen: Sequence[tuple[str, str | None]],
        used: Mapping[str, int] | None,
    ) -> None:
        if used is None:
            self._cluster.withdraw(address)
        else:
            infos = (DeviceInfo(n, uuid, pci_bus_id=pci) for n, (uuid, pci) in enumerate(seen))
            self._cluster.announce(address, WorkerDevices(Inventory(tuple(infos)), used))
        if used:
            self.history.expect(used)
            self._sharing.heard(address)
        else:
            self._sharing.left(address, may_return=False)
        if not self._cluster.slots:
            self._leave_as_it_was()
        if address in self._cluster.workers:
            self._review()

    def _refused(self, address: str, text: str, in_use: bool) -> None:
        """Note why a worker leaves; the error is made here, and nothing is unpickled."""
        self._sharing.left(address, may_return=False)
        error = DevicesInUseError if in_use else DevctxError
        self.refused[self.scheduler.workers[address].name] = error(text)
        self._cluster.unheard.pop(address, None)
        self._review()

    # -- tasks

    def _restrict(self, tasks: Iterable[Any]) -> None:
        """Restrict the tasks that name a device, or must not run twice."""
        restricted = self._restricted
        for ts in tasks:
            if runs_once(ts.annotations):  # the first killed worker is too many
                ts.suspicious = self.scheduler.allowed_failures
            try:
                wanted = requested_device(ts.annotations, "leave", ts.run_spec)
            except Exception as error:  # a wrong annotation: a worker fails the task
                wanted = Request((error.with_traceback(None),))
            if wanted is not ANY_DEVICE and wanted is not HOST_ONLY:
                restricted.note(ts, wanted)

    def _leave_as_it_was(self) -> None:
        """Leave the scheduler as it was; a page that somebody looks at changes no more."""
        if self._while_used is not None:
            self._while_used.close()
            self._while_used = None

    def _review(self) -> None:
        """Bring all restrictions up to date, and let dask look again for workers."""
        # dask itself lets those wait whose preferred worker is gone.
        loose = [ts for ts in self.scheduler.unrunnable if ts.loose_restrictions]
        internals.schedule_again(self.scheduler, [*self._restricted.review(), *loose])
        self._cluster.ahead = internals.threads_beyond(self.scheduler, self._cluster.slots)
        if self._while_used is None and self._cluster.slots:
            self._while_used = steps = ExitStack()
            steps.enter_context(collecting_rarely())
            steps.enter_context(internals.idle_workers_hear_at_once(self.scheduler))
            steps.enter_context(internals.comparing_slots(self.scheduler, self._cluster))
            steps.enter_context(device_pages(self.scheduler))

    def _look_again_later(self) -> None:
        self.scheduler.loop.call_later(self._grace_s + 0.01, self._stop_waiting)

    def _stop_waiting(self) -> None:
        """Stop waiting for the workers whose time is over."""
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
