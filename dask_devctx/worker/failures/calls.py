"""One monitored call on a device: afterwards, the device's health and memory errors are checked."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from types import TracebackType
from typing import Final

from distributed import Reschedule

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import clear_frames, is_out_of_memory
from dask_devctx.driver import statuses
from dask_devctx.errors import DriverError
from dask_devctx.worker.failures.monitor import Monitor
from dask_devctx.worker.failures.oom_retries import portable
from dask_devctx.worker.failures.remedies import name_remedy
from dask_devctx.worker.failures.suspects import Suspect
from dask_devctx.worker.tracebacks import of_the_task

_POLL_S: Final = 0.02  # many tasks may wait for their turn on one event loop


class MonitoredCall:
    """One call of a task or method on its device; use it in a loop while it is ``unfinished``.

    Parameters
    ----------
    monitor
        The monitor of the worker's devices.
    key
        The key of the task or actor.
    device
        Its device.
    movable
        Whether it may be tried again on another device, because the user named no device.
    watched
        The number of its watched run, since it may have broken a device before; 0 if it is not
        watched. A watched call runs alone, and the worker waits for its devices before and after.
    once
        Why it does not run again after a device failed while it ran; "" if it may.
    is_method
        Whether it is a call of an actor's method, or another call that no task makes. The worker
        does not wait for the device after it, and no watched task waits for its end.

    Attributes
    ----------
    unfinished
        Whether to call it: true at first, and again after memory ran out.

    Raises
    ------
    DeviceFailedError
        On leaving: the device failed in this call, or in a call that does not run again.
    DeviceOutOfMemoryError
        On leaving: there was not enough memory, also in the last retry.
    distributed.Reschedule
        On entering or leaving: it must run again, on another device, or in another process because
        this process's devices failed.

    Notes
    -----
    Inside ``with`` the device is current; ``async with`` is for coroutines, which enter it
    themselves at each resume.

    Examples
    --------
    ::

        call = MonitoredCall(monitor, key, device, movable=True)
        while call.unfinished:
            with call:
                result = task()
    """

    __slots__ = (
        *("_alone", "_device", "_is_method", "_key", "_monitor", "_movable", "_once"),
        *("_suspect", "_waits", "_watched"),
        "unfinished",
    )

    def __init__(
        self,
        monitor: Monitor,
        key: Hashable,
        device: Device,
        *,
        movable: bool = False,
        watched: int = 0,
        once: str = "",
        is_method: bool = False,
    ) -> None:
        self.unfinished = True
        self._monitor = monitor
        self._key = key
        self._device = device
        self._movable = movable
        self._watched = watched
        self._once = once
        self._is_method = is_method
        self._suspect = Suspect(key, device)
        self._alone = False
        self._waits = (monitor.synchronize or bool(watched)) and not is_method

    # -- of a function

    def __enter__(self) -> None:
        quarantine = self._monitor.quarantine
        while self.unfinished:
            try:
                self._alone = bool(self._monitor.retries.tried) and self._lacked_memory()
                if self._watched or self._alone or (quarantine.taken and not self._is_method):
                    for _ in self._turn():
                        quarantine.wait(_POLL_S)
                if self._watched:
                    self._monitor.drain(self._key, self._device)
                if self._alone:
                    self._monitor.retries.prepare_last(self._key, self._device)
                if not self._begin(stay=True):
                    continue
            except BaseException as error:
                self._leave(error, None)
            else:
                return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        outcome = error
        if error is not None and is_out_of_memory(error):
            clear_frames(error)  # others may wait for its end, and for its memory
        self._monitor.suspects.ended(self._suspect)
        try:
            if error is None or isinstance(error, Exception):
                outcome = self._look(error, wait=self._waits)
        except BaseException as found:
            outcome = found
        try:
            self._device.__exit__(None if outcome is None else type(outcome), outcome, None)
        except BaseException as found:
            outcome = found
        return self._leave(outcome, error)

    # -- of a coroutine

    async def __aenter__(self) -> None:
        quarantine = self._monitor.quarantine
        while self.unfinished:
            try:
                self._alone = bool(self._monitor.retries.tried) and self._lacked_memory()
                if self._watched or self._alone or (quarantine.taken and not self._is_method):
                    for _ in self._turn():
                        await asyncio.sleep(_POLL_S)
                if self._watched:
                    await asyncio.to_thread(self._monitor.drain, self._key, self._device)
                if self._alone:
                    await asyncio.to_thread(
                        self._monitor.retries.prepare_last, self._key, self._device
                    )
                if not self._begin(stay=False):
                    continue
            except BaseException as error:
                self._leave(error, None)
            else:
                return

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        outcome = error
        if error is not None and is_out_of_memory(error):
            clear_frames(error)  # others may wait for its end, and for its memory
        self._monitor.suspects.ended(self._suspect)
        try:
            if error is None and self._monitor.blame.failure is not None:
                outcome = self._monitor.blame.error_of(self._key) or Reschedule()
            elif error is None or isinstance(error, Exception):
                outcome = self._look_inside(error, wait=False)
            if outcome is None and self._waits:
                # on another thread: this one runs the worker's event loop
                outcome = await asyncio.to_thread(self._look_inside, None, wait=True)
        except BaseException as found:
            outcome = found
        if outcome is not None and is_out_of_memory(outcome):
            # Values leave the device: on another thread, this one runs the worker's event loop.
            outcome = await asyncio.to_thread(self._decided, outcome)
            return self._end(outcome, error)
        return self._leave(outcome, error)

    def _look_inside(self, error: Exception | None, *, wait: bool) -> Exception | None:
        try:
            with self._device:
                return self._look(error, wait=wait)
        except DriverError as found:
            return self._found(found, error)

    # -- of both

    def _lacked_memory(self) -> bool:
        """Return whether memory ran out for this task before its last attempt, so it runs alone."""
        return not self._is_method and self._monitor.retries.is_last(self._key)

    def _turn(self) -> Iterator[None]:
        turn = self._monitor.quarantine.turn
        return turn(self._key, self._watched, self._refuse, self._device, alone=self._alone)

    def _refuse(self) -> None:
        """Raise if it may not begin: the devices failed, or dask needs it no more."""
        self._monitor.blame.refuse_after_failure()
        if not self._is_method and self._monitor.is_cancelled(self._key):
            raise Reschedule  # dask ignores this, unless the task was requested again just now

    def _begin(self, *, stay: bool) -> bool:
        """Count the call, and check its device; ``stay`` leaves the device current.

        False if another task was given its turn meanwhile: this call has to wait.
        """
        monitor, key, device = self._monitor, self._key, self._device
        if monitor.blame.failure is not None:
            raise Reschedule
        monitor.suspects.started(self._suspect, aside=self._is_method)
        try:
            if (
                monitor.quarantine.taken
                and not (self._watched or self._is_method)
                and monitor.quarantine.holds_back(key, device)
            ):
                monitor.suspects.withdrawn(self._suspect)
                return False
            device.__enter__()
            found: DriverError | None = None
            try:
                if not self._waits:
                    monitor.checkup.before(device)
            except DriverError as error:
                found = error
            if found is not None or not stay:
                device.__exit__(None, None, None)
        except DriverError as error:
            found = error if error.code in statuses.STICKY else None
            if found is None:  # the device cannot be entered, but the process is healthy
                monitor.suspects.withdrawn(self._suspect)
                raise
        except BaseException:
            monitor.suspects.withdrawn(self._suspect)
            raise
        if found is not None:
            monitor.suspects.withdrawn(self._suspect)
            if not statuses.failed(found.code):
                raise found
            raise monitor.blame.noticed(key, device, found, began=False) from found
        if self._once:
            monitor.blame.once[key] = self._once
        return True

    def _look(self, error: Exception | None, *, wait: bool) -> Exception | None:
        """Check the device, inside its scope, after the call returned or raised ``error``.

        Returns
        -------
        Exception or None
            The exception that the call raises now.
        """
        try:
            self._monitor.checkup.after(self._key, self._device, wait=wait)
        except DriverError as found:
            return self._found(found, error)
        return error

    def _found(self, found: DriverError, error: Exception | None) -> Exception:
        if statuses.failed(found.code):
            blamed = self._monitor.blame.noticed(self._key, self._device, found)
            cause = error or found
            blamed.__traceback__ = cause.__traceback__ = of_the_task(cause)
            blamed.__cause__ = portable(cause)
            return blamed
        if error is None:
            return found
        error.add_note(f"After it, {self._device} was found unwell: {found}")
        return error

    def _leave(self, outcome: BaseException | None, raised: BaseException | None) -> bool:
        """Raise the outcome of a call, or return whether ``raised`` is to be suppressed."""
        monitor, key = self._monitor, self._key
        if outcome is None and monitor.blame.failure is not None:
            outcome = monitor.blame.error_of(key)
        if outcome is None:
            if self._once:
                monitor.blame.once.pop(key, None)
            if self._watched or self._alone:
                monitor.quarantine.ended(key)
            monitor.retries.forget(key)
            self.unfinished = False
            return False
        return self._end(self._decided(outcome), raised)

    def _end(self, outcome: BaseException | None, raised: BaseException | None) -> bool:
        """Raise what was decided, or return whether ``raised`` is to be suppressed."""
        try:
            if outcome is None:
                return True
            if outcome is raised:
                name_remedy(outcome)
                return False
            try:
                raise outcome
            finally:
                outcome.__context__ = None  # its cause says the same, and is sent to the client
        finally:
            del outcome, raised  # a traceback holds this frame: make no cycle

    def _decided(self, error: BaseException) -> BaseException | None:
        """Return the exception that a call ends with, or None to try it again."""
        monitor, key, device = self._monitor, self._key, self._device
        if self._once:
            monitor.blame.once.pop(key, None)
        if isinstance(error, DriverError) and error.code in statuses.STICKY:
            error = self._found(error, None)
        if self._watched or self._alone:
            monitor.quarantine.ended(key)
        failure = monitor.blame.failure
        if self._is_method:
            if failure is not None and isinstance(error, Reschedule):
                return failure.error_of_one_that_runs_once(self._once)
            if failure is not None or not isinstance(error, Exception):
                return error
            return monitor.retries.of_a_method(key, device, error)
        if failure is not None or not isinstance(error, Exception):
            return error
        return monitor.retries.make_room(key, self._movable, device, error)
