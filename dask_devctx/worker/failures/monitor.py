"""What stands around each task on a device: is the device well afterwards, and was there room."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any, Final

from distributed import Reschedule
from tornado.ioloop import PeriodicCallback

from dask_devctx.cuda import suspending
from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.errors import DeviceFailedError, DriverError
from dask_devctx.worker.failures.attribution import Blame, Failure
from dask_devctx.worker.failures.charge import Charge
from dask_devctx.worker.failures.health import Checkup
from dask_devctx.worker.failures.oom_retries import Retries, portable
from dask_devctx.worker.failures.suspects import Suspect

_POLL_S = 0.02  # many may be waiting for their turn on one event loop
_LOOK_INTERVAL_MS = 1000


class Guard:
    """Watches over the tasks of one worker's devices.

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
        Says, given a task's key when its turn comes, that nobody wants it any more.

    Attributes
    ----------
    metric
        The name of what the worker's heartbeat tells of it.
    blame
        Who errs when a device failed.
    retries
        The tasks that ran out of memory.
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
        self._suspects = self.blame.suspects
        self._watch = self.blame.watch
        self._checkup = Checkup(self._suspects)
        self._looking = PeriodicCallback(self._checkup.between, _LOOK_INTERVAL_MS)
        self._looking.start()

    def metrics(self, worker: object) -> dict[str, dict[str, int]]:
        """Return how often a context was left behind and memory ran out, by device."""
        return {
            "left-behind": {str(device): n for device, n in self._checkup.left_behind.items()},
            "out-of-memory": {str(device): n for device, n in self.retries.counted.items()},
        }

    def seceded(self, key: Hashable) -> None:
        """Note that a task left its thread to others: it may be waiting for them."""
        self._watch.seceded(key)

    def close(self) -> None:
        """Give back what it holds; tasks that still run are watched over to their end."""
        self._looking.stop()
        self._suspects.close()
        self._watch.close()

    # -- around a task

    def run(self, charge: Charge, device: Device, fn: Callable[[Any], Any], data: Any) -> Any:
        """Return what a task returns, run on its device.

        Parameters
        ----------
        charge
            The task.
        device
            Its device.
        fn
            What it does.
        data
            What that is called with.

        Raises
        ------
        DeviceFailedError
            The device failed in this task, or it is the first to notice it.
        DeviceOutOfMemoryError
            There was not enough memory, also when it was tried again.
        distributed.Reschedule
            It is to be run again: on another device, or in another process since this one's
            devices failed.
        """
        if charge.watched and charge.is_coroutine:
            return self._awaited(charge, device, fn, data)  # its turn is waited for elsewhere
        once = self._once_watched if charge.watched else self._once
        while True:
            try:
                result = once(charge, device, fn, data)
            except Exception as error:
                self._try_again_or_raise(charge, device, error)
            else:
                if inspect.iscoroutine(result):
                    return self._awaited(charge, device, fn, data, result)
                self.retries.forget(charge.key)
                return suspending.within(device, result)

    def _once(self, charge: Charge, device: Device, fn: Callable[[Any], Any], data: Any) -> Any:
        key = charge.key
        self.blame.refuse_after_failure()
        self._suspects.started(key, device)
        ended = False
        try:
            with device:
                if not self.synchronize:
                    self._checkup.before(device)
                try:
                    result = fn(data)
                except Exception as error:
                    ended = self._ended(key, device)
                    self._check(charge, device, error)
                    raise
                if not inspect.iscoroutine(result):
                    ended = self._ended(key, device)
                    self._check(charge, device, None)
            return result
        except DriverError as error:
            failure = self._failure_in(key, device, error)
            if failure is None:
                raise
            raise failure from error
        finally:
            if not ended:
                self._suspects.ended(key, device)

    def _ended(self, key: Hashable, device: Device) -> bool:
        self._suspects.ended(key, device)
        return True

    def _once_watched(
        self, charge: Charge, device: Device, fn: Callable[[Any], Any], data: Any
    ) -> Any:
        try:
            for _ in self._watch.turns(charge.key, self.blame.refuse_after_failure):
                time.sleep(_POLL_S)
            self._drain(charge, device)
            self._watch.began(Suspect(charge.key, device))
            result = self._once(charge, device, fn, data)
            self._raise_if_blamed(charge)
            return result
        finally:
            self._watch.ended(charge.key)

    # -- around a coroutine

    async def _awaited(
        self,
        charge: Charge,
        device: Device,
        fn: Callable[[Any], Any],
        data: Any,
        given: Coroutine[Any, Any, Any] | None = None,
    ) -> Any:
        """As :meth:`run`, for a coroutine function, which may have given its first coroutine."""
        step = self._step_watched if charge.watched else self._step
        running = given
        while True:
            try:
                result = await step(charge, device, fn, data, running)
            except Exception as error:
                failure = self._failure_in(charge.key, device, error)
                if failure is not None:
                    raise failure from error
                self._try_again_or_raise(charge, device, error)
                running = None
            else:
                self.retries.forget(charge.key)
                return result

    async def _step(
        self,
        charge: Charge,
        device: Device,
        fn: Callable[[Any], Any],
        data: Any,
        running: Coroutine[Any, Any, Any] | None,
    ) -> Any:
        self._suspects.started(charge.key, device)
        try:
            if running is None:
                self.blame.refuse_after_failure()
                with device:
                    running = fn(data)  # what it needs is brought again, too
            result = await suspending.within(device, running)
        finally:
            self._suspects.ended(charge.key, device)
        if not charge.watched:
            self.blame.refuse_after_failure()
        with device:
            self._check(charge, device, None, wait=False)
        if (self.synchronize or charge.watched) and not charge.is_method:
            # on another thread: this one runs the worker's event loop
            await asyncio.to_thread(self._wait, charge, device)
        return result

    async def _step_watched(
        self,
        charge: Charge,
        device: Device,
        fn: Callable[[Any], Any],
        data: Any,
        running: Coroutine[Any, Any, Any] | None,
    ) -> Any:
        try:
            for _ in self._watch.turns(charge.key, self.blame.refuse_after_failure):
                await asyncio.sleep(_POLL_S)
            await asyncio.to_thread(self._drain, charge, device)
            self._watch.began(Suspect(charge.key, device))
            result = await self._step(charge, device, fn, data, running)
            self._raise_if_blamed(charge)
            return result
        finally:
            self._watch.ended(charge.key)

    def _wait(self, charge: Charge, device: Device) -> None:
        with device:
            self._check(charge, device, None)

    # -- is the device well

    def _drain(self, charge: Charge, device: Device) -> None:
        """Wait for what others gave the device: what goes wrong after it, is not theirs."""
        try:
            with device:
                self._checkup.after(charge.key, device, wait=True)
        except DriverError as found:
            if found.code in statuses.STICKY:  # anything else meets the task, too
                raise self.blame.noticed(charge.key, device, found, began=False) from found

    def _raise_if_blamed(self, charge: Charge) -> None:
        """Raise what the others were told that a task errs with, else nobody does."""
        error = self.blame.error_of(charge.key)
        if error is not None:
            raise error

    def _check(
        self, charge: Charge, device: Device, body: Exception | None, *, wait: bool = True
    ) -> None:
        """Look at the device after a task, inside its scope; ``body`` is what the task raised."""
        wait = wait and not charge.is_method and (self.synchronize or charge.watched)
        try:
            self._checkup.after(charge.key, device, wait=wait)
        except DriverError as found:
            if not statuses.failed(found.code):
                if body is None:
                    raise
                body.add_note(f"After it, {device} was found unwell: {found}")
                return
            error = self.blame.noticed(charge.key, device, found)
            raise error from portable(body or found)

    def _failure_in(
        self, key: Hashable, device: Device, error: Exception
    ) -> DeviceFailedError | Reschedule | None:
        """Return the failure that a driver call around the task ran into, or None."""
        if not isinstance(error, DriverError) or error.code not in statuses.STICKY:
            return None
        return self.blame.noticed(key, device, error)

    def _try_again_or_raise(self, charge: Charge, device: Device, error: Exception) -> None:
        if self.blame.failure is not None or charge.is_method:
            raise error
        self.retries.make_room_or_raise(charge.key, charge.movable, device, error)
