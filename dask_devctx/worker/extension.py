"""The steps of a worker's set-up, and each task's way: it gets a device, runs, and is counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from distributed import Reschedule, Status, Worker

from dask_devctx.annotations import ANY_DEVICE, HOST_ONLY, Unannotated, requested_device
from dask_devctx.config.host_memory import fair_memory
from dask_devctx.config.options import Options, remembered_tasks
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.naming import AUTO
from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.dask_internals import check_worker, tasks
from dask_devctx.dask_internals.serialization import unpickled_later
from dask_devctx.dask_internals.worker import in_memory, metric, own_logs
from dask_devctx.transfer import Stamp
from dask_devctx.transfer.lifetime import Lifetime
from dask_devctx.worker.actors import DeviceActors
from dask_devctx.worker.allocators import allocating
from dask_devctx.worker.comms import landing, rechunks, serialization
from dask_devctx.worker.failures import conditions
from dask_devctx.worker.failures.attribution import Failure
from dask_devctx.worker.failures.monitor import Monitor
from dask_devctx.worker.failures.shutdown import begin_the_end
from dask_devctx.worker.functions import functions_of_clients
from dask_devctx.worker.host_memory import counting_host_memory, fair_limit
from dask_devctx.worker.host_task import HostTask
from dask_devctx.worker.inputs.inputs import Inputs
from dask_devctx.worker.inputs.one_input import Input
from dask_devctx.worker.leases.registration import has_routing
from dask_devctx.worker.leases.share import DeviceShare
from dask_devctx.worker.memory.data import DeviceData
from dask_devctx.worker.memory.keeping import within_limits
from dask_devctx.worker.memory.manager import DeviceMemory
from dask_devctx.worker.memory.surroundings import Surroundings
from dask_devctx.worker.metrics.advice import Advice
from dask_devctx.worker.metrics.history import remembering
from dask_devctx.worker.metrics.prometheus import exposed
from dask_devctx.worker.metrics.ranges import Ranges
from dask_devctx.worker.metrics.record import Record
from dask_devctx.worker.peers import PeerTransfers
from dask_devctx.worker.placement.claimed import ClaimedTask
from dask_devctx.worker.placement.claims import Claims, reservable
from dask_devctx.worker.placement.giving_back import giving_back
from dask_devctx.worker.placement.no_devices import NoDevices
from dask_devctx.worker.placement.placement import Placement
from dask_devctx.worker.placement.policy import start_soonest
from dask_devctx.worker.placement.urgency import urgency_of
from dask_devctx.worker.task import DeviceTask
from dask_devctx.worker.threads.cpu_threads import threads_without_a_device
from dask_devctx.worker.threads.executors import Claimed, device_threads
from dask_devctx.worker.threads.interpreter import import_early, set_for_devices, switch_interval
from dask_devctx.worker.tracebacks import of_the_user

P = ParamSpec("P")
T = TypeVar("T")

# The stand-ins of tasks that have a device, or need none.
_STAND_INS = frozenset({DeviceTask, ClaimedTask, HostTask})
# In these states a task's thread may still be running it.
_UNDER_WAY = frozenset({"executing", "cancelled", "resumed"})
_RUNNING = frozenset({"executing", "long-running"})
_MAY_GET_A_VALUE = _UNDER_WAY | _RUNNING | {"flight"}


class DeviceExtension:
    """While it is open, the tasks of one worker run on its devices.

    Parameters
    ----------
    worker
        The worker, on whose event loop this is called.
    options
        The options of the plugin.
    share
        The devices of the worker.

    Attributes
    ----------
    failure
        The reason why the worker does not have the devices, or None. The worker continues without
        them: tasks that ask for a device fail with this error, and all other tasks run as before.
    placement
        The device of each task.
    history
        The latest of what happened here.
    record
        The tasks that ran on each device.
    monitor
        Monitors the tasks.
    inputs
        Brings the tasks' inputs; None if inputs stay where they are.
    pools
        The executor of each device.
    """

    def __init__(self, worker: Worker, options: Options, share: DeviceShare) -> None:
        self._worker = worker
        self._share = share
        self._tasks = worker.state.tasks  # read at every transition of every task
        self.failure: Exception | None = None
        self.inputs: Inputs | None = None
        self.memory: DeviceMemory | None = None
        self.limits: dict[Device, int] = {}
        check_worker(worker)
        with ExitStack() as steps:  # each step is undone at the end, and when a later one fails
            steps.enter_context(own_logs(worker, logging.getLogger("dask_devctx")))
            history, interval_s = 0, None
            try:
                history = remembered_tasks()
                interval_s = switch_interval()
                self.placement: Placement | NoDevices = self._devices(steps, options)
            except Exception as error:
                self.failure = error
                self.placement = NoDevices(error)
            used = self.placement.devices
            self._landing = landing.in_place_of_the_first(used)
            self.claims = steps.enter_context(
                _opened(Claims, self.placement, options.tasks_per_device, self.limits)
            )
            self._unannotated: Unannotated = "leave" if self.failure else options.unannotated
            self.history = steps.enter_context(remembering(worker, used, history))
            self.record = Record(worker, used, options.tasks_per_device, self.history, history)
            steps.enter_context(self.record.in_heartbeats())
            self.monitor = steps.enter_context(
                _opened(
                    Monitor,
                    used,
                    synchronize=options.synchronize,
                    oom_retries=options.oom_retries,
                    on_failure=self._on_failure,
                    is_cancelled=partial(tasks.is_cancelled, worker),
                    marks=partial(has_routing, worker),
                )
            )
            steps.enter_context(metric(worker, Monitor.metric, self.monitor.metrics))
            self.monitor.ranges = Ranges() if options.nvtx else None
            self.record.retried = self.monitor.retries.counted
            self.monitor.retries.on_retry = self.history.tried_again
            if options.move_inputs:
                self.inputs = steps.enter_context(_opened(Inputs, options.replica_limit))
                self.monitor.retries.drop_replicas = self.inputs.drop_replicas
                self.inputs.holds_back = self.monitor.quarantine.is_alone_on
                self.inputs.replicas.counts.on_copy = self.history.copied_between
                self.history.refresh = self.inputs.replicas.counts.measure
                self.record.memory["copies"] = self.inputs.replicas.nbytes
                steps.enter_context(metric(worker, Inputs.metric, self.inputs.metrics))
            serialization.register()
            steps.enter_context(unpickled_later(worker, is_out_of_memory))
            steps.enter_context(rechunks.through_host_memory())
            self.peers = steps.enter_context(
                _opened(
                    PeerTransfers,
                    worker,
                    used,
                    self.inputs,
                    staging=options.ipc_staging,
                    limits=self.limits,
                    use=options.ipc,
                    make_room=self._make_room,
                    on_failure=self.monitor.blame.noticed_between,
                    has_failed=self.monitor.has_failed,
                    memory=lambda: self.memory,
                )
            )
            self.peers.traffic.on_copy = self.history.copied
            self.record.memory["staging"] = self.peers.staging_nbytes
            steps.enter_context(exposed(self.record, self.monitor, self._transfers))
            drop_replicas = self.monitor.retries.drop_replicas
            self.monitor.retries.drop_replicas = lambda device: (
                drop_replicas(device) + self.peers.free_staging(device)
            )
            if used:
                steps.enter_context(fair_limit(worker, fair_memory(len(used))))
            steps.enter_context(
                counting_host_memory(worker, written=self._written, read_back=self._read_back)
            )
            around = Surroundings(worker, self.inputs, self.peers, self.history)
            around.is_short_of = self.monitor.quarantine.is_alone_on
            self.memory = steps.enter_context(
                within_limits(worker, used, options, around, self.monitor.blame.noticed_between)
            )
            around.tell(self.memory, self.record, self.monitor.retries)
            self.claims.memory = None if self.memory is None else self.memory.reservations
            self.pools = self.claims.pools = steps.enter_context(
                device_threads(
                    worker,
                    used,
                    options.tasks_per_device,
                    self.claims.admission,
                    self.monitor.seceded,
                )
            )
            self.record.waiting = self.claims.admission.waiting_for
            self._actors = steps.enter_context(
                DeviceActors(worker, self.monitor, move_inputs=options.move_inputs)
            )
            steps.enter_context(giving_back(worker, self.claims, self._unannotated))
            if used:
                threads = options.cpu_threads
                steps.enter_context(threads_without_a_device(worker, threads, share.part))
            steps.enter_context(functions_of_clients(worker, self.monitor, used, options))
            steps.enter_context(set_for_devices(worker, interval_s))
            self.claims.take_again(self._tasks)
            self.advice = Advice(worker, len(self.pools) * options.tasks_per_device)
            steps.enter_context(self._tasks_assigned())
            self._steps = steps.pop_all()

    def close(self) -> None:
        """Restore the worker; running tasks run to their end."""
        self._steps.close()

    def _devices(self, steps: ExitStack, options: Options) -> Placement:
        """Use all devices of the worker, or none of them."""
        devices = self._share.devices
        with ExitStack() as taking:
            self.limits = reservable(devices, options.device_memory_limit)
            placement = Placement(
                devices, options.tasks_per_device, options.policy or start_soonest, self.limits
            )
            taking.enter_context(landing.landing_on(self._worker, devices))
            import_early(options.pre_import or ())
            taking.enter_context(allocating(self._worker, devices, options))
            steps.push(taking.pop_all())
        return placement

    @contextmanager
    def _tasks_assigned(self) -> Iterator[None]:
        """While it is open, tasks that have not begun get their devices."""
        try:
            for ts in tasks.about_to_begin(self._worker):
                self._assign(ts)
            yield
        finally:
            if self._worker.status is not Status.closing:
                for ts in self._tasks.values():
                    tasks.restore(ts)

    def report(self) -> dict[str, Any]:
        """Return the tasks that ran on each device, and the transfers, as plain data."""
        waiting = self.claims.admission.waits_for_actors()
        return {**self.record.report(), "transfers": self._transfers(), "waiting": waiting}

    def _transfers(self) -> list[dict[str, Any]]:
        within = [] if self.inputs is None else self.inputs.metrics(self._worker)
        return [{**row, "transport": "peer"} for row in within] + self.peers.traffic.rows()

    def transition(self, key: Hashable, start: str, finish: str) -> None:
        """Give a task that is about to run its device; stop counting a task that is done."""
        ts = self._tasks.get(key)
        # A task that was cancelled and requested again returns to "executing" without a transition
        # to it. So this looks at the state, and not at `finish`.
        if key in self.claims.by_key:
            self.claims.follow(key, finish, ts)
        if ts is not None and ts.state == "executing":
            if ts.run_spec.__class__ not in _STAND_INS:
                self._assign(ts)
        elif key in self.placement.placed:
            if finish == "long-running":  # a cancelled task, too, which stays cancelled
                self.monitor.seceded(key)
            if ts is None or ts.state not in _UNDER_WAY:
                self._done(key, ts)
        elif start in _RUNNING and ts is not None and ts.state in ("memory", "error"):
            self._ended_later(key, ts, start)
        reserved = self.memory and self.memory.reservations
        if reserved and reserved.handed and (ts is None or ts.state not in _MAY_GET_A_VALUE):
            reserved.handed_over(key)
        if start == "memory" and self.inputs is not None:
            self.inputs.forget(key)

    def _assign(self, ts: Any) -> None:
        """Give a task its device, and the device's threads unless it asked for other threads."""
        key, annotations, dependencies = ts.key, ts.annotations, ts.dependencies
        named: object = AUTO
        try:
            watched, once = conditions.read(annotations) if annotations else (0, "")
            wanted = requested_device(annotations, key, self._unannotated, ts.run_spec)
            if wanted is HOST_ONLY:
                self._leave_without_device(ts)
                return
            asked_for, plain = wanted is not ANY_DEVICE, wanted.plain
            if not asked_for:  # a task that ran out of memory elsewhere may have a next device
                named = self.monitor.retries.redirect(key) or AUTO
            elif plain:
                named = wanted.name
            before = self.placement.placed.get(key)  # if it was requested again
            inputs = self._inputs(ts) if dependencies else []
            if not plain:
                claim = self.claims.make(ts, wanted, inputs, urgency_of(ts))
                device, devices = claim.devices[0], claim.devices
            else:
                claim, device = None, self.placement.place(key, ts.prefix, named, inputs)
                devices = (device,)
            self.record.placed(ts, device, before, devices[1:])
        except Exception as error:  # dask would log it, and run the task without a device
            # Of the traceback, only the lines of a policy or of an annotation help the user.
            error = error.with_traceback(of_the_user(error))
            failure = conditions.explained(error, annotations)
            if self._share.gave_up(named):  # another worker has the device now
                tasks.replace(ts, DeviceTask(ts.run_spec, Reschedule()))
                return
            tasks.replace(ts, DeviceTask(ts.run_spec, failure))
            self.record.refused(ts, failure)
            return
        makes_actor = tasks.makes_an_actor(self._worker, key)
        if makes_actor:
            self._actors.live_on(ts, devices)
        theirs = bool(annotations) and "executor" in annotations  # the user's own threads
        pool: Any = None if theirs else self.pools[device]
        kind: Any = DeviceTask
        if claim is not None:
            kind, pool = self.claims.stand_in(ts, claim, makes_actor), pool and Claimed(pool, claim)
        stand_in = kind(
            ts.run_spec,
            device,
            executor=pool,
            priority=urgency_of(ts),
            asked_for=asked_for,
            watched=watched,
            once=once,
            inputs=self.inputs,
            monitor=self.monitor,
            memory=self.memory,
            prefix=ts.prefix,
        )
        stand_in.queued = claim is not None or self.placement.has_queue(device)
        tasks.replace(ts, stand_in)
        if dependencies and self.inputs is not None:
            known = self.inputs.lifetimes
            # A task that is requested again while it runs may have lost its inputs meanwhile.
            stand_in.lifetimes = {d.key: known[d.key] for d in dependencies if d.state == "memory"}
            if inputs and self.placement.has_queue(device):
                self.inputs.start_moving(inputs, stand_in.lifetimes, *devices)
        self.advice.give()

    def _leave_without_device(self, ts: Any) -> None:
        self._done(ts.key, None)  # if it had a device before it was requested again
        tasks.restore(ts)  # if it was given a stand-in before it was requested again
        if self.failure is not None:  # it runs as without this package
            return
        keys = [dep.key for dep in ts.dependencies]
        after = [] if self.inputs is None else self.inputs.stamps_of(keys)
        data = self._worker.data
        memory = data.memory if isinstance(data, DeviceData) else None
        stand_in = HostTask(ts.run_spec, self._landing, memory, self.monitor.has_failed)
        stand_in.reads_after(after, theirs="executor" in (ts.annotations or ()))
        tasks.replace(ts, stand_in)

    def _done(self, key: Hashable, ts: Any) -> None:
        device = self.placement.remove(key)
        if device is None:
            return
        seconds = self.record.left(device, key, ts)
        if seconds is not None:
            self.placement.record_duration(ts.prefix, seconds)
        # A task that failed, was dropped or runs again has no value whose lifetime begins here.
        if ts is not None and ts.state == "memory":
            self._arrived(key, ts)

    def _ended_later(self, key: Hashable, ts: Any, start: str) -> None:
        """Note the outcome of a task that seceded, or that had no device: it has no place now."""
        spec = ts.run_spec
        if not isinstance(spec, DeviceTask):
            self.record.ended(None, ts)
        elif start == "long-running" and isinstance(spec.device, Device):
            self.record.ended(spec.device, ts)
            if ts.state == "memory":
                self._arrived(key, ts)

    def _arrived(self, key: Hashable, ts: Any) -> None:
        made = _work_of(ts)
        if made is not None and self.inputs is not None:
            self.inputs.arrived(key, made)

    def _make_room(self, device: Device) -> int:
        """Drop copies and spill values of a device that has no memory for an arriving value."""
        dropped = 0 if self.inputs is None else self.inputs.drop_replicas(device)
        return dropped + (0 if self.memory is None else self.memory.leaving.spill_all(device))

    def _on_failure(self, failure: Failure) -> None:
        """End the worker; called on the thread of the task that noticed the failure."""
        begin_the_end(self._worker, failure, self._actors.answered)

    def _written(self, key: Hashable, value: object) -> None:
        """Called when dask is about to write a value to disk; its work may still be running."""
        ts = self._tasks.get(key)
        if ts is not None and (made := _work_of(ts)) is not None:
            made.hold_back_readers()

    def _read_back(self, key: Hashable, value: object) -> None:
        """Called when dask has read a value from disk."""
        if self.inputs is not None:
            self.inputs.read_back(key)

    def _inputs(self, ts: Any) -> list[Input]:
        """Return a task's inputs that are in memory, but for those that are known as host data."""
        data, found = self._worker.data, []
        known: Mapping[Hashable, Lifetime] = {} if self.inputs is None else self.inputs.lifetimes
        peek = data.peek if isinstance(data, DeviceData) else in_memory(self._worker).get
        for dep in ts.dependencies:
            lifetime = known.get(dep.key)
            on_host = lifetime is not None and lifetime.places is not None and not lifetime.places
            if not on_host and (value := peek(dep.key)) is not None:
                found.append(Input(dep.key, value, self.inputs))
        return found


@contextmanager
def _opened(kind: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
    """Make an object, and close it at the end."""
    with closing(kind(*args, **kwargs)) as made:  # type: ignore[type-var]
        yield made


def _work_of(ts: Any) -> Stamp | None:
    """Return the stamp of the work that makes a task's value, if the task ran here."""
    spec = ts.run_spec
    return spec.made if isinstance(spec, DeviceTask) else None
