"""The monitor of a worker's devices: their health, and the tasks that may have harmed it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

from tornado.ioloop import PeriodicCallback

from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.errors import DriverError
from dask_devctx.worker.failures.attribution import Blame, Failure
from dask_devctx.worker.failures.health import Checkup
from dask_devctx.worker.failures.oom_retries import Retries

_LOOK_INTERVAL_MS = 1000


class Monitor:
    """Monitors the devices of one worker while tasks use them.

    Parameters
    ----------
    devices
        The worker's devices.
    synchronize
        Wait for the device before a task counts as done.
    oom_retries
        How often a task that ran out of a device's memory is tried again.
    on_failure
        Called once, on the task's thread, when a device failed.
    is_cancelled
        Given the key of a task that is about to begin, returns whether the task was cancelled.

    Attributes
    ----------
    metric
        The name of the counts that the worker's heartbeat carries.
    blame
        Decides which task errs when a device failed.
    suspects
        The tasks whose work may not be done yet.
    watch
        The tasks that are watched, since they may have broken a device before.
    checkup
        Checks the devices.
    retries
        The tasks that ran out of memory.

    Notes
    -----
    Each call of a task or method is a
    :class:`~dask_devctx.worker.failures.calls.MonitoredCall`.
    """

    metric: Final = "devctx-failures"

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        synchronize: bool,
        oom_retries: int,
        on_failure: Callable[[Failure], None],
        is_cancelled: Callable[[Hashable], bool] = lambda key: False,
    ) -> None:
        self.synchronize = synchronize
        self.is_cancelled = is_cancelled
        self.retries = Retries(devices, oom_retries)
        self.blame = Blame(synchronize, on_failure)
        self.suspects = self.blame.suspects
        self.watch = self.blame.watch
        self.checkup = Checkup(self.suspects)
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

    def seceded(self, key: Hashable) -> None:
        """Note that a task seceded from its thread: it may be waiting for other tasks."""
        self.watch.seceded(key)

    def drain(self, key: Hashable, device: Device) -> None:
        """Wait for the work of other tasks on a device: a later failure is not theirs.

        Parameters
        ----------
        key, device
            The watched task that is about to get the device.

        Raises
        ------
        DeviceFailedError, distributed.Reschedule
            The device failed; as :meth:`Blame.noticed` decides.
        """
        try:
            with device:
                self.checkup.after(key, device, wait=True)
        except DriverError as found:
            if found.code in statuses.STICKY:  # the task itself meets any other error
                raise self.blame.noticed(key, device, found, began=False) from found

    def close(self) -> None:
        """Release the monitor's resources; running calls are monitored to their end."""
        self._looking.stop()
        self.suspects.close()
        self.watch.close()
