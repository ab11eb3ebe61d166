"""The choice of the tasks that err when a device failed, and of the tasks that run again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from distributed import Reschedule, Worker

from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.errors import DeviceFailedError, DriverError
from dask_devctx.scheduler.suspects import ACTION, TOPIC
from dask_devctx.worker.failures.quarantine import Watch
from dask_devctx.worker.failures.suspects import Suspect, Suspects

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """A failure that ended the use of the devices in this process.

    Parameters
    ----------
    error
        The error of the device.
    errors
        The error of each blamed task, by key.
    suspects
        The keys of all tasks that may have caused it.
    """

    error: DeviceFailedError
    errors: Mapping[Hashable, DeviceFailedError]
    suspects: tuple[Hashable, ...]


class Blame:
    """Decides once which tasks of this process err with the failure of a device.

    Parameters
    ----------
    synchronize
        Whether the worker waits for the device after each task.
    on_failure
        Called once, before any task errs, on the thread of the task that noticed the failure.

    Attributes
    ----------
    failure
        The failure, or None.
    suspects
        The tasks whose work may not be done yet.
    watch
        The watched tasks: they may have broken a device before.

    Notes
    -----
    The running watched tasks are blamed; if there are none, the task that noticed the failure is.
    So each failure costs a task, and a task that always breaks its device is not run endlessly. One
    failure costs no task: a failure that a watched task finds before it gets its device. The tasks
    that may have caused it are suspects, and are watched when they run again.
    """

    def __init__(self, synchronize: bool, on_failure: Callable[[Failure], None]) -> None:
        self.failure: Failure | None = None
        self.suspects = Suspects()
        self.watch = Watch()
        self._synchronize = synchronize
        self._on_failure = on_failure
        self._lock = threading.Lock()

    def refuse_after_failure(self) -> None:
        """Raise if this process's devices failed, so that no task begins or ends well here.

        Raises
        ------
        distributed.Reschedule
            The devices failed.
        """
        if self.failure is not None:
            raise Reschedule

    def error_of(self, key: Hashable) -> DeviceFailedError | None:
        """Return the error of a blamed task; None for any other task."""
        return None if self.failure is None else self.failure.errors.get(key)

    def noticed(
        self, key: Hashable, device: Device, found: DriverError, *, began: bool = True
    ) -> DeviceFailedError | Reschedule:
        """Return the exception for a task that noticed a failure.

        Parameters
        ----------
        key, device
            The task and its device.
        found
            The driver's error.
        began
            Whether the task had its device.
        """
        with self._lock:
            if self.failure is None:
                failure = self._decided(Suspect(key, device), found, began)
                self._on_failure(failure)  # first, so that tasks are marked before they run again
                self.failure = failure
        return self.failure.errors.get(key) or Reschedule()

    def noticed_between(self, device: Device, found: DriverError) -> None:
        """Note a failure that no task noticed, such as one during a transfer: no task errs."""
        with self._lock:
            if self.failure is None:
                suspects = [one for one in self.suspects.named(None, device) if one.key is not None]
                error = self._error(device, found, suspects, False)
                failure = Failure(error, {}, tuple(dict.fromkeys(one.key for one in suspects)))
                self._on_failure(failure)
                self.failure = failure

    def _decided(self, who: Suspect, found: DriverError, began: bool) -> Failure:
        suspects = self.suspects.named(*who)
        # Only a device's own tasks notice that it is gone.
        watched = [
            one
            for one in self.watch.running()
            if found.code in statuses.STICKY or one.device is who.device
        ]
        if not began and set(suspects) <= {who, *watched}:
            began = True  # there are no other suspects to watch
        blamed = watched or ([who] if began else [])
        named = watched or suspects[0 if began else 1 :]
        errors = {
            one.key: self._error(
                who.device, found, [one, *(other for other in named if other != one)], bool(watched)
            )
            for one in blamed
        }
        error = next(iter(errors.values()), None)
        return Failure(
            error or self._error(who.device, found, named, False),
            errors,
            tuple(dict.fromkeys(one.key for one in suspects)),
        )

    def _error(
        self, device: Device, found: DriverError, suspects: Sequence[Suspect], watched: bool
    ) -> DeviceFailedError:
        return DeviceFailedError(
            str(device),
            device.uuid,
            found.status,
            found.code,
            [str(suspect) for suspect in suspects],
            self._synchronize,
            discovery.is_lost(device._backend, device.info),
            watched,
        )


def tell_scheduler(worker: Worker, failure: Failure) -> None:
    """Tell the scheduler which tasks may have broken a worker's devices; on any thread.

    Parameters
    ----------
    worker
        The worker.
    failure
        The failure. The scheduler marks its suspects, so that they are watched when they run again.
        Its error is for readers of the events of ``devctx``.

    Notes
    -----
    An event goes the same way as the tasks' outcomes: if this is called before a task raises, the
    mark is there before the task runs again. A scheduler without this package only stores the
    event.
    """
    event = {
        "action": ACTION,
        "device": failure.error.uuid,
        "error": str(failure.error),
        "suspects": list(failure.suspects),
    }
    try:
        worker.log_event(TOPIC, event)
    except Exception as error:  # the worker ends in any case
        logger.warning("the scheduler was not told which tasks to watch: %r", error)
