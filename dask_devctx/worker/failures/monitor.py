"""The monitor of a worker's devices: their health, and the tasks that may have harmed it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Final

from tornado.ioloop import PeriodicCallback

from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.errors import DevctxError, DeviceFailedError, DriverError
from dask_devctx.worker.failures.attribution import Blame, Failure
from dask_devctx.worker.failures.calls import Call, Calls, Work
from dask_devctx.worker.failures.oom_retries import Retries

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_MS = 1000


class Monitor:
    """Monitors the devices of one worker while tasks use them.

    Each call of a task or method has a :class:`~dask_devctx.worker.failures.guard.Guard`.
    """

    metric: Final = "devctx-failures"

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        synchronize: bool,
        oom_retries: int,
        on_failure: Callable[[Failure], None],
        marks: Callable[[], bool] = lambda: True,
    ) -> None:
        self.synchronize = synchronize
        self._devices = tuple(devices)
        self.retries = Retries(devices, oom_retries)
        self.calls = Calls()
        self.blame = Blame(self.calls, on_failure, marks)
        self._looking = PeriodicCallback(self._look_at_used, _LOOK_INTERVAL_MS)
        self._looking.start()

    def metrics(self, worker: object) -> dict[str, dict[str, int]]:
        """Return how often a context was left behind and memory ran out, by device."""
        left, out_of_memory = self._counts()
        return {
            "left-behind": {str(device): n for device, n in left.items()},
            "out-of-memory": {str(device): n for device, n in out_of_memory.items()},
        }

    def failures(self) -> dict[str, dict[str, int]]:
        """Return the same by the devices' UUIDs."""
        kinds = "context-left-behind", "out-of-memory"
        return {
            kind: {device.uuid: n for device, n in counts.items()}
            for kind, counts in zip(kinds, self._counts(), strict=True)
        }

    def _counts(self) -> tuple[dict[Device, int], dict[Device, int]]:
        left = {one.device: one.left_behind for one in self.calls.all_work() if one.left_behind}
        return left, dict(self.retries.counted)

    def _look_at_used(self) -> None:
        for work in self.calls.all_work():
            if work.left or (work.device._handle and self.calls.running_on(work.device)):
                self._look(work)

    def has_failed(self) -> bool:
        """Look at the devices in use; return whether one has failed, so that the worker ends."""
        for device in self._devices:
            if device._handle and self.blame.failure is None:
                self._look(self.calls.works[device])
        return self.blame.failure is not None

    def _look(self, work: Work) -> None:
        try:
            with work.device:
                work.look(mark=True)
        except DriverError as error:
            if statuses.failed(error.code):
                self.blame.noticed_between(work.device, error)
        except DevctxError as error:
            logger.debug("the progress of %s is unknown: %s", work.device, error)

    def drain(self, call: Call) -> None:
        """Wait for the work of other tasks on all devices: a later failure is not theirs."""
        left = (work.device for work in self.calls.all_work() if work.left)
        for device in dict.fromkeys((call.devices[0], *left)):
            try:
                with device:
                    self.calls.works[device].wait()
            except DriverError as found:
                if statuses.failed(found.code):  # the task itself meets any other error
                    raise self.blame.noticed(call, device, found, began=False) from found

    def began_aside(self, key: Hashable, devices: Sequence[Device], once: str) -> Call:
        """Count a call that is no task and may use several devices."""
        call = Call(key, tuple(devices), once=once, aside=True)
        if devices:
            self.calls.running.add(call)
        return call

    def ended_aside(self, call: Call) -> DeviceFailedError | None:
        """Check the devices after such a call; return the error for its caller."""
        self.calls.running.discard(call)
        works = [self.calls.works[device] for device in call.devices]
        for work in works:
            work.ended(call.key)
        for work in works:
            try:
                with work.device:
                    work.check(call.key, wait=False)
            except DriverError as found:
                if statuses.failed(found.code):
                    self.blame.noticed(call, work.device, found)
        return self.blame.error_of(call.key)

    def close(self) -> None:
        """Release the monitor's resources; running calls are monitored to their end."""
        self._looking.stop()
        self.calls.close()
