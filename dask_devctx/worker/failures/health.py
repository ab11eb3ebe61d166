"""The check whether a device still works after a task."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable

from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.driver.relaxed import RelaxedCapture
from dask_devctx.errors import DevctxError, DriverError
from dask_devctx.errors.base import counted
from dask_devctx.worker.failures.suspects import Suspects

logger = logging.getLogger(__name__)

_WARN_EVERY_S = 10.0


class Checkup:
    """Checks devices, and clears the suspects whose work is done."""

    def __init__(
        self, suspects: Suspects, on_failure: Callable[[Device, DriverError], object]
    ) -> None:
        self.left_behind: Counter[Device] = Counter()
        self._lock = threading.Lock()
        self._suspects = suspects
        self._on_failure = on_failure
        self._warned_at: dict[Device, float] = {}

    def drain(self, device: Device) -> None:
        """Wait until a device has done all its work."""
        with device, RelaxedCapture(device._backend.calls.work):
            self._wait(device)

    def after(self, key: Hashable, device: Device, *, wait: bool) -> None:
        """Check a device inside its scope, after a task."""
        calls = device._backend.calls
        if calls.current() != device._handle:
            self._note_left_behind(key, device)
            calls.set_current(device._handle)  # without a context, the probe finds no failure
        if wait:
            with RelaxedCapture(calls.work):
                self._wait(device)
        else:
            self._suspects.look(device, calls.work, mark=True)

    def _wait(self, device: Device) -> None:
        """Wait for a device that is current, clear its suspects and probe it."""
        calls = device._backend.calls
        ended = self._suspects.count(device)
        calls.synchronize()
        self._suspects.idle(device, ended)
        calls.work.probe()

    def between(self) -> None:
        """Check the devices that are in use, and clear the suspects whose work is done."""
        used = (one.device for one in self._suspects.running() if one.device._handle)
        for device in {*self._suspects.left(), *used}:
            self.look(device)

    def look(self, device: Device) -> None:
        """Check a device that may be in use, and clear its suspects whose work is done."""
        try:
            with device:
                self._suspects.look(device, device._backend.calls.work, mark=True)
        except DriverError as error:
            if statuses.failed(error.code):
                self._on_failure(device, error)
        except DevctxError as error:
            logger.debug("the progress of %s is unknown: %s", device, error)

    def _note_left_behind(self, key: Hashable, device: Device) -> None:
        with self._lock:
            self.left_behind[device] += 1
        now = time.monotonic()
        if now - self._warned_at.get(device, -_WARN_EVERY_S) >= _WARN_EVERY_S:
            self._warned_at[device] = now
            logger.warning(
                "the task %r changed the current CUDA context on %s and did not restore it (seen "
                "%s on this device). It did no harm: the earlier context was restored. "
                "'with Device(n):' restores the context by itself",
                key,
                device,
                counted(self.left_behind[device], "time"),
            )
