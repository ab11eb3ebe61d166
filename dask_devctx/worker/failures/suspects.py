"""Which tasks may have broken the devices of this process: those whose work may not be done yet."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Hashable
from typing import NamedTuple

from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.driver.work import WorkCalls
from dask_devctx.errors import DevctxError, DriverError

logger = logging.getLogger(__name__)

# So many tasks are remembered per device where the driver never says that their work is done.
_REMEMBERED = 64


class Suspect(NamedTuple):
    """A task and the device that it was given work for."""

    key: Hashable
    device: Device

    def __str__(self) -> str:
        return f"{self.key} on {self.device}"


class _Work:
    """What a device was given: the tasks that ended there and may have left work running."""

    def __init__(self) -> None:
        self.left: deque[Suspect] = deque(maxlen=_REMEMBERED)
        self.ended = 0
        self.event = 0
        self.marked: int | None = None  # how many tasks had ended when the event was recorded
        self.looking = False  # one thread at a time: there is one event

    def done(self, ended: int) -> None:
        """Forget the tasks that were among the first ``ended``."""
        while self.left and self.ended - len(self.left) < ended:
            self.left.popleft()


class Suspects:
    """The tasks of this process that may be the cause of a sticky error.

    Notes
    -----
    A kernel can still be running when its task's Python has returned. So a task is a suspect from
    its start until its device was seen to have done all that it had been given when the task
    ended: by an event, which is recorded and looked at without waiting, or by waiting.

    Thread-safe. A sticky error of one device is one of all: the whole process is asked.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Suspect, int] = {}
        self._work: defaultdict[Device, _Work] = defaultdict(_Work)
        self._closed = False

    def started(self, key: Hashable, device: Device) -> None:
        """Count a task that begins."""
        suspect = Suspect(key, device)
        with self._lock:
            self._running[suspect] = self._running.get(suspect, 0) + 1

    def ended(self, key: Hashable, device: Device) -> None:
        """Count a task that returned: its work may still be running on the device."""
        suspect = Suspect(key, device)
        with self._lock:
            count = self._running.pop(suspect, 1) - 1
            if count > 0:
                self._running[suspect] = count
            work = self._work[device]
            work.left.append(suspect)
            work.ended += 1

    def left(self) -> tuple[Device, ...]:
        """Return the devices that were not seen to be done with the tasks' work."""
        with self._lock:
            return tuple(device for device, work in self._work.items() if work.left)

    def marked(self, device: Device) -> bool:
        """Return whether there is a mark to be asked for, without which a look tells nothing."""
        work = self._work.get(device)
        return work is not None and work.marked is not None

    def look(self, device: Device, calls: WorkCalls, *, mark: bool) -> None:
        """Ask how far the device is, without waiting; on a thread where it is current.

        Parameters
        ----------
        device, calls
            The device, and its driver's calls about work.
        mark
            Also mark the work that it has by now, to be asked for next time.

        Raises
        ------
        DriverError
            The device failed.

        Notes
        -----
        Where a mark was reached and a probe finds nothing, the tasks that had ended at the mark are
        cleared: their work is done, and done right. There is one event per device, recorded again
        when it was reached.
        """
        with self._lock:
            work = self._work[device]
            if self._closed or work.looking:
                return
            # An event of the whole context ends a graph's capture that another thread may be at.
            mark = mark and not any(one.device is device for one in self._running)
            work.looking, ended = True, work.ended
        try:
            if work.marked is not None and calls.event_done(work.event):
                calls.probe()
                with self._lock:
                    work.done(work.marked)
                work.marked = None
            if mark and work.marked is None:
                if not work.event:
                    work.event = calls.event_create()
                # A driver that is too old for it clears nobody.
                if calls.event_record_context(work.event, device._handle):
                    work.marked = ended
        except DriverError as error:
            if statuses.failed(error.code):
                raise
            logger.debug("how far %s is cannot be said: %s", device, error)
        finally:
            work.looking = False

    def close(self) -> None:
        """Give the driver its events back."""
        with self._lock:
            self._closed = True
            works = {device: work for device, work in self._work.items() if not work.looking}
        for device, work in works.items():
            if work.event:
                with contextlib.suppress(DevctxError):
                    device._backend.calls.work.event_destroy(work.event)

    def idle(self, device: Device, ended: int) -> None:
        """Clear the first ``ended`` tasks of a device: it was waited for since."""
        with self._lock:
            self._work[device].done(ended)

    def count(self, device: Device) -> int:
        """Return how many tasks have ended on a device so far."""
        with self._lock:
            work = self._work.get(device)
            return 0 if work is None else work.ended

    def named(self, key: Hashable, device: Device) -> tuple[Suspect, ...]:
        """Return all suspects: the one given, those that run, those that ended, latest first."""
        with self._lock:
            first = Suspect(key, device)
            left = [s for work in self._work.values() for s in reversed(work.left)]
            return tuple(dict.fromkeys([first, *self._running, *left]))
