"""The monitor of a worker's devices: their health, and which tasks err when one has failed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final
from weakref import WeakKeyDictionary

from distributed import Reschedule, Status, Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx.config.options import Options
from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.errors import DevctxError, DeviceFailedError, DriverError
from dask_devctx.scheduler.messages import Failure
from dask_devctx.worker.failures.oom_retries import Retries
from dask_devctx.worker.failures.running_calls import Call, Calls
from dask_devctx.worker.failures.shutdown import begin_the_end
from dask_devctx.worker.metrics.history import History

_LOOK_INTERVAL_MS: Final = 1000

# The calls of a worker, also those of a plugin before: they break the same devices.
_calls: WeakKeyDictionary[Worker, Calls] = WeakKeyDictionary()


class Monitor:
    """Monitors the devices of one worker while tasks use them, and decides once who errs.

    A task errs with a device's failure if it is the one suspect, or if it does not run again. All
    others run again. The suspects run isolated then, each alone, so that the guilty task is the
    one suspect. A suspect that counts as done is no exception: dask runs it again if its result is
    needed, since the result was lost with the worker.

    Each call of a task or method has a :class:`~dask_devctx.worker.guard.Guard`.
    """

    def __init__(
        self, worker: Worker, devices: Sequence[Device], options: Options, history: History
    ) -> None:
        self.retries = Retries(options.oom_retries, history)
        self.synchronize = options.synchronize
        self.calls = _calls.setdefault(worker, Calls())
        self._devices = tuple(devices)
        self.worker = worker
        self._looking = PeriodicCallback(self._look_at_used, _LOOK_INTERVAL_MS)
        self._looking.start()

    def close(self) -> None:
        """Release the monitor's resources; running calls are monitored to their end."""
        self._looking.stop()
        self.calls.closed = self.worker.status is Status.closing

    # -- health

    def _look_at_used(self) -> None:
        # All devices report a sticky error of one: a look at an idle one would name that one.
        for device, work in tuple(self.calls.works.items()):
            if work.left or self.calls.running_on(device):
                self._look(device)

    def has_failed(self, *first: Device) -> bool:
        """Look at all devices; return whether one has failed, so that the worker ends."""
        for device in (*first, *self._devices):
            self._look(device)
        return self.calls.failure is not None

    def _look(self, device: Device) -> None:
        if not device._handle or self.calls.failure is not None:
            return
        try:
            with device:
                self.calls.works[device].look(mark=True)
        except DevctxError as error:
            if isinstance(error, DriverError) and statuses.failed(error.code):
                self.noticed(device, error)

    # -- a failure

    def noticed(
        self, device: Device, found: DriverError, call: Call | None = None, *, began: bool = True
    ) -> DeviceFailedError | Reschedule:
        """Return the exception for a call that noticed a failure; none did during a transfer."""
        with self.calls.lock:
            if self.calls.failure is None:
                failure = self._decided(device, found, call, began)
                # First, so that tasks are marked before they run again.
                begin_the_end(self.worker, failure)
                self.calls.failure = failure
        return self.calls.failure.error_of(call and call.key) or Reschedule()

    def _decided(
        self, device: Device, found: DriverError, call: Call | None, began: bool
    ) -> Failure:
        lost = discovery.is_lost(device._backend, device.info)
        # Only a device's own tasks notice that it is gone.
        only = None if found.code in statuses.STICKY else device
        first = [call] if call is not None and began else []
        running = [*first, *self.calls.running_on(only)]
        hardware = lost or found.code in statuses.HARDWARE
        # A task may have several devices, and is a suspect on each of them.
        places: dict[Hashable, list[str]] = {}
        if not hardware:
            noticed = ((one.key, device) for one in first)
            for key, on in dict.fromkeys([*noticed, *self.calls.suspects(only)]):
                places.setdefault(key, []).append(str(on))
        named = [f"{key} on {' and '.join(sorted(on))}" for key, on in places.items()]
        keys = tuple(places)
        sole = keys[0] if len(keys) == 1 else None
        erred = {one.key: one.once for one in running if one.once}
        if any(one.key == sole for one in running):
            erred.setdefault(sole, "")
        turns = tuple(self.calls.turns)
        watched = any(one.key == sole and one.alone_on is None for one in turns)
        beside = dict.fromkeys(one.key for one in (call, *running) if one is not None)
        bystanders = tuple(key for key in beside if key not in keys)
        failed = str(device), device.uuid, found.status, found.code
        fields = *failed, named, lost, watched, self.worker.address, ""
        return Failure(fields, keys, bystanders, list(erred.items()))
