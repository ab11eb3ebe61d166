"""A worker's executions of tasks: each gets its devices, runs, and is counted until its end."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from distributed import Reschedule, Worker

from dask_devctx.annotations import (
    ANY_DEVICE,
    HOST_ONLY,
    Request,
    Unannotated,
    requested_device,
)
from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals import tasks
from dask_devctx.dask_internals.threads import send_next_task_to
from dask_devctx.dask_internals.worker import told_of_freed_keys
from dask_devctx.scheduler.counts import DEVICE
from dask_devctx.worker.failures import conditions
from dask_devctx.worker.host_run import HostRun
from dask_devctx.worker.placement.admission import Admission, share_units
from dask_devctx.worker.run import DeviceRun, Refused
from dask_devctx.worker.tracebacks import of_the_user

if TYPE_CHECKING:
    from dask_devctx.worker.actors import DeviceActors
    from dask_devctx.worker.failures.monitor import Monitor
    from dask_devctx.worker.leases.share import DeviceShare
    from dask_devctx.worker.metrics.record import Record
    from dask_devctx.worker.placement.placement import Placement
    from dask_devctx.worker.threads.executors import DeviceThreadPoolExecutor
    from dask_devctx.worker.values.store import Store
    from dask_devctx.worker.values.value import Value

_KEY: Final = attrgetter("key")


class Runs:
    """Makes and ends the runs of one worker's tasks; on its event loop."""

    def __init__(
        self,
        worker: Worker,
        placement: Placement,
        admission: Admission,
        monitor: Monitor,
        record: Record,
        *,
        share: DeviceShare,
        unannotated: Unannotated,
        landing: Device | None,
        store: Store | None,
        failure: Exception | None,
    ) -> None:
        self.placement = placement
        self.admission = admission
        self.monitor = monitor
        self.record = record
        self.landing = landing
        self.store = store  # None without devices
        self.pools: Mapping[Device, DeviceThreadPoolExecutor] = {}
        self.living: DeviceActors | None = None
        self.advise: Callable[[], object] | None = None  # called once
        self._worker = worker
        self._tasks = worker.state.tasks
        self._share = share
        self._unannotated = unannotated
        self._failure = failure  # why the worker does not have the devices
        self._slot = admission.slot
        self.now: dict[Hashable, DeviceRun] = {}  # the present run of each task on devices

    @contextmanager
    def executing(self) -> Iterator[None]:
        """While it is open, tasks that begin to execute get their devices."""
        with (
            tasks.executed_by(self._worker, self._begin, self._end),
            told_of_freed_keys(self._worker, self._freed),
        ):
            yield

    def _freed(self, key: Hashable) -> None:
        """Let a cancelled task that reserves devices reserve them no longer."""
        run = self.now.get(key)
        if run is not None and not run.is_plain and run.is_cancelled():
            self.admission.withdraw(run)
        if self.store is not None:
            self.store.made.pop(key, None)

    def _begin(self, ts: Any) -> DeviceRun | HostRun | Refused | None:
        """Return the run of a task; None to run it as without this package."""
        annotations = ts.annotations
        wanted = ANY_DEVICE
        try:
            watched, once = conditions.read(annotations) if annotations else (0, "")
            wanted = requested_device(annotations, ts.key, self._unannotated, ts.run_spec)
            if wanted is HOST_ONLY:
                return None if self._failure is not None else self._on_host(ts)
            run = self._on_devices(ts, wanted)
        except Exception as error:
            # Of the traceback, only the lines of a policy or of an annotation help the user.
            error = error.with_traceback(of_the_user(error))
            failure = conditions.explained(error, annotations)
            if self._share.gave_up(wanted.name):  # another worker has the device now
                return Refused(ts.run_spec, Reschedule())
            self.record.refused(ts, failure)
            return Refused(ts.run_spec, failure)
        run.watched, run.once = watched, once
        theirs = bool(annotations) and "executor" in annotations  # the user's own threads
        if not (theirs or run.is_coro):
            send_next_task_to(self.pools[run.devices[0]], run)
        return run

    def _on_devices(self, ts: Any, wanted: Request) -> DeviceRun:
        key, dependencies, placement = ts.key, ts.dependencies, self.placement
        store = self.store
        inputs: list[Value] = []
        # Where there is no choice, inputs matter only if they can be moved ahead.
        choice = len(placement.devices) > 1
        if dependencies and store is not None and (choice or store.spill.accounts):
            inputs = store.values_of(map(_KEY, dependencies))
        if wanted is ANY_DEVICE and placement.only is not None:
            devices = placement.only
        else:
            devices = placement.place(wanted, inputs, self.monitor.retries.redirect(key))
        # In the queue of its device it has dask's own priority, with one change. Among tasks of the
        # same user priority, tasks that use up an input that no other task waits for run first: the
        # device holds less data when they are done. Without this, a device fills up with the
        # results of many tasks before the first is used. They would pass a task that is not plain
        # endlessly, so it runs first too.
        last = wanted.plain
        for dep in dependencies if last else ():
            if len(dep.dependents) == 1:
                last = False
                break
        by_user, *others = ts.priority
        priority = by_user, int(last), *others
        if wanted.plain:
            run = DeviceRun(self, ts, devices, self._slot, 0, priority)
        else:
            share = placement.share_of(wanted, devices[0])
            run = DeviceRun(self, ts, devices, share_units(share), wanted.nbytes or 0, priority)
            run.is_plain = False
            run.slots = share_units(share) / self._slot
        run.asked_for = wanted is not ANY_DEVICE
        has_queue = placement.add(devices, run.prefix, run.slots)
        self.record.began(ts, devices)
        self.now[key] = run
        run.queued = has_queue or not run.is_plain
        if not tasks.makes_an_actor(self._worker, key):
            run.any_device = not wanted.names and wanted.number is not None
        else:
            assert self.living is not None
            self.living.live_on(ts, devices)
            run.makes_actor = not run.is_plain
        if inputs and has_queue and store is not None and store.copies is not None:
            store.copies.make_ahead(inputs, *devices)
        if self.advise is not None:
            self.advise()
            self.advise = None
        return run

    def _on_host(self, ts: Any) -> HostRun:
        return HostRun(self, ts, theirs="executor" in (ts.annotations or ()))

    def _end(self, ts: Any, run: Any, event: Any) -> Any:
        state, start, stop = tasks.outcome(event)
        on_devices = run if run.__class__ is DeviceRun else None
        cancelled = ts.state == "cancelled"
        ended = state != "released" and not cancelled
        text = event.exception_text if state == "error" else ""
        if on_devices is None:
            if ended:
                self.record.ended(ts, (), state, start, stop, text=text)
            return event
        seconds = stop - start if ended and start is not None and stop is not None else None
        devices, key = on_devices.devices, ts.key
        self.now.pop(key, None)
        if not on_devices.left_devices:
            on_devices.left_devices = True
            self.placement.remove(devices, on_devices.prefix, on_devices.slots)
            self.record.left(devices, seconds or 0.0)
            if seconds is not None:
                self.placement.record_duration(on_devices.prefix, seconds)
        if ended:
            # the seconds that it waited for a slot, for its inputs and for memory, and its thread
            place_s = on_devices.began_at - on_devices.placed_at
            waited = place_s, on_devices.inputs_s, on_devices.memory_s, on_devices.thread
            self.record.ended(ts, devices, state, start, stop, waited, text)
        stored = ended and state == "memory"
        if self.store is not None:
            if not stored:
                self.store.spill.handed_over(key)
            elif on_devices.made is not None:
                self.store.made[key] = id(event.value), on_devices.made
        if on_devices.makes_actor:
            assert self.living is not None
            if stored and on_devices.for_life and key in self.living:
                self.living.keep(ts, on_devices)
            else:
                self.admission.release(on_devices)
        if state == "error":
            return tasks.add_to_times(ts, event, DEVICE, devices[0].uuid)
        return event

    def seceded(self, run: DeviceRun) -> None:
        """Note that a run seceded from its thread: it may wait for other tasks; on any thread."""
        self.monitor.seceded(run.key)
        self._worker.loop.add_callback(self._left_devices, run)

    def _left_devices(self, run: DeviceRun) -> None:
        if not run.left_devices:
            run.left_devices = True
            self.placement.remove(run.devices, run.prefix, run.slots)
            self.record.left(run.devices)
