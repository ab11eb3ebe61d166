"""The check of the other devices of a call on several; the first one is the call's own."""

from __future__ import annotations

from collections.abc import Hashable
from types import TracebackType
from typing import Literal

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.on_device import known_as_the_tasks
from dask_devctx.cuda.out_of_memory import is_out_of_memory, release_caches, requested_nbytes
from dask_devctx.driver import statuses
from dask_devctx.errors import DevctxError, DriverError
from dask_devctx.worker.failures.monitor import Monitor
from dask_devctx.worker.failures.oom_retries import fits, portable
from dask_devctx.worker.failures.suspects import Suspect


class Others:
    """The body of a call on several devices: all are known inside, and the others checked after.

    Parameters
    ----------
    monitor
        The monitor of the worker's devices.
    key
        The key of the task or actor.
    devices
        Its devices. The first one is current, and a
        :class:`~dask_devctx.worker.failures.calls.MonitoredCall` checks it.
    wait
        Whether to wait for the others after the call.
    is_method
        Whether it is a call of an actor's method: no watched task waits for its end.

    Raises
    ------
    DeviceFailedError, distributed.Reschedule
        On leaving: one of the others failed; the call is blamed as if its first device had failed.
    """

    def __init__(
        self,
        monitor: Monitor,
        key: Hashable,
        devices: tuple[Device, ...],
        *,
        wait: bool = False,
        is_method: bool = False,
    ) -> None:
        self._monitor = monitor
        self._key = key
        self._devices = devices
        self._wait = wait
        self._is_method = is_method
        self._known = known_as_the_tasks(devices)

    def __enter__(self) -> None:
        for device in self._devices[1:]:
            self._monitor.suspects.started(Suspect(self._key, device), aside=self._is_method)
        self._known.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        self._known.__exit__(None, None, None)
        for device in self._devices[1:]:
            self._monitor.suspects.ended(Suspect(self._key, device))
        if error is None or isinstance(error, Exception):
            for device in self._devices[1:]:
                self._check(device, error)
        return False

    def _check(self, device: Device, error: Exception | None) -> None:
        monitor = self._monitor
        try:
            with device:
                monitor.checkup.after(self._key, device, wait=self._wait and error is None)
        except DriverError as found:
            if found.code in statuses.STICKY:
                return  # all devices report it: the call finds it on its first device
            if statuses.failed(found.code):
                blamed = monitor.blame.noticed(self._key, device, found)
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
