"""The monitor of a worker's devices: their health, and which tasks err when one has failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Final

from distributed import Reschedule, Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.errors import DevctxError, DeviceFailedError, DriverError
from dask_devctx.scheduler.messages import Failure
from dask_devctx.worker.failures.calls import Call, Calls, Work
from dask_devctx.worker.failures.oom_retries import Retries
from dask_devctx.worker.failures.shutdown import begin_the_end

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_MS: Final = 1000


class Monitor:
    """Monitors the devices of one worker while tasks use them, and decides once who errs.

    A task errs with a device's failure if it is the one suspect, or if it does not run again. All
    others run again. The suspects are watched then: each runs alone, so that the guilty task is the
    one suspect. A suspect that counts as done is no exception: dask runs it again if its result is
    needed, since the result was lost with the worker.

    Each call of a task or method has a :class:`~dask_devctx.worker.failures.guard.Guard`.
    """

    answered: Callable[[], Awaitable[None]]  # waits for the callers of the worker's actors

    def __init__(
        self,
        worker: Worker,
        devices: Sequence[Device],
        retries: Retries,
        *,
        synchronize: bool,
    ) -> None:
        self.failure: Failure | None = None
        self.retries = retries
        self.synchronize = synchronize
        self.calls = Calls()
        self._devices = tuple(devices)
        self._worker = worker
        self._lock = threading.Lock()
        self._looking = PeriodicCallback(self._look_at_used, _LOOK_INTERVAL_MS)
        self._looking.start()

    def close(self) -> None:
        """Release the monitor's resources; running calls are monitored to their end."""
        self._looking.stop()
        self.calls.close()

    # -- health

    def _look_at_used(self) -> None:
        for work in self.calls.all_work():
            if work.left or (work.device._handle and self.calls.running_on(work.device)):
                self._look(work)

    def has_failed(self) -> bool:
        """Look at the devices in use; return whether one has failed, so that the worker ends."""
        for device in self._devices:
            if device._handle and self.failure is None:
                self._look(self.calls.works[device])
        return self.failure is not None

    def _look(self, work: Work) -> None:
        try:
            with work.device:
                work.look(mark=True)
        except DriverError as error:
            if statuses.failed(error.code):
                self.noticed_between(work.device, error)
        except DevctxError as error:
            logger.debug("the progress of %s is unknown: %s", work.device, error)

    # -- a failure

    def noticed(
        self, call: Call, device: Device, found: DriverError, *, began: bool = True
    ) -> DeviceFailedError | Reschedule:
        """Return the exception for a call that noticed a failure."""
        failure = self._note(call, device, found, began)
        return failure.error_of(call.key) or Reschedule()

    def noticed_between(self, device: Device, found: DriverError) -> None:
        """Note a failure that no call noticed, such as one during a transfer."""
        self._note(None, device, found, False)

    def _note(self, who: Call | None, device: Device, found: DriverError, began: bool) -> Failure:
        with self._lock:
            if self.failure is None:
                failure = self._decided(who, device, found, began)
                # First, so that tasks are marked before they run again.
                begin_the_end(self._worker, failure, self.answered)
                self.failure = failure
            return self.failure

    def _decided(
        self, who: Call | None, device: Device, found: DriverError, began: bool
    ) -> Failure:
        lost = discovery.is_lost(device._backend, device.info)
        # Only a device's own tasks notice that it is gone.
        only = None if found.code in statuses.STICKY else device
        first = [who] if who is not None and began else []
        running = [*first, *self.calls.running_on(only)]
        hardware = lost or found.code in statuses.HARDWARE
        # A task may have several devices, and is a suspect on each of them.
        places: dict[Hashable, list[str]] = {}
        if not hardware:
            noticed = [(one.key, device) for one in first]
            for key, on in dict.fromkeys([*noticed, *self.calls.suspects(only)]):
                places.setdefault(key, []).append(str(on))
        named = [f"{key} on {' and '.join(sorted(on))}" for key, on in places.items()]
        keys = tuple(places)
        sole = keys[0] if len(keys) == 1 else None
        erred = {one.key: one.once for one in running if one.once}
        if any(one.key == sole for one in running):
            erred.setdefault(sole, "")
        own = None if who is None else who.key
        watched = sole is not None and self.calls.is_isolated(sole)
        beside = dict.fromkeys([*([own] if who else []), *(one.key for one in running)])
        return Failure(
            (
                *(str(device), device.uuid, found.status, found.code),
                *(named, lost, watched, ""),
            ),
            keys,
            tuple(key for key in beside if key not in keys),
            list(erred.items()),
        )
