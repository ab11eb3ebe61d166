"""The choice of the tasks that err when a device failed, and of the tasks that run again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from distributed import Reschedule, Worker

from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.errors import DeviceFailedError, DriverError
from dask_devctx.scheduler import messages
from dask_devctx.scheduler.messages import ACTION, FAILED, PROTOCOL, TOPIC
from dask_devctx.worker.failures.calls import Call, Calls

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """A failure that ended the use of the devices in this process."""

    error: DeviceFailedError
    # The error of each task and method that errs with it, the suspects, and the tasks that run
    # again although they cannot have caused it. `marks`: whether the scheduler marks the suspects.
    errors: Mapping[Hashable, DeviceFailedError] = field(default_factory=dict)
    suspects: tuple[Hashable, ...] = ()
    bystanders: tuple[Hashable, ...] = ()
    marks: bool = True

    def error_of_one_that_runs_once(self, why: str) -> DeviceFailedError:
        """Return the error of a call that did not begin, and does not run elsewhere."""
        return DeviceFailedError(*[*self.error.args[:-1], why])


class Blame:
    """Decides once which tasks of this process err with the failure of a device.

    A task errs if it is the one suspect, or if it does not run again. All others run again. The
    suspects are watched then: each runs alone, so that the guilty task is the one suspect.

    A suspect that counts as done is no exception. dask runs it again if its result is needed, since
    the result was lost with the worker.
    """

    def __init__(
        self,
        calls: Calls,
        on_failure: Callable[[Failure], None],
        marks: Callable[[], bool] = lambda: True,
    ) -> None:
        self.failure: Failure | None = None
        self._calls = calls
        self._on_failure = on_failure
        # Whether the scheduler marks suspects, so that they are watched when they run again. If
        # not, the task that notices a failure errs, so that no task runs without end.
        self._marks = marks
        self._lock = threading.Lock()

    def error_of(self, key: Hashable) -> DeviceFailedError | None:
        """Return the error of a task that errs with the failure; None for any other task."""
        return None if self.failure is None else self.failure.errors.get(key)

    def noticed(
        self, call: Call, device: Device, found: DriverError, *, began: bool = True
    ) -> DeviceFailedError | Reschedule:
        """Return the exception for a call that noticed a failure."""
        failure = self._note(call, device, found, began)
        return failure.errors.get(call.key) or Reschedule()

    def noticed_between(self, device: Device, found: DriverError) -> None:
        """Note a failure that no call noticed, such as one during a transfer."""
        self._note(None, device, found, False)

    def _note(self, who: Call | None, device: Device, found: DriverError, began: bool) -> Failure:
        with self._lock:
            if self.failure is None:
                failure = self._decided(who, device, found, began)
                self._on_failure(failure)  # first, so that tasks are marked before they run again
                self.failure = failure
            return self.failure

    def _decided(
        self, who: Call | None, device: Device, found: DriverError, began: bool
    ) -> Failure:
        lost = discovery.is_lost(device._backend, device.info)
        # Only a device's own tasks notice that it is gone.
        only = None if found.code in statuses.STICKY else device
        first = [who] if who is not None and began else []
        running = [*first, *self._calls.running_on(only)]
        hardware = lost or found.code in statuses.HARDWARE
        # A task may have several devices, and is a suspect on each of them.
        places: dict[Hashable, list[str]] = {}
        if not hardware:
            noticed = [(one.key, device) for one in first]
            for key, on in dict.fromkeys([*noticed, *self._calls.suspects(only)]):
                places.setdefault(key, []).append(str(on))
        named = [f"{key} on {' and '.join(sorted(on))}" for key, on in places.items()]
        keys = tuple(places)
        sole = keys[0] if len(keys) == 1 else None

        def error(not_again: str = "") -> DeviceFailedError:
            return DeviceFailedError(
                str(device),
                device.uuid,
                found.status,
                found.code,
                named,
                lost,
                sole is not None and self._calls.is_isolated(sole),
                not_again,
            )

        marks = self._marks()
        errors = {one.key: error(one.once) for one in running if one.once}
        if any(one.key == sole for one in running):
            errors.setdefault(sole, error())
        own = None if who is None else who.key
        if not (marks or hardware) and own is not None and (began or not {*keys} - {own}):
            errors.setdefault(own, error(_UNMARKED))
        beside = dict.fromkeys([own, *(one.key for one in running)])
        beside.pop(None, None)
        bystanders = tuple(key for key in beside if key not in keys)
        return Failure(error(), errors, keys, bystanders, marks)


_UNMARKED = "the scheduler lacks dask-devctx, so that no task can be watched in its next run"


def tell_scheduler(worker: Worker, failure: Failure) -> None:
    """Tell the scheduler which tasks may have broken a worker's devices; on any thread.

    An event goes the same way as the tasks' outcomes: if this is called before a task raises, the
    mark is there before the task runs again. A scheduler without this package only stores the
    event.
    """
    try:
        worker.log_event(TOPIC, {"action": ACTION, **_message(failure)})
    except Exception as error:  # the worker ends in any case
        logger.warning("the scheduler was not told which tasks to watch: %r", error)


async def confirm(worker: Worker, failure: Failure) -> None:
    """Wait until the scheduler knows which tasks may have broken a worker's devices.

    dask computes the results of a worker again as soon as the worker has left. The worker leaves by
    a message that may overtake the event. So this tells the scheduler again, and waits for the
    answer.
    """
    told = getattr(worker.scheduler, FAILED)
    answer = await told(address=worker.contact_address, **_message(failure))
    if answer != "OK":
        raise RuntimeError(f"the scheduler answers {FAILED} with {answer!r}")


def _message(failure: Failure) -> dict[str, object]:
    told = messages.Failure(
        failure.error.uuid,
        str(failure.error),
        failure.error.args,
        failure.suspects,
        failure.bystanders,
        list(failure.errors),
    )
    return {"protocol": PROTOCOL, **told._asdict()}
