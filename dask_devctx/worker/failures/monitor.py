"""The monitor of a worker's devices: their health, and the tasks that may have harmed it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

from tornado.ioloop import PeriodicCallback

from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.errors import DeviceFailedError, DriverError
from dask_devctx.worker.failures.attribution import Blame, Failure
from dask_devctx.worker.failures.health import Checkup
from dask_devctx.worker.failures.oom_retries import Retries
from dask_devctx.worker.failures.suspects import Suspect

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
        self.blame = Blame(synchronize, on_failure, marks)
        self.suspects = self.blame.suspects
        self.quarantine = self.blame.quarantine
        self.checkup = Checkup(self.suspects, self.blame.noticed_between)
        self._looking = PeriodicCallback(self.checkup.between, _LOOK_INTERVAL_MS)
        self._looking.start()

    def metrics(self, worker: object) -> dict[str, dict[str, int]]:
        """Return how often a context was left behind and memory ran out, by device."""
        return {
            "left-behind": {str(device): n for device, n in self.checkup.left_behind.items()},
            "out-of-memory": {str(device): n for device, n in self.retries.counted.items()},
        }

    def failures(self) -> dict[str, dict[str, int]]:
        """Return the same by the devices' UUIDs."""
        counted = {
            "context-left-behind": self.checkup.left_behind,
            "out-of-memory": self.retries.counted,
        }
        return {
            kind: {device.uuid: n for device, n in by_device.items()}
            for kind, by_device in counted.items()
        }

    def has_failed(self) -> bool:
        """Look at the devices in use; return whether one has failed, so that the worker ends."""
        for device in self._devices:
            if device._handle and self.blame.failure is None:
                self.checkup.look(device)
        return self.blame.failure is not None

    def seceded(self, key: Hashable) -> None:
        """Note that a task seceded from its thread: it may be waiting for other tasks."""
        self.suspects.seceded(key)
        self.quarantine.seceded(key)

    def drain(self, key: Hashable, device: Device) -> None:
        """Wait for the work of other tasks on all devices: a later failure is not theirs."""
        for one in dict.fromkeys((device, *self.suspects.left())):
            try:
                self.checkup.drain(one)
            except DriverError as found:
                if statuses.failed(found.code):  # the task itself meets any other error
                    raise self.blame.noticed(key, one, found, began=False) from found

    def began_aside(self, key: Hashable, devices: Sequence[Device], once: str) -> None:
        """Count a call that is no task and may use several devices."""
        self.blame.once[key] = once
        for device in devices:
            self.suspects.started(Suspect(key, device), aside=True)

    def ended_aside(self, key: Hashable, devices: Sequence[Device]) -> DeviceFailedError | None:
        """Check the devices after such a call; return the error for its caller."""
        for device in devices:
            self.suspects.ended(Suspect(key, device))
        for device in devices:
            try:
                with device:
                    self.checkup.after(key, device, wait=False)
            except DriverError as found:
                if statuses.failed(found.code):
                    self.blame.noticed(key, device, found)
        self.blame.once.pop(key, None)
        return self.blame.error_of(key)

    def close(self) -> None:
        """Release the monitor's resources; running calls are monitored to their end."""
        self._looking.stop()
        self.suspects.close()
        self.quarantine.close()
