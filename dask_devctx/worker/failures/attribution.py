"""Which tasks err when a device failed, and which are run again."""

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
    """What ended a process' use of its devices.

    Parameters
    ----------
    error
        What happened.
    errors
        What each of the tasks that are to blame errs with, by key.
    suspects
        The keys of all tasks that may have caused it.
    """

    error: DeviceFailedError
    errors: Mapping[Hashable, DeviceFailedError]
    suspects: tuple[Hashable, ...]


class Blame:
    """Decides which tasks of this process err with the failure of a device, once.

    Parameters
    ----------
    synchronize
        Whether each task is waited for.
    on_failure
        Called once, on the thread of the task that noticed, before any task is told.

    Attributes
    ----------
    failure
        What happened, or None.
    suspects
        The tasks whose work may not be done yet.
    watch
        Those tasks of them that may have broken a device before.

    Notes
    -----
    The watched tasks that run are to blame; where there are none, it is the task that noticed. So
    each failure costs a task, and one that always kills is not run for ever. One failure costs
    none: that which a watched task finds before it was given its device. Whoever it was is a
    suspect now, and is watched when it is run again.
    """

    def __init__(self, synchronize: bool, on_failure: Callable[[Failure], None]) -> None:
        self.failure: Failure | None = None
        self.suspects = Suspects()
        self.watch = Watch()
        self._synchronize = synchronize
        self._on_failure = on_failure
        self._lock = threading.Lock()

    def refuse_after_failure(self) -> None:
        """Let no task begin, or end well, in a process whose devices failed.

        Raises
        ------
        distributed.Reschedule
            They failed.
        """
        if self.failure is not None:
            raise Reschedule

    def error_of(self, key: Hashable) -> DeviceFailedError | None:
        """Return the error of a task that is to blame, or None."""
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
            What the driver said.
        began
            Whether the task had been given its device.
        """
        with self._lock:
            if self.failure is None:
                failure = self._decided(Suspect(key, device), found, began)
                self._on_failure(failure)  # first: tasks that run again are marked by then
                self.failure = failure
        return self.failure.errors.get(key) or Reschedule()

    def noticed_between(self, device: Device, found: DriverError) -> None:
        """Note a failure that no task noticed, such as one while a value is sent: nobody errs."""
        with self._lock:
            if self.failure is None:
                suspects = [one for one in self.suspects.named(None, device) if one.key is not None]
                error = self._error(device, found, suspects, False)
                failure = Failure(error, {}, tuple(dict.fromkeys(one.key for one in suspects)))
                self._on_failure(failure)
                self.failure = failure

    def _decided(self, who: Suspect, found: DriverError, began: bool) -> Failure:
        suspects = self.suspects.named(*who)
        # A device that is gone is seen to be by its own tasks only.
        watched = [
            one
            for one in self.watch.running()
            if found.code in statuses.STICKY or one.device is who.device
        ]
        if not began and set(suspects) <= {who, *watched}:
            began = True  # there is nobody else that watching would find
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
        What happened. The scheduler marks its suspects, so that they are watched when they are run
        again; its error is for the readers of the events of ``devctx``.

    Notes
    -----
    An event goes the same way as the tasks' outcomes: if this is called before a task raises, the
    mark is there before the task is run again. A scheduler that does not know this package keeps it
    with its other events.
    """
    event = {"action": ACTION, "error": str(failure.error), "suspects": list(failure.suspects)}
    try:
        worker.log_event(TOPIC, event)
    except Exception as error:  # the worker ends all the same
        logger.warning("the scheduler was not told which tasks to watch: %r", error)
