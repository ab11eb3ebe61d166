"""The steps of a worker's set-up, each undone at its end."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module

from distributed import Worker

from dask_devctx.config.options import Options, remembered_tasks
from dask_devctx.cuda.device import Device, devices
from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.dask_internals import check_worker
from dask_devctx.dask_internals.connections import answering, unpickled_later
from dask_devctx.dask_internals.garbage import collecting_rarely
from dask_devctx.dask_internals.scheduler import LOOK_AHEAD
from dask_devctx.dask_internals.shuffles import rechunking
from dask_devctx.dask_internals.tasks import executed_by, last_told_at_once
from dask_devctx.dask_internals.worker import metric, replaced_actors, workers_log
from dask_devctx.errors import counted
from dask_devctx.scheduler.messages import HISTORY
from dask_devctx.scheduler.rows import METRIC, TRAFFIC
from dask_devctx.transfer.traffic import TrafficCounts
from dask_devctx.worker.actors import DeviceActors
from dask_devctx.worker.allocators import allocating
from dask_devctx.worker.execute import Runs
from dask_devctx.worker.failures.monitor import Monitor
from dask_devctx.worker.landing import landing_on
from dask_devctx.worker.metrics.history import History
from dask_devctx.worker.metrics.prometheus import exposed
from dask_devctx.worker.metrics.record import Record
from dask_devctx.worker.peers import exchanging
from dask_devctx.worker.peers.transfers import PeerTransfers
from dask_devctx.worker.placement.admission import Admission
from dask_devctx.worker.placement.balance import giving_back
from dask_devctx.worker.placement.placement import Placement
from dask_devctx.worker.rechunks import Rechunks
from dask_devctx.worker.threads import device_threads, threads_without_a_device
from dask_devctx.worker.values.accounting import limit_nbytes
from dask_devctx.worker.values.store import Store, storing


class DeviceExtension:
    """While it is open, the tasks of one worker run on its devices.

    If ``failure`` is set, the worker does not have the devices, and continues without them: tasks
    that ask for a device fail with this error, and all others run as before. Where the worker
    ``had`` devices, others that name none fail too: libraries would use the first GPU.
    """

    def __init__(
        self,
        worker: Worker,
        options: Options,
        own: tuple[Device, ...],
        failure: Exception | None = None,
        *,
        had: bool,
    ) -> None:
        self._worker = worker
        self.failure = failure
        self.store: Store | None = None
        self.limits: dict[Device, int] = {}
        check_worker(worker)
        with ExitStack() as steps:  # each step is undone at the end, and when a later one fails
            history = 0
            try:
                history = remembered_tasks()
                used = self._devices(steps, options, own)
            except Exception as error:
                self.failure, used = self.failure or error, ()
            if self.failure is not None and not had:
                options = replace(options, unannotated="leave")
            self.admission = Admission(used, options.tasks_per_device, self.limits)
            self.placement = Placement(self.admission, options.policy)
            self.history = History(history, used, lambda: worker.scheduler_delay)
            steps.enter_context(answering(worker, {HISTORY: self.history.answer}, to_the_end=True))
            self.record = Record(self.admission, self.history, self._counts)
            steps.enter_context(metric(worker, METRIC, self.record.metrics))
            self.monitor = Monitor(worker, used, options, self.history)
            steps.callback(self.monitor.close)
            traffic = self.traffic = TrafficCounts()
            traffic.on_copy, self.history.refresh = self.history.copied, traffic.measure
            steps.enter_context(metric(worker, TRAFFIC, lambda worker: traffic.rows()))
            if used:
                self.store = steps.enter_context(
                    storing(
                        worker,
                        used,
                        options,
                        traffic,
                        is_alone_on=self.monitor.calls.is_alone_on,
                        on_failure=self.monitor.noticed,
                    )
                )
            steps.enter_context(unpickled_later(is_out_of_memory))
            rechunks = Rechunks(worker, used, self.store, traffic)
            steps.enter_context(rechunking(worker, rechunks))
            self.peers = PeerTransfers(
                worker,
                used,
                options,
                self.limits,
                self.store,  # type: ignore[arg-type]  # nothing needs it without devices
                traffic,
                has_failed=self.monitor.has_failed,
            )
            steps.enter_context(exchanging(self.peers))
            self.monitor.retries.peers = self.peers
            if self.store is not None:
                self.store.spill.stagings = self.peers.stagings
                self.monitor.retries.spill = self.store.spill
            steps.enter_context(exposed(self.record, traffic.rows))
            self.pools = steps.enter_context(device_threads(worker, self.admission))
            actors = DeviceActors(worker, self.monitor, move_inputs=options.move_inputs)
            steps.enter_context(replaced_actors(worker, actors))
            self.runs = Runs(
                worker,
                options,
                self.placement,
                self.monitor,
                self.record,
                actors,
                self.pools,
                store=self.store,
                failure=self.failure,
            )
            if used:
                threads, part = options.cpu_threads, len(used) / max(len(devices()), len(used))
                steps.enter_context(threads_without_a_device(worker, threads, part))
            steps.enter_context(collecting_rarely())
            steps.enter_context(last_told_at_once(worker))
            steps.enter_context(executed_by(worker, self.runs.begin, self.runs.end))
            steps.enter_context(giving_back(worker, self.admission))
            self._steps = steps.pop_all()

    def close(self) -> None:
        """Restore the worker; running tasks run to their end."""
        self._steps.close()

    def _devices(
        self, steps: ExitStack, options: Options, devices: tuple[Device, ...]
    ) -> tuple[Device, ...]:
        """Use all devices of the worker, or none of them."""
        if not devices:
            return ()
        with ExitStack() as taking:
            limit = options.device_memory_limit
            self.limits = {  # without a limit, tasks may reserve all memory of a device
                one: limit_nbytes(one, limit) or limit_nbytes(one, 1.0) or 0 for one in devices
            }
            taking.enter_context(landing_on(self._worker, devices))
            for module in options.pre_import or ():
                import_module(module)
            taking.enter_context(allocating(self._worker, devices, options))
            steps.push(taking.pop_all())
        return devices

    def log_devices(self) -> None:
        """Say which devices the worker uses; warn if dask gives it too few tasks for them."""
        used = self.placement.devices
        names = ", ".join(f"{device.info} {device.name or ''}".rstrip() for device in used)
        workers_log.info("This worker uses %s: %s", counted(len(used), "device"), names)
        worker, at_once = self._worker, len(used) * self.admission.tasks_per_device
        nthreads, enough = worker.state.nthreads, LOOK_AHEAD * at_once
        if nthreads < 2 * at_once:
            workers_log.warning(
                "%s: With nthreads=%s, dask gives this worker too few tasks to keep its devices "
                "busy. Set threads_per_worker, or --nthreads, to %s, LocalDeviceCluster's default",
                *(worker.address, nthreads, enough),
            )

    def _counts(self, device: Device) -> dict[str, int | None]:
        """Return the counts of a device that its tasks' record does not have."""
        counts = {} if self.store is None else self.store.spill.counts(device)
        return {"out_of_memory": self.monitor.retries.counted[device], **counts}
