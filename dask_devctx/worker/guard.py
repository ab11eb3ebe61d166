"""The steps around a call on its devices: its turn, the checks of the devices, and its retries."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any, Final

from distributed import Reschedule

from dask_devctx.cuda import suspending
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import clear_frames, is_out_of_memory
from dask_devctx.dask_internals.tasks import rejoin_if_seceded
from dask_devctx.driver import statuses
from dask_devctx.errors import DriverError
from dask_devctx.transfer import Stamp
from dask_devctx.worker.failures.monitor import Monitor
from dask_devctx.worker.failures.running_calls import Call
from dask_devctx.worker.tracebacks import of_the_task

_POLL_S: Final = 0.02  # many tasks may wait for their turn on one event loop
_FRESH_S: Final = 0.001  # a device that was looked at so lately is not looked at again


class Guard(Call):
    """One guarded call, of a function or of a coroutine function; it is tried again inside.

    A subclass says in ``_call``, or in ``_call_coroutine``, what it does with its data: a run of a
    task, or an actor's method. The call ends with ``DeviceFailedError`` if the device failed in it,
    or in one that does not run again; with ``DeviceOutOfMemoryError`` if memory ran out, also in
    the last retry; with ``Reschedule`` if it must run again elsewhere.
    """

    _call: Callable[[Any], Any]
    _call_coroutine: Callable[[Any], Coroutine[Any, Any, Any]]
    # A function has its device current around it. A coroutine enters it at each resume.
    is_coro = False
    ts: Any = None  # dask's state of its task
    began_at = 0.0
    thread: int | None = None

    made: Any = None  # its result as a `Value`
    synchronizes = False  # whether it waits for its devices before and after the call
    # Why it does not run again after a device failed; "" if it may.
    not_again = (
        "calls of actors run once, and this actor's state is lost with its worker. Make a new actor"
    )

    def __init__(self, monitor: Monitor, key: Hashable, devices: tuple[Device, ...]) -> None:
        self.monitor = monitor
        self.key = key
        self.devices = devices

    def __call__(self, data: Any) -> Any:
        """Return what it returns, called on this thread in its device's scope; or a coroutine."""
        if self.is_coro:
            return self._await(data)
        try:
            self._steps(data).send(None)  # nothing in it is awaited: see `_do` and `_pause`
        except StopIteration as end:
            result, error = end.value
        if error is None:
            if isinstance(result, suspending.SUSPENDED):
                return suspending.within(self.devices[0], result)
            return result
        try:
            raise error
        except BaseException:
            error.__traceback__ = of_the_task(error)
            raise
        finally:
            del error  # a traceback may hold this frame: make no cycle

    async def _await(self, data: Any) -> Any:
        result, error = await self._steps(data)
        if error is None:
            return result
        try:
            raise error
        finally:
            del error

    async def _do(self, step: Callable[[], Any]) -> Any:
        """Do what may wait for a device; an event loop goes on meanwhile."""
        return await asyncio.to_thread(step) if self.is_coro else step()

    async def _pause(self) -> None:
        """Wait a moment for other tasks."""
        if self.is_coro:
            await asyncio.sleep(_POLL_S)
        else:
            time.sleep(_POLL_S)

    async def _steps(self, data: Any) -> tuple[Any, BaseException | None]:
        """Return the call's result, and the exception that it ends with or None.

        Each attempt waits for its turn, begins, calls, and looks at its devices; then the outcome
        is returned, or the call is made once more.
        """
        if self.ts is not None and self.ts.state == "cancelled":
            data.clear()
            raise Reschedule  # dask ignores this, unless the task was requested again just now
        self.began_at, self.thread = time.perf_counter(), threading.get_ident()
        monitor, key, calls = self.monitor, self.key, self.monitor.calls
        outcome: BaseException | None = None
        raised: BaseException | None = None
        result = None
        if self.is_task and (monitor.synchronize or self.isolated):
            self.synchronizes = True
        try:
            while True:
                outcome = raised = None
                try:
                    if self.is_task and (self.isolated or self.is_last or calls.turns):
                        await self._turn()
                    if not self._begin():
                        continue
                    try:
                        if self.is_coro:
                            coroutine = self._call_coroutine(data)
                            result = await suspending.within(self.devices[0], coroutine)
                        else:
                            result = self._call(data)
                    except BaseException as error:
                        raised = error
                    if self.synchronizes and (raised is None or isinstance(raised, Exception)):
                        outcome = await self._do(partial(self._after, raised))
                    else:
                        outcome = self._after(raised)
                except BaseException as error:
                    outcome = error
                if outcome is None and calls.failure is not None:
                    outcome = calls.failure.error_of(key)
                self.once = ""
                if statuses.is_sticky(outcome):
                    outcome = self._blamed(self.devices[0], outcome, outcome)
                calls.turns.discard(self)
                if outcome is None:
                    return result, None
                if calls.failure is not None:
                    if not self.is_task and isinstance(outcome, Reschedule):
                        outcome = calls.failure.error_for(self.not_again)
                elif isinstance(outcome, Exception) and is_out_of_memory(outcome):
                    outcome = await self._do(partial(monitor.retries.make_room, self, outcome))
                    if outcome is None:
                        await self._do(rejoin_if_seceded)
                        continue
                if outcome is not raised:
                    outcome.__context__ = None  # its cause says the same, and is sent to the client
                if isinstance(outcome, Exception if outcome is raised else MemoryError):
                    where = ", ".join(map(str, self.devices))
                    outcome.add_note(f"{key!r} ran on {where} of {monitor.worker.address}")
                if self.is_task:
                    data.clear()  # dask keeps an error's frames, and what they hold
                return None, outcome
        finally:
            del outcome, raised, result  # a traceback holds this frame: make no cycle

    # -- before the call

    async def _turn(self) -> None:
        """Wait until the call may begin, and where it is to run alone, for others to end."""
        calls, device = self.monitor.calls, self.devices[0]
        self.alone = self.is_last or self.isolated > 0
        self.alone_on = None if self.isolated else device
        while not calls.may_begin(self):
            self._refuse()
            await self._pause()
        self._refuse()
        self.be_patient()
        if self.isolated:
            await self._do(self._drain)
        if self.is_last:
            await self._do(partial(self.monitor.retries.clear, device))

    def _refuse(self) -> None:
        """Raise if it may not begin: the devices failed, or dask needs it no more."""
        if self.monitor.calls.failure is not None or (self.ts and self.ts.state == "cancelled"):
            raise Reschedule

    def _drain(self) -> None:
        """Wait for the work of other tasks on all devices: a later failure is not theirs."""
        calls = self.monitor.calls
        left = (work.device for work in tuple(calls.works.values()) if work.left)
        for device in dict.fromkeys((self.devices[0], *left)):
            try:
                with device:
                    calls.works[device].wait()
            except DriverError as found:
                if statuses.failed(found.code):  # the task itself meets any other error
                    raise self.monitor.noticed(device, found, self, began=False) from found

    def _begin(self) -> bool:
        """Count the call, and make its device current; False if another has its turn meanwhile."""
        monitor, device, calls = self.monitor, self.devices[0], self.monitor.calls
        if calls.failure is not None:
            raise Reschedule
        self.aside, entered = not self.is_task, False
        calls.running.add(self)
        try:
            if calls.turns and self.is_task and not self.alone and not calls.may_begin(self):
                calls.running.discard(self)
                return False
            device.__enter__()
            entered = True
            work = calls.works[device]
            if not self.synchronizes and time.perf_counter() - work.looked_at > _FRESH_S:
                work.look(mark=False)
            if self.is_coro:
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
                raise monitor.noticed(device, error, self, began=False) from error
            raise
        self.once = self.not_again
        return True

    # -- after the call

    def _after(self, error: BaseException | None) -> BaseException | None:
        """Return the outcome of a call that returned or raised ``error``; leave its device."""
        calls, outcome, (first, *_) = self.monitor.calls, error, self.devices
        if error is not None:
            clear_frames(error)  # others may wait for its end, and for its memory
        calls.running.discard(self)
        for device in self.devices:
            work = calls.works[device]
            work.left.append((next(work.numbers), self.key))
        try:
            for device in self.devices if error is None or isinstance(error, Exception) else ():
                try:
                    if device is first and not self.is_coro:
                        self._end(device)
                    else:
                        with device:
                            self._end(device)
                except DriverError as found:
                    if statuses.failed(found.code):
                        outcome = self._blamed(device, found, outcome or found)  # type: ignore[arg-type]
                        break
                    outcome = found if outcome is None else outcome
        except BaseException as found:
            outcome = found
        if not self.is_coro:
            try:
                first.__exit__(None if outcome is None else type(outcome), outcome, None)
            except BaseException as found:
                outcome = found
        return outcome

    def _end(self, device: Device) -> None:
        """Wait for a device, which is current unless the task left another, or mark the end."""
        made, work = self.made, self.monitor.calls.works[device]
        if self.synchronizes:
            device.set_current()
            work.wait()
            return
        kept = made is not None and bool(made.nbytes) and made.stamp is None
        event = work.look(mark=True, kept=kept)
        if kept:
            made.stamp = Stamp.until(event, device)

    def _blamed(self, device: Device, found: DriverError, cause: Exception) -> Exception:
        """Return the exception of a call that noticed a failure."""
        blamed = self.monitor.noticed(device, found, self)
        blamed.__traceback__ = cause.__traceback__ = of_the_task(cause)
        blamed.__cause__ = cause
        return blamed
