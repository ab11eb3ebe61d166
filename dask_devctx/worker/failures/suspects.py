"""The tasks of one process whose work on a device may not be done yet."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Hashable
from typing import NamedTuple

from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.driver.relaxed import RelaxedCapture
from dask_devctx.driver.work import WorkCalls
from dask_devctx.errors import DevctxError, DriverError

logger = logging.getLogger(__name__)

# The number of tasks that are remembered for a device whose driver never reports their work done.
_REMEMBERED = 64


class Suspect(NamedTuple):
    """A task and the device to which it gave work."""

    key: Hashable
    device: Device


class _Work:
    """The tasks that ended on a device and whose work may still be running."""

    def __init__(self) -> None:
        self.left: deque[Suspect] = deque(maxlen=_REMEMBERED)
        self.ended = 0
        self.event = 0
        self.marked: int | None = None  # how many tasks had ended when the event was recorded
        self.looking = False  # one thread at a time: there is one event

    def done(self, ended: int) -> None:
        """Forget the first ``ended`` tasks."""
        while self.left and self.ended - len(self.left) < ended:
            self.left.popleft()


class Suspects:
    """The tasks of this process that may be the cause of a sticky error.

    A kernel can still be running after its task's Python has returned. So a task is a suspect from
    its start until its device has done all work that it had when the task ended. This is known from
    an event, which is recorded and queried without waiting, or by waiting for the device.

    Thread-safe. All devices report a sticky error of one device, so the tasks of all are suspects.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Suspect, int] = {}
        self._aside: set[Hashable] = set()
        self._work: defaultdict[Device, _Work] = defaultdict(_Work)
        self._closed = False

    def started(self, suspect: Suspect, *, aside: bool = False) -> None:
        """Count a task that begins; no watched task waits for the end of one that is ``aside``."""
        with self._lock:
            self._running[suspect] = self._running.get(suspect, 0) + 1
            if aside:
                self._aside.add(suspect.key)

    def seceded(self, key: Hashable) -> None:
        """Let no watched task wait for a task that may wait for other tasks itself.

        The task may have ended meanwhile: its next run is waited for.
        """
        with self._lock:
            if any(one.key == key for one in self._running):
                self._aside.add(key)

    def withdrawn(self, suspect: Suspect) -> None:
        """Count a task no more that began, but was not called yet."""
        with self._lock:
            self._left_off(suspect)

    def ended(self, suspect: Suspect) -> None:
        """Count a task that returned: its work may still be running on the device."""
        with self._lock:
            count = self._running.pop(suspect, 1) - 1
            if count > 0 or self._aside:
                self._running[suspect] = count + 1
                self._left_off(suspect)
            work = self._work[suspect.device]
            work.left.append(suspect)
            work.ended += 1

    def _left_off(self, suspect: Suspect) -> None:
        count = self._running.pop(suspect, 1) - 1
        if count > 0:
            self._running[suspect] = count
        elif self._aside:
            self._aside.discard(suspect.key)

    def others_run(self, key: Hashable, device: Device | None = None) -> bool:
        """Return whether a task runs, on a device or any, for which the task ``key`` has to wait.

        That task runs alone, in its process or on the device.
        """
        with self._lock:
            return any(
                one.key != key and one.key not in self._aside and device in (None, one.device)
                for one in self._running
            )

    def left(self) -> tuple[Device, ...]:
        """Return the devices that may still have work of tasks that ended."""
        with self._lock:
            return tuple(device for device, work in self._work.items() if work.left)

    def look(self, device: Device, calls: WorkCalls, *, mark: bool) -> None:
        """Query a device's progress and health without waiting, where the device is current.

        If the device reached the mark and a probe finds no error, the tasks that had ended at the
        mark are cleared: their work succeeded. Each device has one event, which is recorded again
        after the device reached it.
        """
        work = self._work.get(device)
        if work is None or (work.marked is None and not mark):
            calls.look()
            return
        with self._lock:
            alone = not (self._closed or work.looking)
            if alone:
                # Recording an event on the whole context ends a graph capture of another thread.
                mark = mark and not (
                    self._running and any(one is device for _, one in self._running)
                )
                work.looking, ended = True, work.ended
        if not alone:
            calls.look()
            return
        try:
            marked = work.marked
            if mark and not work.event:
                with RelaxedCapture(calls):
                    work.event = calls.event_create()
            query = marked is not None
            reached, recorded = calls.look(work.event, device._handle, query=query, record=mark)
            if reached and marked is not None:
                with self._lock:
                    if work.left:
                        work.done(marked)
            if recorded:
                work.marked = ended
            elif reached or not query:
                # A driver that is too old for marks clears no suspect.
                work.marked = None
                if mark:  # perhaps the device failed just now
                    calls.look()
        except DriverError as error:
            if statuses.failed(error.code):
                raise
            logger.debug("the progress of %s is unknown: %s", device, error)
            calls.look()
        finally:
            work.looking = False

    def close(self) -> None:
        """Destroy the driver's events."""
        with self._lock:
            self._closed = True
            works = {device: work for device, work in self._work.items() if not work.looking}
        for device, work in works.items():
            if work.event:
                with contextlib.suppress(DevctxError):
                    device._backend.calls.work.event_destroy(work.event)

    def idle(self, device: Device, ended: int) -> None:
        """Clear the first ``ended`` tasks of a device, after a wait for the device."""
        with self._lock:
            self._work[device].done(ended)

    def count(self, device: Device) -> int:
        """Return how many tasks have ended on a device so far."""
        with self._lock:
            work = self._work.get(device)
            return 0 if work is None else work.ended

    def running(self, device: Device | None = None) -> tuple[Suspect, ...]:
        """Return the running tasks, of one device or of all."""
        with self._lock:
            return tuple(one for one in self._running if device in (None, one.device))

    def named(self, device: Device | None = None) -> tuple[Suspect, ...]:
        """Return all suspects, of one device or of all: running tasks first, then latest first."""
        with self._lock:
            left = [one for work in self._work.values() for one in reversed(work.left)]
            every = dict.fromkeys([*self._running, *left])
            return tuple(one for one in every if device in (None, one.device))
