"""One monitored call on a device: afterwards, the device's health and memory errors are checked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Iterator
from types import TracebackType
from typing import Final

from distributed import Reschedule

from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.errors import DriverError
from dask_devctx.worker.failures.monitor import Monitor
from dask_devctx.worker.failures.oom_retries import portable
from dask_devctx.worker.failures.suspects import Suspect

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
        Whether it may have broken a device before. Then it waits for its turn, and the worker waits
        for the device after it.
    is_method
        Whether it is a call of an actor's method. The worker does not wait for the device after it,
        and never runs it again, since it may have changed its actor already.

    Attributes
    ----------
    unfinished
        Whether to call it: true at first, and again after memory ran out.

    Raises
    ------
    DeviceFailedError
        On leaving: the device failed in this call, or this call is the first to notice it.
    DeviceOutOfMemoryError
        On leaving: there was not enough memory, also in the last retry.
    distributed.Reschedule
        On entering or leaving: it must run again, on another device, or in another process because
        this process's devices failed.

    Notes
    -----
    Inside ``with`` the device is current; ``async with`` is for coroutines, which enter it
    themselves at each resume. An exception that leaves either has a traceback that begins with the
    task's own code.

    Examples
    --------
    ::

        call = MonitoredCall(monitor, key, device, movable=True)
        while call.unfinished:
            with call:
                result = task()
    """

    __slots__ = (
        *("_device", "_is_method", "_key", "_monitor", "_movable", "_waits", "_watched"),
        "unfinished",
    )

    def __init__(
        self,
        monitor: Monitor,
        key: Hashable,
        device: Device,
        *,
        movable: bool = False,
        watched: bool = False,
        is_method: bool = False,
    ) -> None:
        self.unfinished = True
        self._monitor = monitor
        self._key = key
        self._device = device
        self._movable = movable
        self._watched = watched
        self._is_method = is_method
        self._waits = (monitor.synchronize or watched) and not is_method

    # -- of a function

    def __enter__(self) -> None:
        while self.unfinished:
            try:
                if self._watched:
                    for _ in self._turns():
                        time.sleep(_POLL_S)
                    self._monitor.drain(self._key, self._device)
                self._begin(stay=True)
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
        self._monitor.suspects.ended(self._key, self._device)
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
        while self.unfinished:
            try:
                if self._watched:
                    for _ in self._turns():
                        await asyncio.sleep(_POLL_S)
                    await asyncio.to_thread(self._monitor.drain, self._key, self._device)
                self._begin(stay=False)
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
        self._monitor.suspects.ended(self._key, self._device)
        try:
            if error is None and not self._watched:
                self._monitor.blame.refuse_after_failure()
            if error is None or isinstance(error, Exception):
                outcome = self._look_inside(error, wait=False)
            if outcome is None and self._waits:
                # on another thread: this one runs the worker's event loop
                outcome = await asyncio.to_thread(self._look_inside, None, wait=True)
        except BaseException as found:
            outcome = found
        return self._leave(outcome, error)

    def _look_inside(self, error: Exception | None, *, wait: bool) -> Exception | None:
        try:
            with self._device:
                return self._look(error, wait=wait)
        except DriverError as found:
            return self._found(found, error)

    # -- of both

    def _turns(self) -> Iterator[None]:
        return self._monitor.watch.turns(self._key, self._monitor.blame.refuse_after_failure)

    def _begin(self, *, stay: bool) -> None:
        """Count the call, and check its device; ``stay`` leaves the device current."""
        monitor, key, device = self._monitor, self._key, self._device
        if self._watched:
            monitor.watch.began(Suspect(key, device))
        if monitor.blame.failure is not None:
            raise Reschedule
        monitor.suspects.started(key, device)
        try:
            device.__enter__()
            try:
                if not self._waits:
                    monitor.checkup.before(device)
            except BaseException as error:
                device.__exit__(type(error), error, None)
                raise
            if not stay:
                device.__exit__(None, None, None)
        except BaseException:
            monitor.suspects.ended(key, device)
            raise

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
            blamed.__cause__ = portable(error or found)
            return blamed
        if error is None:
            return found
        error.add_note(f"After it, {self._device} was found unwell: {found}")
        return error

    def _leave(self, outcome: BaseException | None, raised: BaseException | None) -> bool:
        """Raise the outcome of a call, or return whether ``raised`` is to be suppressed."""
        monitor, key = self._monitor, self._key
        if outcome is None and self._watched:
            outcome = monitor.blame.error_of(key)
        if outcome is None:
            if self._watched:
                monitor.watch.ended(key)
            monitor.retries.forget(key)
            self.unfinished = False
            return False
        try:
            outcome = self._decided(outcome)
            if outcome is None:
                return True
            if outcome is raised:
                # The interpreter raises it again without adding a frame of this method.
                raised.__traceback__ = of_the_task(raised)
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
        if isinstance(error, DriverError) and error.code in statuses.STICKY:
            blamed = monitor.blame.noticed(key, device, error)
            blamed.__cause__ = error
            error = blamed
        if self._watched:
            monitor.watch.ended(key)
        failure = monitor.blame.failure
        if self._is_method:
            if failure is not None and isinstance(error, Reschedule):
                return failure.error
            return error
        if failure is not None or not isinstance(error, Exception):
            return error
        return monitor.retries.make_room(key, self._movable, device, error)


# The modules that call a task. A traceback leaves them out, to begin with the task's own code.
_ON_THE_WAY = (
    *("dask_devctx.worker.task", "dask_devctx.worker.failures", "dask_devctx.cuda.suspending"),
    *("dask_devctx.cuda.on_device", "dask._task_spec"),
)


def of_the_task(error: BaseException) -> TracebackType | None:
    """Return the part of an error's traceback that begins with the task's own code, or all."""
    step = error.__traceback__
    while step is not None and _is_on_the_way(step):
        step = step.tb_next
    return step or error.__traceback__


def _is_on_the_way(step: TracebackType) -> bool:
    name: str = step.tb_frame.f_globals.get("__name__", "")
    return name.startswith(_ON_THE_WAY)
