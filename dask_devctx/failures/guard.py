"""What stands around each task on a device: is the device well afterwards, and was there room."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any, Final

from distributed import Reschedule

from dask_devctx import discovery, tasks
from dask_devctx.device import Device
from dask_devctx.driver import statuses
from dask_devctx.driver.calls import RELAXED_CAPTURE, Calls
from dask_devctx.errors import DeviceFailedError, DeviceOutOfMemoryError, DriverError
from dask_devctx.failures.retries import Retries, portable
from dask_devctx.failures.suspects import Suspects

logger = logging.getLogger(__name__)

_WARN_EVERY_S = 10.0


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
        Called once, on the task's thread, when a device failed: with the error and the task's key.

    Attributes
    ----------
    metric
        The name of what the worker's heartbeat tells of it.
    failure
        What ended this process' use of its devices, or None.
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
        on_failure: Callable[[DeviceFailedError, Hashable], None],
    ) -> None:
        self.synchronize = synchronize
        self.retries = Retries(devices, oom_retries)
        self.failure: DeviceFailedError | None = None
        self.suspects = Suspects()
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._left_behind: Counter[Device] = Counter()
        self._warned_at: dict[Device, float] = {}

    def metrics(self, worker: object) -> dict[str, dict[str, int]]:
        """Return how often a context was left behind and memory ran out, by device."""
        return {
            "left-behind": {str(device): n for device, n in self._left_behind.items()},
            "out-of-memory": {str(device): n for device, n in self.retries.counted.items()},
        }

    def close(self) -> None:
        """Give back what it holds; tasks that still run are watched to their end."""
        self.suspects.close()

    # -- around a task

    def run(
        self, key: Hashable, movable: bool, device: Device, fn: Callable[[Any], Any], data: Any
    ) -> Any:
        """Return what a task returns, run on its device.

        Parameters
        ----------
        key
            The task's key.
        movable
            Whether it may be tried again on another device: the user named none.
        device
            Its device.
        fn
            The task.
        data
            What it is called with.

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
        while True:
            try:
                result = self._once(key, device, fn, data)
            except Exception as error:
                self._try_again_or_raise(key, movable, device, error)
            else:
                if inspect.iscoroutine(result):
                    return self._awaited(key, movable, device, fn, data, result)
                self.retries.forget(key)
                return tasks.within(device, result)

    async def _awaited(
        self,
        key: Hashable,
        movable: bool,
        device: Device,
        fn: Callable[[Any], Any],
        data: Any,
        given: Coroutine[Any, Any, Any],
    ) -> Any:
        """As :meth:`run`, once a coroutine function has given its first coroutine."""
        running: Coroutine[Any, Any, Any] | None = given
        while True:
            self.suspects.started(key, device)
            try:
                try:
                    if running is None:
                        with device:
                            running = fn(data)  # what it needs is brought again, too
                    result = await tasks.within(device, running)
                finally:
                    self.suspects.ended(key, device)
                self._refuse_after_failure()
                with device:
                    self._check(key, device, None, wait=False)
            except Exception as error:
                failure = self._failure_in(key, device, error)
                if failure is not None:
                    raise failure from error
                self._try_again_or_raise(key, movable, device, error)
                running = None
            else:
                if self.synchronize:
                    await self._wait(key, device)
                self.retries.forget(key)
                return result

    async def _wait(self, key: Hashable, device: Device) -> None:
        """Wait for the device on another thread: this one runs the worker's event loop."""
        import asyncio

        def wait() -> None:
            with device:
                self._check(key, device, None)

        try:
            await asyncio.to_thread(wait)
        except DriverError as error:
            failure = self._failure_in(key, device, error)
            if failure is None:
                raise
            raise failure from error

    def _once(self, key: Hashable, device: Device, fn: Callable[[Any], Any], data: Any) -> Any:
        self._refuse_after_failure()
        self.suspects.started(key, device)
        ended = False
        try:
            with device:
                if not self.synchronize and self.suspects.marked(device):
                    calls = device._backend.calls
                    with _Undisturbing(calls):
                        self.suspects.look(device, calls, mark=False)
                try:
                    result = fn(data)
                except Exception as error:
                    ended = self._ended(key, device)
                    self._check(key, device, error)
                    raise
                if not inspect.iscoroutine(result):
                    ended = self._ended(key, device)
                    self._check(key, device, None)
            return result
        except DriverError as error:
            failure = self._failure_in(key, device, error)
            if failure is None:
                raise
            raise failure from error
        finally:
            if not ended:
                self.suspects.ended(key, device)

    def _ended(self, key: Hashable, device: Device) -> bool:
        self.suspects.ended(key, device)
        return True

    # -- is the device well

    def _refuse_after_failure(self) -> None:
        if self.failure is not None:
            raise Reschedule

    def _check(
        self, key: Hashable, device: Device, body: Exception | None, *, wait: bool = True
    ) -> None:
        """Look at the device after a task, inside its scope; ``body`` is what the task raised."""
        calls = device._backend.calls
        try:
            if calls.current() != device._handle:
                self._note_left_behind(key, device)
                calls.set_current(device._handle)  # with none current, the probe sees nothing
            with _Undisturbing(calls):
                if self.synchronize and wait:
                    ended = self.suspects.count(device)
                    calls.synchronize()
                    self.suspects.idle(device, ended)
                else:
                    self.suspects.look(device, calls, mark=True)
                calls.probe()
        except DriverError as found:
            if not statuses.failed(found.code):
                if body is None:
                    raise
                body.add_note(f"After it, {device} was found unwell: {found}")
                return
            raise self._failed(key, device, found) from portable(body or found)

    def _failure_in(
        self, key: Hashable, device: Device, error: Exception
    ) -> DeviceFailedError | Reschedule | None:
        """Return the failure that a driver call around the task ran into, or None."""
        if isinstance(error, (DeviceFailedError, Reschedule)) or not isinstance(error, DriverError):
            return None
        return self._failed(key, device, error) if error.code in statuses.STICKY else None

    def _failed(
        self, key: Hashable, device: Device, found: DriverError
    ) -> DeviceFailedError | Reschedule:
        """Return the error for the first task that notices; the others are to be run again."""
        suspects = self.suspects.named(key, device)
        with self._lock:
            if self.failure is not None:
                return Reschedule()
            self.failure = failure = DeviceFailedError(
                str(device),
                device.uuid,
                found.status,
                found.code,
                [str(suspect) for suspect in suspects],
                self.synchronize,
                discovery.is_lost(device._backend, device.info),
            )
        self._on_failure(failure, key)
        return failure

    def _note_left_behind(self, key: Hashable, device: Device) -> None:
        self._left_behind[device] += 1
        now = time.monotonic()
        if now - self._warned_at.get(device, -_WARN_EVERY_S) >= _WARN_EVERY_S:
            self._warned_at[device] = now
            logger.warning(
                "the task %r changed the current CUDA context on %s and did not restore it (seen "
                "%d times on this device). It did no harm: the earlier one was restored. "
                "'with Device(n):' restores by itself",
                key,
                device,
                self._left_behind[device],
            )

    def _try_again_or_raise(
        self, key: Hashable, movable: bool, device: Device, error: Exception
    ) -> None:
        if self.failure is not None:
            raise error
        self.retries.make_room_or_raise(key, movable, device, error)


class GuardedTask:
    """What a pinned task calls in the place of :func:`dask_devctx.tasks.call`."""

    __slots__ = ("_guard", "_key", "_movable")

    def __init__(self, guard: Guard, key: Hashable, movable: bool) -> None:
        self._guard = guard
        self._key = key
        self._movable = movable

    def __call__(self, device: Device, fn: Callable[[Any], Any], data: Any) -> Any:
        try:
            result = self._guard.run(self._key, self._movable, device, fn, data)
        except (DeviceFailedError, DeviceOutOfMemoryError) as error:
            failure: Exception = error
        else:
            return self._awaited(result) if inspect.iscoroutine(result) else result
        raise _alone(failure)

    async def _awaited(self, running: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await running
        except (DeviceFailedError, DeviceOutOfMemoryError) as error:
            failure: Exception = error
        raise _alone(failure)


class _Undisturbing:
    """Let this thread look at a device without ending what another thread captures as a graph."""

    __slots__ = ("_before", "_calls")

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        self._before = self._calls.exchange_capture_mode(RELAXED_CAPTURE)

    def __exit__(self, *error: object) -> None:
        self._calls.exchange_capture_mode(self._before)


def _alone(failure: Exception) -> Exception:
    """Take from an error what it was raised in the middle of: its cause says it, and is sent."""
    failure.__context__ = None
    return failure
