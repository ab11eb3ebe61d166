"""The steps around a call on its devices: its turn, the checks of the devices, and its retries.

The steps are one generator. :func:`run` does them around a function, on its thread;
:func:`run_coroutine` around a coroutine, with the steps that wait on another thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Hashable
from functools import partial
from typing import Any, Final

from distributed import Reschedule

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import (
    clear_frames,
    is_out_of_memory,
    release_caches,
    requested_nbytes,
)
from dask_devctx.dask_internals.threads import rejoin_if_seceded
from dask_devctx.driver import statuses
from dask_devctx.errors import DevctxError, DriverError
from dask_devctx.worker.failures.monitor import Monitor
from dask_devctx.worker.failures.oom_retries import fits, portable
from dask_devctx.worker.failures.suspects import Suspect
from dask_devctx.worker.tracebacks import name_remedy, of_the_task

_POLL_S: Final = 0.02  # many tasks may wait for their turn on one event loop

# A step is one of these, or a function that may wait: its outcome, or its exception, comes back.
CALL: Final = "the call itself: its exception, or None, comes back"
PAUSE: Final = "a moment's wait for other tasks"

Steps = Generator[Any, Any, BaseException | None]


def run(steps: Steps, monitor: Monitor, body: Callable[[], Any]) -> Any:
    """Return what a function returns, called where the steps say, in its device's scope."""
    result = found = error = None
    try:
        while True:
            step, found = steps.send(found), None
            try:
                if step is CALL:
                    result = body()
                elif step is PAUSE:
                    monitor.quarantine.wait(_POLL_S)
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


class Guard:
    """One guarded call of a task, or of an actor's method; :meth:`steps` are done once."""

    __slots__ = (
        *("_alone", "_inside", "_is_cancelled", "_is_method", "_movable", "_suspects", "_waits"),
        *("_watched", "device", "devices", "key", "monitor", "once"),
    )

    def __init__(
        self,
        monitor: Monitor,
        key: Hashable,
        devices: tuple[Device, ...],
        *,
        inside: bool = True,
        movable: bool = False,
        watched: int = 0,
        once: str = "",
        is_method: bool = False,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.monitor = monitor
        self.key = key
        self.device = devices[0]
        self.devices = devices
        self.once = once  # why it does not run again after a device failed; "" if it may
        self._inside = inside  # whether the device stays current around the call
        self._movable = movable  # whether it may be tried on another device
        self._watched = watched  # the number of its isolated run; 0 for any other
        self._is_method = is_method  # nobody waits for it, and it is not tried again
        self._is_cancelled = is_cancelled
        self._suspects = [Suspect(key, devices[0])]
        if len(devices) > 1:
            self._suspects += [Suspect(key, device) for device in devices[1:]]
        self._alone = False
        self._waits = (monitor.synchronize or bool(watched)) and not is_method

    def steps(self) -> Steps:
        """Yield the steps; return the exception that the call ends with, or None.

        It is ``DeviceFailedError`` if the device failed in this call, or in one that does not run
        again; ``DeviceOutOfMemoryError`` if memory ran out, also in the last retry; ``Reschedule``
        if it must run again elsewhere.
        """
        monitor, key, device = self.monitor, self.key, self.device
        quarantine, retries = monitor.quarantine, monitor.retries
        outcome: BaseException | None = None
        raised: BaseException | None = None
        try:
            while True:
                outcome = raised = None
                try:
                    self._alone = (
                        bool(retries.tried) and not self._is_method and retries.is_last(key)
                    )
                    if self._watched or self._alone or (quarantine.taken and not self._is_method):
                        for _ in quarantine.turn(
                            key, self._watched, self._refuse, device, alone=self._alone
                        ):
                            _raise((yield PAUSE))
                    if self._watched:
                        _raise((yield partial(monitor.drain, key, device)))
                    if self._alone:
                        _raise((yield partial(retries.prepare_last, key, device)))
                    if not self._begin():
                        continue
                    outcome = raised = yield CALL
                    outcome = self._after(raised)
                    if self._waits and not self._inside and outcome is None:
                        outcome = yield partial(self._look_inside, None, wait=True)
                except BaseException as found:
                    outcome = found
                if outcome is None and monitor.blame.failure is not None:
                    outcome = monitor.blame.error_of(key)
                if self.once:
                    monitor.blame.once.pop(key, None)
                if outcome is not None:
                    outcome = self._blamed(outcome)
                if self._watched or self._alone:
                    quarantine.ended(key)
                if outcome is None:
                    if retries.tried:
                        retries.forget(key)
                    return None
                if isinstance(outcome, Exception) and monitor.blame.failure is None:
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
            del outcome, raised  # a traceback may hold this frame: make no cycle

    def _refuse(self) -> None:
        """Raise if it may not begin: the devices failed, or dask needs it no more."""
        self.monitor.blame.refuse_after_failure()
        if self._is_cancelled():
            raise Reschedule  # dask ignores this, unless the task was requested again just now

    def _begin(self) -> bool:
        """Count the call, check its device, and enter it if the call is ``inside``.

        False if another task was given its turn meanwhile: this call has to wait.
        """
        monitor, key, device = self.monitor, self.key, self.device
        if monitor.blame.failure is not None:
            raise Reschedule
        suspects = monitor.suspects
        for one in self._suspects:
            suspects.started(one, aside=self._is_method)
        found: DriverError | None = None
        try:
            if (
                monitor.quarantine.taken
                and not (self._watched or self._is_method)
                and monitor.quarantine.holds_back(key, device)
            ):
                self._withdraw()
                return False
            device.__enter__()
            try:
                if not self._waits:
                    suspects.look(device, device._backend.calls.work, mark=False)
            except DriverError as error:
                found = error
            if found is not None or not self._inside:
                device.__exit__(None, None, None)
        except DriverError as error:
            found = error if error.code in statuses.STICKY else None
            if found is None:  # the device cannot be entered, but the process is healthy
                self._withdraw()
                raise
        except BaseException:
            self._withdraw()
            raise
        if found is not None:
            self._withdraw()
            if not statuses.failed(found.code):
                raise found
            raise monitor.blame.noticed(key, device, found, began=False) from found
        if self.once:
            monitor.blame.once[key] = self.once
        return True

    def _withdraw(self) -> None:
        for one in self._suspects:
            self.monitor.suspects.withdrawn(one)

    def _after(self, error: BaseException | None) -> BaseException | None:
        """Return the outcome of a call that returned or raised ``error``; leave its device."""
        monitor, outcome = self.monitor, error
        if error is not None and is_out_of_memory(error):
            clear_frames(error)  # others may wait for its end, and for its memory
        for one in self._suspects:
            monitor.suspects.ended(one)
        looks = error is None or isinstance(error, Exception)
        try:
            if looks and len(self.devices) > 1:
                for device in self.devices[1:]:
                    self._check(device, error)  # type: ignore[arg-type]
            if not self._inside and error is None and monitor.blame.failure is not None:
                outcome = monitor.blame.error_of(self.key) or Reschedule()
            elif looks and self._inside:
                try:
                    monitor.checkup.after(self.key, self.device, wait=self._waits)
                except DriverError as found:
                    outcome = self._found(found, error)  # type: ignore[arg-type]
            elif looks:
                outcome = self._look_inside(error, wait=False)  # type: ignore[arg-type]
        except BaseException as found:
            outcome = found
        if self._inside:
            try:
                self.device.__exit__(None if outcome is None else type(outcome), outcome, None)
            except BaseException as found:
                outcome = found
        return outcome

    def _look_inside(self, error: Exception | None, *, wait: bool) -> Exception | None:
        try:
            with self.device:
                return self._look(error, wait=wait)
        except DriverError as found:
            return self._found(found, error)

    def _look(self, error: Exception | None, *, wait: bool) -> Exception | None:
        """Check the device, in its scope; return the exception that the call ends with now."""
        try:
            self.monitor.checkup.after(self.key, self.device, wait=wait)
        except DriverError as found:
            return self._found(found, error)
        return error

    def _check(self, device: Device, error: Exception | None) -> None:
        """Check one of the other devices; the call is blamed as if its first had failed."""
        monitor = self.monitor
        try:
            with device:
                wait = self._waits and self._inside and error is None
                monitor.checkup.after(self.key, device, wait=wait)
        except DriverError as found:
            if found.code in statuses.STICKY:
                return  # all devices report it: the call finds it on its first device
            if statuses.failed(found.code):
                blamed = monitor.blame.noticed(self.key, device, found)
                blamed.__cause__ = portable(error or found)
                raise blamed from blamed.__cause__
            if error is None:
                raise
            error.add_note(f"After it, {device} was found unwell: {found}")
            return
        if error is not None and is_out_of_memory(error) and fits(requested_nbytes(error), device):
            # the call is tried again
            monitor.retries.drop_replicas(device)
            try:
                with device:
                    release_caches(error)
            except DevctxError:  # there is no room for a context, so no cache is on it
                return

    def _found(self, found: DriverError, error: Exception | None) -> Exception:
        if statuses.failed(found.code):
            blamed = self.monitor.blame.noticed(self.key, self.device, found)
            cause = error or found
            blamed.__traceback__ = cause.__traceback__ = of_the_task(cause)
            blamed.__cause__ = portable(cause)
            return blamed
        if error is None:
            return found
        error.add_note(f"After it, {self.device} was found unwell: {found}")
        return error

    def _blamed(self, error: BaseException) -> BaseException:
        """Return what a call ends with that raised ``error``, or in which a device failed."""
        if isinstance(error, DriverError) and error.code in statuses.STICKY:
            error = self._found(error, None)
        failure = self.monitor.blame.failure
        if self._is_method and failure is not None and isinstance(error, Reschedule):
            return failure.error_of_one_that_runs_once(self.once)
        return error


def _raise(found: object) -> None:
    if isinstance(found, BaseException):
        raise found
