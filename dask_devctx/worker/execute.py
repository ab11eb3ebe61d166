"""A worker's executions of tasks: each gets its devices, runs, and is counted until its end."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from distributed import Worker

from dask_devctx.annotations import (
    ANY_DEVICE,
    HOST_ONLY,
    REFUSED,
    RERUN,
    Request,
    had_all_runs,
    isolated_run,
    may_rerun,
    requested_device,
)
from dask_devctx.config.options import Options
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.on_device import OF_THIS_TASK
from dask_devctx.dask_internals import tasks
from dask_devctx.dask_internals.tasks import NEXT_TASK, DeviceThreadPoolExecutor
from dask_devctx.errors import DevctxError, DeviceFailedError
from dask_devctx.scheduler.rows import DEVICE
from dask_devctx.worker.landing import in_place_of_the_first
from dask_devctx.worker.metrics.history import CLOCKS_DIFFER_S
from dask_devctx.worker.run import DeviceRun, HostRun, Refused
from dask_devctx.worker.tracebacks import of_the_user

if TYPE_CHECKING:
    from dask_devctx.worker.actors import DeviceActors
    from dask_devctx.worker.failures.monitor import Monitor
    from dask_devctx.worker.metrics.record import Record
    from dask_devctx.worker.placement.placement import Placement
    from dask_devctx.worker.values.store import Store
    from dask_devctx.worker.values.value import Value

_KEY: Final = attrgetter("key")


class Runs:
    """Makes and ends the runs of one worker's tasks; on its event loop."""

    def __init__(
        self,
        worker: Worker,
        options: Options,
        placement: Placement,
        monitor: Monitor,
        record: Record,
        actors: DeviceActors,
        pools: Mapping[Device, DeviceThreadPoolExecutor],
        *,
        store: Store | None,
        failure: Exception | None,
    ) -> None:
        self.admission = placement.admission
        self.monitor = monitor
        self.landing = in_place_of_the_first(placement.devices)
        self.store: Store = store  # type: ignore[assignment]  # no run without devices needs it
        # The package that names ranges for profilers; None without ranges.
        self.nvtx: Any = import_module("nvtx") if options.nvtx else None
        self.placement = placement
        self._record = record
        self._actors = actors
        self._pools = pools
        self._worker = worker
        self._unannotated = options.unannotated
        self._failure = failure  # why the worker does not have the devices
        self._uuids = {device: device.uuid for device in placement.devices}

    def begin(self, ts: Any) -> DeviceRun | HostRun | Refused | None:
        """Return the run of a task; None to run it as without this package."""
        annotations = ts.annotations
        theirs = bool(annotations) and "executor" in annotations  # the user's own threads
        try:
            isolated, not_again = _conditions(annotations) if annotations else (0, "")
            wanted = requested_device(annotations, self._unannotated, ts.run_spec)
            if wanted is HOST_ONLY and not self.placement.devices:
                return None
            if theirs and not wanted.plain:
                raise DevctxError(
                    "a task with the annotation devices, device_share or device_memory runs on the "
                    "threads of its devices: leave out the annotation 'executor', or name one "
                    "device with dask.annotate(device=1)"
                )
            run: HostRun | DeviceRun
            run = HostRun(self, ts) if wanted is HOST_ONLY else self._on_devices(ts, wanted)
        except Exception as error:
            # Of the traceback, only the lines of a policy or of an annotation help the user.
            error = error.with_traceback(of_the_user(error))
            self._record.refused(ts, error)
            if error is not self._failure:  # which says where it is from
                error.add_note(f"{ts.key!r} was refused by {self._worker.address}")
            return Refused(ts.run_spec, error)
        run.theirs = theirs
        OF_THIS_TASK.set(run.known)  # in the context of this execution, which its thread gets
        if isinstance(run, HostRun):
            return run
        run.isolated, run.not_again = isolated, not_again
        if not (theirs or run.is_coro):
            run.anywhere = wanted is ANY_DEVICE and not isolated and ts.key not in self._actors
            NEXT_TASK.set([(self._pools[run.devices[0]], run)])
        return run

    def _on_devices(self, ts: Any, wanted: Request) -> DeviceRun:
        if self._failure is not None:
            raise self._failure
        key, dependencies, placement, store = ts.key, ts.dependencies, self.placement, self.store
        inputs: list[Value] = []
        # Where there is no choice, inputs matter only if they can be moved ahead.
        choice = len(placement.devices) > 1
        if dependencies and (choice or store.spill.open):
            inputs = store.values_of(map(_KEY, dependencies))
        if wanted is ANY_DEVICE and placement.only is not None:
            devices = placement.only
        else:
            devices = placement.place(wanted, inputs)
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
        run = DeviceRun(self, ts, devices, (by_user, int(last), *others))
        if not wanted.plain:
            run.is_plain = False
            run.share = placement.share_of(wanted, devices[0])
            run.nbytes = wanted.nbytes or 0
            run.slots = run.share / self.admission.slot
        if key in self._actors:
            self._actors.devices[ts] = devices
        # Nothing fails from here on: what is counted now is counted until its end.
        has_queue = placement.add(run)
        # The scheduler gets it; readers of dask's own task stream see it.
        ts.metadata[DEVICE] = self._uuids[devices[0]]
        if inputs and has_queue and store.moves_inputs:
            store.copies.make_ahead(inputs, *devices)
        return run

    def end(self, ts: Any, run: Any, event: Any) -> None:
        """Count a run that ended, with dask's event of the outcome or None."""
        state = tasks.STATES.get(event.__class__, "released")
        ended = state != "released" and ts.state != "cancelled"
        start, stop = (event.start, event.stop) if ended else (None, None)
        if start is not None and abs(delay := self._worker.scheduler_delay) <= CLOCKS_DIFFER_S:
            start, stop = start - delay, stop - delay  # dask added it: see `History.now`
        text = event.exception_text if state == "error" else ""
        if run.__class__ is not DeviceRun:
            if ended and run.__class__ is not Refused:
                self._record.ended(ts, (), state, start, stop, text=text)
            return
        # First what others wait for, then what is told of it.
        seconds = None if start is None or stop is None else stop - start
        self.placement.remove(run, seconds)
        made, run.made = run.made, None
        stores = ended and state == "memory" and ts.key not in self._actors
        if made is not None and stores and self.store.open:  # else another plugin counts it
            self.store.made[ts.key] = made
            if made.nbytes:
                made.pins = 1  # until dask stores it, in a moment
                self.store.spill.add(made)
        if run.room:
            self.store.spill.reserve(run, {})
        if ended:
            # the seconds that it waited for a slot, for its inputs and for memory, and its thread
            waited = run.began_at - run.placed_at, run.inputs_s, run.memory_s, run.thread
            self._record.ended(ts, run.devices, state, start, stop, waited, text)


def _conditions(annotations: Mapping[str, Any]) -> tuple[int, str]:
    """Return the number of a task's isolated run, or 0, and why it does not run again, or ""."""
    if REFUSED in annotations:
        raise DeviceFailedError(*annotations[REFUSED])
    run, most = isolated_run(annotations)
    if not may_rerun(annotations):
        return run, f"it says {RERUN}=False"
    return run, had_all_runs(run, most) if run else ""
