"""The steps around a call on its devices: its turn, the checks of the devices, and its retries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Final

from distributed import Reschedule

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import clear_frames, is_out_of_memory
from dask_devctx.dask_internals.tasks import rejoin_if_seceded
from dask_devctx.driver import statuses
from dask_devctx.errors import DriverError
from dask_devctx.worker.failures.calls import LONGER, PATIENCE_S, Call
from dask_devctx.worker.failures.monitor import Monitor
from dask_devctx.worker.failures.oom_retries import portable
from dask_devctx.worker.tracebacks import name_remedy, of_the_task

_POLL_S: Final = 0.02  # many tasks may wait for their turn on one event loop
_CURRENT: Final = nullcontext()


@dataclass(eq=False)
class Guard(Call):
    """One guarded call of a task, or of an actor's method; it is made once, and tried again inside.

    The call ends with ``DeviceFailedError`` if the device failed in it, or in one that does not run
    again; with ``DeviceOutOfMemoryError`` if memory ran out, also in the last retry; with
    ``Reschedule`` if it must run again elsewhere.
    """

    monitor: Monitor
    key: Hashable
    devices: tuple[Device, ...]
    _: KW_ONLY
    # Whether this is a function, with its device current around it; else a coroutine function.
    inside: bool = True
    movable: bool = False  # whether it may be tried on another device
    isolated: int = 0  # the number of its isolated run; 0 for any other
    not_again: str = ""  # why it does not run again after a device failed; "" if it may
    is_method: bool = False  # nobody waits for it, and it is not tried again
    is_cancelled: Callable[[], bool] = bool

    def __post_init__(self) -> None:
        if self.isolated:
            self.patience_s = PATIENCE_S * LONGER ** (self.isolated - 1)
        self.waits = not self.is_method and (self.monitor.synchronize or self.isolated > 0)

    def run(self, body: Callable[[], Any]) -> Any:
        """Return what a function returns, called on this thread in its device's scope."""
        try:
            self._steps(body).send(None)  # nothing in it is awaited: see `_do` and `_pause`
        except StopIteration as end:
            result, error = end.value
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # a traceback holds this frame: make no cycle

    async def run_coroutine(self, body: Callable[[], Awaitable[Any]]) -> Any:
        """Return what a coroutine returns; it enters its device itself, at each resume."""
        result, error = await self._steps(body)
        if error is None:
            return result
        try:
            raise error
        finally:
            del error

    async def _do(self, step: Callable[[], Any]) -> Any:
        """Do what may wait for a device; an event loop goes on meanwhile."""
        return step() if self.inside else await asyncio.to_thread(step)

    async def _pause(self) -> None:
        """Wait a moment for other tasks."""
        if self.inside:
            time.sleep(_POLL_S)
        else:
            await asyncio.sleep(_POLL_S)

    async def _steps(self, body: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Return the call's result, and the exception that it ends with or None."""
        monitor, key, device = self.monitor, self.key, self.devices[0]
        calls, retries = monitor.calls, monitor.retries
        outcome: BaseException | None = None
        raised: BaseException | None = None
        result = None
        alone = False
        try:
            while True:
                outcome = raised = None
                try:
                    alone = bool(retries.tried) and not self.is_method and retries.is_last(key)
                    if self.isolated or alone or (calls.turns and not self.is_method):
                        self.alone_on = device if alone and not self.isolated else None
                        await self._turn(bool(self.isolated) or alone)
                    if self.isolated:
                        await self._do(self._drain)
                    if alone:
                        await self._do(partial(retries.clear, device))
                    if not self._begin():
                        continue
                    try:
                        result = body()
                        if not self.inside:
                            result = await result
                    except BaseException as error:
                        raised = error
                    outcome = await self._after(raised)
                except BaseException as error:
                    outcome = error
                if outcome is None and monitor.failure is not None:
                    outcome = monitor.failure.error_of(key)
                self.once = ""
                if isinstance(outcome, DriverError) and outcome.code in statuses.STICKY:
                    outcome = self._blamed(device, outcome, outcome)
                if self.isolated or alone:
                    calls.turns.discard(self)
                if outcome is None:
                    if retries.tried:
                        retries.forget(key)
                    return result, None
                if monitor.failure is not None:
                    if self.is_method and isinstance(outcome, Reschedule):
                        outcome = monitor.failure.error_for(self.not_again)
                elif isinstance(outcome, Exception):
                    make = partial(
                        retries.make_room,
                        *(key, self.devices, outcome),
                        movable=self.movable,
                        again=not self.is_method,
                    )
                    outcome = await self._do(make) if is_out_of_memory(outcome) else make()
                    del make
                    if outcome is None:
                        await self._do(rejoin_if_seceded)
                        continue
                if outcome is raised and raised is not None:
                    name_remedy(raised)
                else:
                    outcome.__context__ = None  # its cause says the same, and is sent to the client
                return None, outcome
        finally:
            del outcome, raised, result  # a traceback holds this frame: make no cycle

    # -- before the call

    async def _turn(self, alone: bool) -> None:
        """Wait until the call may begin, and where it is to run alone, for others to end."""
        calls = self.monitor.calls
        while not calls.took_turn(self, alone) or (alone and calls.has_to_wait(self)):
            self._refuse()
            await self._pause()
        self._refuse()
        self.until = time.monotonic() + self.patience_s

    def _refuse(self) -> None:
        """Raise if it may not begin: the devices failed, or dask needs it no more."""
        # dask ignores this of a cancelled task, unless it was requested again just now.
        if self.monitor.failure is not None or self.is_cancelled():
            raise Reschedule

    def _drain(self) -> None:
        """Wait for the work of other tasks on all devices: a later failure is not theirs."""
        calls = self.monitor.calls
        left = (work.device for work in calls.all_work() if work.left)
        for device in dict.fromkeys((self.devices[0], *left)):
            try:
                with device:
                    calls.works[device].wait()
            except DriverError as found:
                if statuses.failed(found.code):  # the task itself meets any other error
                    raise self.monitor.noticed(self, device, found, began=False) from found

    def _begin(self) -> bool:
        """Count the call, check its device, and enter it if the call is ``inside``.

        False if another task was given its turn meanwhile: this call has to wait.
        """
        monitor, device, calls = self.monitor, self.devices[0], self.monitor.calls
        if monitor.failure is not None:
            raise Reschedule
        self.aside, entered = self.is_method, False
        calls.running.add(self)
        try:
            if calls.turns and not (self.isolated or self.is_method) and calls.holds_back(self):
                calls.running.discard(self)
                return False
            device.__enter__()
            entered = True
            if not self.waits:
                calls.works[device].look(mark=False)
            if not self.inside:
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
                raise monitor.noticed(self, device, error, began=False) from error
            raise
        self.once = self.not_again
        return True

    # -- after the call

    async def _after(self, error: BaseException | None) -> BaseException | None:
        """Return the outcome of a call that returned or raised ``error``; leave its device."""
        calls, outcome = self.monitor.calls, error
        if error is not None and is_out_of_memory(error):
            clear_frames(error)  # others may wait for its end, and for its memory
        calls.running.discard(self)
        for device in self.devices:
            calls.works[device].ended(self.key)
        try:
            if error is None or isinstance(error, Exception):
                if self.waits and not self.inside:
                    outcome = await asyncio.to_thread(self._checked, error)
                else:
                    outcome = self._checked(error)
        except BaseException as found:
            outcome = found
        if self.inside:
            try:
                kind = None if outcome is None else type(outcome)
                self.devices[0].__exit__(kind, outcome, None)
            except BaseException as found:
                outcome = found
        return outcome

    def _checked(self, error: Exception | None) -> Exception | None:
        """Check the devices; return the exception that the call ends with."""
        monitor, current = self.monitor, self.inside
        for device in self.devices:
            scope: AbstractContextManager[Any] = _CURRENT if current else device
            current = False
            try:
                with scope:
                    monitor.calls.works[device].check(self.key, wait=self.waits)
            except DriverError as found:
                if statuses.failed(found.code):
                    return self._blamed(device, found, error or found)
                if error is None:
                    error = found
                else:
                    error.add_note(f"After it, {device} was found unwell: {found}")
        return error

    def _blamed(self, device: Device, found: DriverError, cause: Exception) -> Exception:
        """Return the exception of a call that noticed a failure."""
        blamed = self.monitor.noticed(self, device, found)
        blamed.__traceback__ = cause.__traceback__ = of_the_task(cause)
        blamed.__cause__ = portable(cause)
        return blamed
