"""The worker plugin: from a task's key to its device, and back to the worker as it was."""

from __future__ import annotations

import copy
import logging
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from distributed import Status, Worker, WorkerPlugin

from dask_devctx import config, membership, options, splitting
from dask_devctx.actors import PinnedActors
from dask_devctx.annotations import Unannotated, requested_device
from dask_devctx.arrivals import Arrivals
from dask_devctx.assignment import Policy, start_soonest
from dask_devctx.departures import Departures
from dask_devctx.device import Device, devices
from dask_devctx.errors import DeviceNotFoundError
from dask_devctx.failures import Charge, Failure, Guard, GuardedTask, marks
from dask_devctx.failures.restart import end_failed_worker, refuse_data
from dask_devctx.host_memory import HostMemory
from dask_devctx.inputs import Inputs
from dask_devctx.interpreter import Interpreter, switch_interval
from dask_devctx.keeping import keep_annotations
from dask_devctx.pinned import PinnedTask
from dask_devctx.placement import NoDevices, Placement
from dask_devctx.pools import DeviceThreadPoolExecutor, near_cpus
from dask_devctx.record import Record
from dask_devctx.replicas import check_limit
from dask_devctx.selection import AUTO
from dask_devctx.transfer import Stamp, nbytes_by_device

logger = logging.getLogger(__name__)

# How many tasks a worker should be shown for each that can run. A device's tasks run on the
# device's own threads, so a worker's `nthreads` is how far dask lets it look ahead: too few, and
# threads wait for the scheduler; too many, and results pile up before they are used.
LOOK_AHEAD = 8

# In these states a task's thread may still be running it.
_UNDER_WAY = frozenset({"executing", "cancelled", "resumed"})


class DevicePlugin(WorkerPlugin):  # type: ignore[misc]
    """Run each task of a worker on the GPU that it was assigned.

    Parameters
    ----------
    devices
        The devices that the worker uses, each anything that :class:`~dask_devctx.Device` accepts;
        all that it sees by default.
    devices_per_worker
        How many of them the worker takes for itself alone: workers of one machine and user that
        are given this share the devices out without overlap. None for all, shared with anybody.
    tasks_per_device
        How many tasks run on a device at a time. Tasks that wait for each other must all have a
        place: see docs/deployment.md.
    unannotated
        ``"assign"`` gives a task without a ``device`` annotation a device; ``"leave"`` leaves it on
        dask's own threads without one.
    move_inputs
        Whether a task's inputs that live on another device are copied to its own before it runs.
    replica_limit
        How much of each device's memory such copies may take, as a fraction.
    policy
        Chooses the device of a task that names none, given one
        :class:`~dask_devctx.assignment.Candidate` per device.
    synchronize
        Wait for the device before a task counts as done, so that work which fails is the fault of
        the task that gave it.
    oom_retries
        How often a task that ran out of a device's memory is tried again, after room was made.

    Raises
    ------
    TypeError
        ``devices`` is not a sequence.
    ValueError
        An argument, or the configuration that stands in for it, is out of range.

    Notes
    -----
    What is not given is taken from dask's configuration (``devctx.*``) where the plugin is made.
    It works on a cluster that is running and on workers that join later, and is wholly undone by
    ``client.unregister_worker_plugin("devctx")``, while tasks run. A worker that joins and finds
    too few devices free for ``devices_per_worker`` leaves again.

    Making one also makes ``device`` annotations of this process' arrays, bags and delayed values
    survive dask's optimization: see :func:`~dask_devctx.keeping.keep_annotations`.

    Examples
    --------
    >>> import dask
    >>> from distributed import Client, LocalCluster
    >>> with LocalCluster(processes=False, dashboard_address=":0") as cluster, Client(cluster) as c:
    ...     _ = c.register_plugin(DevicePlugin())
    ...     with dask.annotate(device=1):
    ...         print(c.submit(lambda: Device.current().device_id).result())
    1
    """

    name = "devctx"
    _was_set_up = False

    def __init__(
        self,
        *,
        devices: Sequence[object] | None = None,
        devices_per_worker: int | None = None,
        tasks_per_device: int | None = None,
        unannotated: Unannotated | None = None,
        move_inputs: bool | None = None,
        replica_limit: float | None = None,
        policy: Policy = start_soonest,
        synchronize: bool | None = None,
        oom_retries: int | None = None,
    ) -> None:
        keep_annotations()
        config.warn_of_unknown_keys()
        self.devices = options.devices(devices)
        self.devices_per_worker = options.count("devices-per-worker", devices_per_worker)
        self.tasks_per_device = options.count("tasks-per-device", tasks_per_device)
        self.unannotated = options.choice("unannotated", unannotated, ("assign", "leave"))
        self.move_inputs = options.choice("move-inputs", move_inputs, (True, False))
        self.replica_limit = config.get("replica-limit", replica_limit)
        self.policy = policy
        self.synchronize = options.choice("synchronize", synchronize, (True, False))
        self.oom_retries = options.count("oom-retries", oom_retries, least=0)
        check_limit(self.replica_limit)
        options.count("history", least=0)
        switch_interval()

    # -- dask's hooks

    async def setup(self, worker: Worker) -> None:
        """Take the worker's tasks in hand; those that run already are left as they are.

        Raises
        ------
        DevctxError, TypeError
            The worker does not have the devices. It goes on without, unless they are others':
            tasks that ask for a device fail on it with the same error, and all others run as they
            did. dask keeps the plugin; a note on the error says how to get out.
        """
        other = _other_plugin(worker, self)
        if other is not None:
            raise ValueError(
                f"this worker has a DevicePlugin already, by the name {other!r}, and one drives "
                "all its devices. Register it without a name of its own, and it takes the other's "
                f"place, or take that away first: client.unregister_worker_plugin({other!r})"
            )
        if self._was_set_up:  # by another worker of this process, whose state it has
            own = copy.copy(self)
            own._was_set_up = False
            worker.plugins.update({n: own for n, p in worker.plugins.items() if p is self})
            await own.setup(worker)
            return
        failure = self._install(worker)
        if failure is None:
            await membership.announce(worker, self.placement.devices)
        else:
            await membership.refuse(worker, failure)
            raise failure  # dask tells the client, and keeps the plugin

    async def teardown(self, worker: Worker) -> None:
        """Leave the worker as it was before :meth:`setup`; what runs, runs on to its end."""
        if not self._was_set_up:
            return  # there was another one
        # Nothing is awaited in here: dask calls no hook of a plugin that it is about to replace,
        # and what begins in between would run on no device, or on another's.
        self._uninstall(worker)
        self.share.release()
        membership.withdraw(worker)

    def _install(self, worker: Worker) -> Exception | None:
        self._was_set_up = True
        self.worker = worker
        self.share = splitting.Share(())
        self._tasks = worker.state.tasks  # looked into at every transition of every task
        self.placement: Placement | NoDevices
        failure: Exception | None = None
        history, interval_s = 0, None
        try:
            history = options.count("history", least=0)
            interval_s = switch_interval()
            self.share = self._take(worker)
            self.placement = Placement(
                self.share.devices, self.tasks_per_device, self.policy, nbytes_by_device
            )
            self.arrivals = Arrivals(worker, self.placement.devices)
        except Exception as error:
            failure = error
            self.share.release()
            self.placement = NoDevices(error)
            self.arrivals = Arrivals(worker, ())
        self._unannotated: Unannotated = "leave" if failure else self.unannotated
        self.record = Record(self.placement.devices, self.tasks_per_device, history)
        worker.metrics[Record.metric] = self.record.metrics
        self.guard = Guard(
            self.placement.devices,
            synchronize=self.synchronize,
            oom_retries=self.oom_retries,
            on_failure=self._on_failure,
            is_cancelled=partial(_is_cancelled, self._tasks),
        )
        worker.metrics[Guard.metric] = self.guard.metrics
        self.inputs: Inputs | None = None
        if self.move_inputs:
            self.inputs = Inputs(self.replica_limit)
            self.guard.retries.drop_replicas = self.inputs.drop_replicas
            self.departures = Departures(worker, self.inputs)
            worker.metrics[Inputs.metric] = self.inputs.metrics
        self.host_memory = HostMemory(worker, written=self._written, read_back=self._read_back)
        self._executor_names = {device: f"devctx:{device}" for device in self.placement.devices}
        self.pools = {
            name: DeviceThreadPoolExecutor(
                f"devctx-{device}", self.tasks_per_device, near_cpus(device.info.cpu_affinity)
            )
            for device, name in self._executor_names.items()
        }
        worker.executors.update(self.pools)
        self.actors = PinnedActors(worker, self.guard)
        self.interpreter = Interpreter(worker, interval_s)
        self._advice = _advice(worker, len(self.pools) * self.tasks_per_device)
        for ts in worker.state.tasks.values():
            if ts.state == "executing" and ts.key not in worker.active_keys:  # about to begin
                self._pin(ts)
        return failure

    def _uninstall(self, worker: Worker) -> None:
        for metric in (Record.metric, Guard.metric, Inputs.metric):
            worker.metrics.pop(metric, None)
        self.arrivals.close()
        self.host_memory.close()
        self.guard.close()
        if self.inputs is not None:
            self.departures.close()
            self.inputs.close()
        self.actors.restore()
        self.interpreter.close()
        if worker.status is Status.closing:
            return  # it empties and ends its executors itself, these with the others
        for ts in worker.state.tasks.values():
            self._unpin(ts)
        for name, pool in self.pools.items():
            del worker.executors[name]
            pool.shutdown(wait=False)

    def _take(self, worker: Worker) -> splitting.Share:
        found = _worker_devices(self.devices)
        if self.devices_per_worker is None:
            return splitting.Share(found)
        return splitting.take(
            found,
            self.devices_per_worker,
            holder=f"worker {worker.name}",
            directory=config.get("lock-directory"),
        )

    def transition(self, key: Hashable, start: str, finish: str, **kwargs: Any) -> None:
        """Pin a task that is about to be executed; stop counting one that is done."""
        ts = self._tasks.get(key)
        # A task that was cancelled and asked for again comes back to "executing" without a
        # transition to it, so what counts is the state and not `finish`.
        if ts is not None and ts.state == "executing":
            if ts.run_spec.__class__ is not PinnedTask:
                self._pin(ts)
        elif key in self.placement.placed:
            if finish == "long-running":  # also of one that was cancelled, and stays so
                self.guard.seceded(key)
            if ts is None or ts.state not in _UNDER_WAY:
                self._done(key, ts)
        elif start == "long-running" and ts is not None:
            self._ended_later(key, ts)
        if start == "memory" and self.inputs is not None:
            self.inputs.forget(key)

    # -- a task's way

    def _pin(self, ts: Any) -> None:
        """Wrap the task, and send it to its device's threads unless it asked for others."""
        annotations = ts.annotations
        try:
            wanted = requested_device(annotations, ts.key, self._unannotated, ts.run_spec)
            if wanted is None:
                self._done(ts.key, None)  # where it was asked for again, in other words
                if self.inputs is not None:
                    self.inputs.hold_back_for(dep.key for dep in ts.dependencies)
                return
            asked_for = wanted.__class__ is not str or wanted != AUTO
            if not asked_for:  # after it ran out of memory elsewhere, it is known where to
                wanted = self.guard.retries.redirect(ts.key) or wanted
            before = self.placement.placed.get(ts.key)  # where it was asked for again
            inputs = self._inputs(ts) if ts.dependencies else []
            values = (value for _, value in inputs)
            device = self.placement.place(ts.key, ts.prefix, wanted, values)
            self.record.placed(ts, device, before)
        except Exception as error:  # raised here, dask would log it and run the task unpinned
            failure = error.with_traceback(None)  # where it was found says nothing to the user
            ts.run_spec = PinnedTask(ts.run_spec, failure, ts.priority)
            self.record.refused(ts, failure)
            return
        if ts.key in self.worker.state.actors:
            self.actors.live_on(ts, device)
        if not annotations or "executor" not in annotations:
            ts.annotations = {**(annotations or {}), "executor": self._executor_names[device]}
        charge = Charge(ts.key, movable=not asked_for)
        if marks.is_watched(annotations):
            charge = charge._replace(watched=True, is_coroutine=bool(ts.run_spec.is_coro))
        ts.run_spec = pinned = PinnedTask(
            ts.run_spec,
            device,
            _urgency(ts),
            asked_for=asked_for,
            inputs=self.inputs,
            call=GuardedTask(self.guard, charge),
        )
        if self.inputs is not None and ts.dependencies:
            known = self.inputs.lifetimes
            # One that is asked for again while it runs may have lost its inputs meanwhile.
            pinned.lifetimes = {
                dep.key: known[dep.key] for dep in ts.dependencies if dep.state == "memory"
            }
            if inputs and self.placement.waits(device):
                self.inputs.start_moving(inputs, pinned.lifetimes, device)
        if self._advice:
            self._advise()

    def _unpin(self, ts: Any) -> None:
        if isinstance(ts.run_spec, PinnedTask):
            ts.run_spec = ts.run_spec.task
        if ts.annotations and ts.annotations.get("executor") in self.pools:
            ts.annotations = {k: v for k, v in ts.annotations.items() if k != "executor"}

    def _done(self, key: Hashable, ts: Any) -> None:
        device = self.placement.remove(key)
        if device is None:
            return
        run = self.record.left(device, ts)
        if run is not None and run.start is not None and run.stop is not None:
            self.placement.took(run.prefix, run.stop - run.start)
        # Of one that came to nothing, or was to be computed anew meanwhile, nothing is known.
        if ts is not None and ts.state == "memory":
            self._arrived(key, ts)

    def _ended_later(self, key: Hashable, ts: Any) -> None:
        """Note what came of a task that seceded; it gave up its place on its device then."""
        spec = ts.run_spec
        if spec.__class__ is PinnedTask and isinstance(spec.device, Device):
            if ts.state in ("memory", "error"):
                self.record.ended(spec.device, ts)
            if ts.state == "memory":
                self._arrived(key, ts)

    def _arrived(self, key: Hashable, ts: Any) -> None:
        made = _work_of(ts)
        if made is not None and self.inputs is not None:
            self.inputs.arrived(key, made)

    def _on_failure(self, failure: Failure) -> None:
        """End the worker; called on the thread of the task that noticed."""
        refuse_data(self.worker)  # now: whoever is told may ask before the event loop has its turn
        marks.tell(self.worker, str(failure.error), failure.suspects)
        self.worker.loop.add_callback(end_failed_worker, self.worker, failure)

    def _written(self, key: Hashable, value: object) -> None:
        """Called when dask is about to write a value to disk, be it as soon as it was made."""
        ts = self._tasks.get(key)
        made = None if ts is None else _work_of(ts)
        if made is not None:
            made.hold_back_readers()

    def _read_back(self, key: Hashable, value: object) -> None:
        """Called when dask has read a value from disk."""
        if self.inputs is not None:
            self.inputs.read_back(key)

    def _inputs(self, ts: Any) -> list[tuple[Hashable, Any]]:
        """Return those inputs of a task that are in memory; what is on disk stays there."""
        data = self.worker.data
        data = getattr(data, "memory", data)
        return [(dep.key, data[dep.key]) for dep in ts.dependencies if dep.key in data]

    def _advise(self) -> None:
        """Say once what to change, where the client can read it too: its events of ``devctx``."""
        logger.warning("%s: %s", self.worker.address, self._advice)
        self.worker.log_event("devctx", {"level": "warning", "message": self._advice})
        self._advice = ""


def _other_plugin(worker: Worker, plugin: DevicePlugin) -> str | None:
    """Return the name of another plugin of this kind that a worker has."""
    for name, one in worker.plugins.items():
        if isinstance(one, DevicePlugin) and one is not plugin:
            return str(name)
    return None


def _urgency(ts: Any) -> tuple[Any, ...]:
    """Return a task's place among those that wait for its device; the least goes first.

    It is dask's own priority, but what the user gave alike, those go first that use up an input
    which no other task waits for: their device has less to hold when they are done. Else a device
    fills up with what many tasks make before the first of it is used.
    """
    by_user, *others = ts.priority
    for dep in ts.dependencies:
        if len(dep.dependents) == 1:
            return (by_user, 0, *others)
    return (by_user, 1, *others)


def _is_cancelled(tasks: Mapping[Hashable, Any], key: Hashable) -> bool:
    """Return whether a task was cancelled; on any thread.

    dask believes that it runs from when it is given to its device's threads. There it may wait for
    long, and nobody wants it when its turn comes.
    """
    ts = tasks.get(key)
    return ts is not None and ts.state == "cancelled"


def _work_of(ts: Any) -> Stamp | None:
    """Return the stamp of the work that makes a task's value, where it was made here."""
    spec = ts.run_spec
    return spec.made if spec.__class__ is PinnedTask else None


def _advice(worker: Worker, running: int) -> str:
    """Return what to change of a worker that is shown too few tasks to keep its devices busy."""
    nthreads = worker.state.nthreads
    if nthreads >= 2 * running:
        return ""
    return (
        f"This worker has nthreads={nthreads}, and its devices run {running} tasks at a time: dask "
        "will not show it enough tasks to keep them busy, and a queue for one device can keep the "
        f"others waiting. Start it with nthreads={LOOK_AHEAD * running}, as LocalDeviceCluster "
        "does: the devices' own threads run the tasks, and this says how far ahead it may look"
    )


def _worker_devices(wanted: Sequence[object] | None) -> tuple[Device, ...]:
    found = devices() if wanted is None else tuple(dict.fromkeys(Device(one) for one in wanted))
    if not found:
        raise DeviceNotFoundError(
            "any",
            (),
            None,
            "The worker sees no GPU: check CUDA_VISIBLE_DEVICES, or give it devices",
        )
    return found
