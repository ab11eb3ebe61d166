"""The check whether a device still works after a task."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Hashable
from contextlib import suppress

from dask_devctx.cuda.device import Device
from dask_devctx.driver.work import RelaxedCapture
from dask_devctx.errors import DevctxError
from dask_devctx.worker.failures.suspects import Suspects

logger = logging.getLogger(__name__)

_WARN_EVERY_S = 10.0


class Checkup:
    """Checks devices, and clears the suspects whose work is done.

    Parameters
    ----------
    suspects
        The tasks whose work may not be done yet.

    Attributes
    ----------
    left_behind
        How often a task left another context current, by device.
    """

    def __init__(self, suspects: Suspects) -> None:
        self.left_behind: Counter[Device] = Counter()
        self._suspects = suspects
        self._warned_at: dict[Device, float] = {}

    def before(self, device: Device) -> None:
        """Check a device inside its scope, before a task for which the worker does not wait.

        Raises
        ------
        DriverError
            The device failed.
        """
        if self._suspects.marked(device):
            calls = device._backend.calls.work
            with RelaxedCapture(calls):
                self._suspects.look(device, calls, mark=False)

    def after(self, key: Hashable, device: Device, *, wait: bool) -> None:
        """Check a device inside its scope, after a task.

        Parameters
        ----------
        key
            The task's key.
        device
            The device.
        wait
            Whether to wait until the device has done all its work.

        Raises
        ------
        DriverError
            The device failed, or the driver gives no answer.
        """
        calls = device._backend.calls
        if calls.current() != device._handle:
            self._note_left_behind(key, device)
            calls.set_current(device._handle)  # without a context, the probe finds no failure
        with RelaxedCapture(calls.work):
            if wait:
                ended = self._suspects.count(device)
                calls.synchronize()
                self._suspects.idle(device, ended)
            else:
                self._suspects.look(device, calls.work, mark=True)
            calls.work.probe()

    def between(self) -> None:
        """Check the devices between tasks, and clear the suspects whose work is done.

        A failure that is found here is ignored: the next task on the device notices it and errs.
        """
        for device in self._suspects.left():
            with suppress(DevctxError), device, RelaxedCapture(device._backend.calls.work):
                self._suspects.look(device, device._backend.calls.work, mark=True)

    def _note_left_behind(self, key: Hashable, device: Device) -> None:
        self.left_behind[device] += 1
        now = time.monotonic()
        if now - self._warned_at.get(device, -_WARN_EVERY_S) >= _WARN_EVERY_S:
            self._warned_at[device] = now
            logger.warning(
                "the task %r changed the current CUDA context on %s and did not restore it (seen "
                "%d times on this device). It did no harm: the earlier context was restored. "
                "'with Device(n):' restores the context by itself",
                key,
                device,
                self.left_behind[device],
            )
