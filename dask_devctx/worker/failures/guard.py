"""The steps around a call on its devices: its turn, the checks of the devices, and its retries.

The steps are one generator. :func:`run` does them around a function, on its thread;
:func:`run_coroutine` around a coroutine, with the steps that wait on another thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Hashable
from functools import partial
from typing import Any, Final

from distributed import Reschedule

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import (
    clear_frames,
    is_out_of_memory,
    requested_nbytes,
)
from dask_devctx.dask_internals.tasks import rejoin_if_seceded
from dask_devctx.driver import statuses
from dask_devctx.errors import DriverError
from dask_devctx.worker.failures.calls import Call
from dask_devctx.worker.failures.monitor import Monitor
from dask_devctx.worker.failures.oom_retries import fits, portable
from dask_devctx.worker.tracebacks import name_remedy, of_the_task

_POLL_S: Final = 0.02  # many tasks may wait for their turn on one event loop

# A step is one of these, or a function that may wait: its outcome, or its exception, comes back.
CALL: Final = "the call itself: its exception, or None, comes back"
PAUSE: Final = "a moment's wait for other tasks"

Steps = Generator[Any, Any, BaseException | None]


def run(steps: Steps, body: Callable[[], Any]) -> Any:
    """Return what a function returns, called where the steps say, in its device's scope."""
    result = found = error = None
    try:
        while True:
            step, found = steps.send(found), None
            try:
                if step is CALL:
                    result = body()
                elif step is PAUSE:
                    time.sleep(_POLL_S)
                else:
                    found = step()
            except BaseException as raised:
                found = raised
    except StopIteration as end:
        error = end.value
    try:
        if error is not None:
            raise error
        return result
    finally:
        del error, found  # a traceback holds this frame: make no cycle


async def run_coroutine(steps: Steps, body: Callable[[], Awaitable[Any]]) -> Any:
    """Return what a coroutine returns, awaited where the steps say; it enters its device itself."""
    result = found = error = None
    try:
        while True:
            step, found = steps.send(found), None
            try:
                if step is CALL:
                    result = await body()
                elif step is PAUSE:
                    await asyncio.sleep(_POLL_S)
                else:
                    found = await asyncio.to_thread(step)
            except BaseException as raised:
                found = raised
    except StopIteration as end:
        error = end.value
    try:
        if error is not None:
            raise error
        return result
    finally:
        del error, found


class Guard(Call):
    """One guarded call of a task, or of an actor's method; :meth:`steps` are done once."""

    def __init__(
        self,
        monitor: Monitor,
        key: Hashable,
        devices: tuple[Device, ...],
        *,
        inside: bool = True,
        movable: bool = False,
        isolated: int = 0,
        once: str = "",
        is_method: bool = False,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.key = key
        self.devices = devices
        self._monitor = monitor
        self._device = devices[0]
        self._work = monitor.calls.works[devices[0]]
        self._once = once  # why it does not run again after a device failed; "" if it may
        self._inside = inside  # whether the device stays current around the call
        self._movable = movable  # whether it may be tried on another device
        self._isolated = isolated  # the number of its isolated run; 0 for any other
        self._is_method = is_method  # nobody waits for it, and it is not tried again
        self._is_cancelled = is_cancelled
        self._waits = (monitor.synchronize or bool(isolated)) and not is_method

    def steps(self) -> Steps:
        """Yield the steps; return the exception that the call ends with, or None.

        It is ``DeviceFailedError`` if the device failed in this call, or in one that does not run
        again; ``DeviceOutOfMemoryError`` if memory ran out, also in the last retry; ``Reschedule``
        if it must run again elsewhere.
        """
        monitor, key, device = self._monitor, self.key, self._device
        calls, retries, blame = monitor.calls, monitor.retries, monitor.blame
        outcome: BaseException | None = None
        raised: BaseException | None = None
        alone = False
        try:
            while True:
                outcome = raised = None
                try:
                    alone = bool(retries.tried) and not self._is_method and retries.is_last(key)
                    if self._isolated or alone or (calls.turns and not self._is_method):
                        self.alone_on = None if self._isolated or not alone else device
                        run = self._isolated or int(alone)
                        for _ in calls.turn(self, run, self._refuse):
                            _raise((yield PAUSE))
                    if self._isolated:
                        _raise((yield partial(monitor.drain, self)))
                    if alone:
                        _raise((yield partial(retries.clear, device)))
                    if not self._begin():
                        continue
                    outcome = raised = yield CALL
                    outcome = self._after(raised)
                    if self._waits and not self._inside and outcome is None:
                        outcome = yield partial(self._checked_outside, None, wait=True)
                except BaseException as found:
                    outcome = found
                if outcome is None and blame.failure is not None:
                    outcome = blame.error_of(key)
                self.once = ""
                if outcome is not None:
                    outcome = self._blamed(outcome)
                if self._isolated or alone:
                    calls.turns.discard(self)
                if outcome is None:
                    if retries.tried:
                        retries.forget(key)
                    return None
                if isinstance(outcome, Exception) and blame.failure is None:
                    if self._is_method:
                        outcome = retries.of_a_method(key, device, outcome)
                    else:
                        make = partial(retries.make_room, key, self._movable, device, outcome)
                        outcome = (yield make) if is_out_of_memory(outcome) else make()
                        del make
                        if outcome is None:
                            _raise((yield rejoin_if_seceded))
                            continue
                if outcome is raised and raised is not None:
                    name_remedy(raised)
                else:
                    outcome.__context__ = None  # its cause says the same, and is sent to the client
                return outcome
        finally:
            del outcome, raised  # a traceback holds this frame: make no cycle

    def _refuse(self) -> None:
        """Raise if it may not begin: the devices failed, or dask needs it no more."""
        # dask ignores this of a cancelled task, unless it was requested again just now.
        if self._monitor.blame.failure is not None or self._is_cancelled():
            raise Reschedule

    def _begin(self) -> bool:
        """Count the call, check its device, and enter it if the call is ``inside``.

        False if another task was given its turn meanwhile: this call has to wait.
        """
        monitor, device, calls = self._monitor, self._device, self._monitor.calls
        if monitor.blame.failure is not None:
            raise Reschedule
        self.aside, entered = self._is_method, False
        calls.running.add(self)
        try:
            if calls.turns and not (self._isolated or self._is_method) and calls.holds_back(self):
                calls.running.discard(self)
                return False
            device.__enter__()
            entered = True
            if not self._waits:
                self._work.look(mark=False)
            if not self._inside:
                entered = False
                device.__exit__(None, None, None)
        except BaseException as error:
            calls.running.discard(self)
            if entered:
                device.__exit__(None, None, None)
            # A device that cannot be entered has not failed, unless the whole process has.
            if isinstance(error, DriverError) and (
                statuses.failed(error.code) if entered else error.code in statuses.STICKY
            ):
                raise monitor.blame.noticed(self, device, error, began=False) from error
            raise
        self.once = self._once
        return True

    def _after(self, error: BaseException | None) -> BaseException | None:
        """Return the outcome of a call that returned or raised ``error``; leave its device."""
        monitor, outcome = self._monitor, error
        if error is not None and is_out_of_memory(error):
            clear_frames(error)  # others may wait for its end, and for its memory
        monitor.calls.running.discard(self)
        self._work.ended(self.key)
        others = self.devices[1:]
        for device in others:
            monitor.calls.works[device].ended(self.key)
        try:
            if error is None or isinstance(error, Exception):
                for device in others:
                    self._check_other(device, error)
                if self._inside:
                    try:
                        self._work.check(self.key, wait=self._waits)
                    except DriverError as found:
                        outcome = self._found(found, error)
                elif error is not None or monitor.blame.failure is None:
                    outcome = self._checked_outside(error, wait=False)
                else:
                    outcome = monitor.blame.error_of(self.key) or Reschedule()
        except BaseException as found:
            outcome = found
        if self._inside:
            try:
                self._device.__exit__(None if outcome is None else type(outcome), outcome, None)
            except BaseException as found:
                outcome = found
        return outcome

    def _checked_outside(self, error: Exception | None, *, wait: bool) -> Exception | None:
        """Check the device, which is not current; return the exception that the call ends with."""
        try:
            with self._device:
                self._work.check(self.key, wait=wait)
        except DriverError as found:
            return self._found(found, error)
        return error

    def _check_other(self, device: Device, error: Exception | None) -> None:
        """Check one of the other devices; the call is blamed as if its first had failed."""
        monitor = self._monitor
        try:
            with device:
                wait = self._waits and self._inside and error is None
                monitor.calls.works[device].check(self.key, wait=wait)
        except DriverError as found:
            if found.code in statuses.STICKY:
                return  # all devices report it: the call finds it on its first device
            if statuses.failed(found.code):
                blamed = monitor.blame.noticed(self, device, found)
                blamed.__cause__ = portable(error or found)
                raise blamed from blamed.__cause__
            if error is None:
                raise
            error.add_note(f"After it, {device} was found unwell: {found}")
            return
        if error is not None and is_out_of_memory(error) and fits(requested_nbytes(error), device):
            monitor.retries.free(device)  # the call is tried again

    def _found(self, found: DriverError, error: Exception | None) -> Exception:
        if statuses.failed(found.code):
            blamed = self._monitor.blame.noticed(self, self._device, found)
            cause = error or found
            blamed.__traceback__ = cause.__traceback__ = of_the_task(cause)
            blamed.__cause__ = portable(cause)
            return blamed
        if error is None:
            return found
        error.add_note(f"After it, {self._device} was found unwell: {found}")
        return error

    def _blamed(self, error: BaseException) -> BaseException:
        """Return what a call ends with that raised ``error``, or in which a device failed."""
        if isinstance(error, DriverError) and error.code in statuses.STICKY:
            error = self._found(error, None)
        failure = self._monitor.blame.failure
        if self._is_method and failure is not None and isinstance(error, Reschedule):
            return failure.error_of_one_that_runs_once(self._once)
        return error


def _raise(found: object) -> None:
    if isinstance(found, BaseException):
        raise found
