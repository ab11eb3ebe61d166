"""The calls that run on a worker's devices, their unfinished work, and the calls that run alone."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Final

from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.driver.relaxed import RelaxedCapture
from dask_devctx.errors import DriverError
from dask_devctx.scheduler.messages import Failure
from dask_devctx.transfer.events import Event

logger = logging.getLogger(__name__)

# The number of tasks that are remembered for a device whose driver never reports their work done.
_REMEMBERED: Final = 64
# Other tasks wait this long for an isolated task, since that task may wait for one of them. In each
# further isolated run of the task they wait ten times longer, so that tasks that take long can be
# told apart, too.
_PATIENCE_S: Final = 60.0
_LONGER: Final = 10


class Call:
    """A call of a task, of an actor's method, or of another function, on its devices."""

    key: Hashable
    devices: tuple[Device, ...]
    is_task = False  # isolated tasks wait for tasks only, and tasks alone are tried again
    attempts = 0  # how often it ran out of memory
    stayed: Mapping[str, int] | None = None  # the bytes that could not leave then, by reason
    is_last = False  # whether it runs once more, with its device for itself
    isolated = 0  # the number of its isolated run; 0 for any other
    once = ""  # why it does not run again, while it runs and must not
    # Whether no isolated task waits for its end: it is no task, or may wait for others itself.
    aside = False
    alone = False  # whether it has to run alone
    # While it has its turn for that: until when others wait for it, and the device that it has for
    # itself; None for an isolated run, which has all devices of the process.
    until = 0.0
    alone_on: Device | None = None

    def be_patient(self) -> None:
        """Let it wait for others, and others for it, from now on."""
        self.until = time.monotonic() + _PATIENCE_S * _LONGER ** max(self.isolated - 1, 0)


class Calls:
    """The calls of a process that may be the cause of a sticky error, and whose turn it is.

    All devices report a sticky error of one device. So an isolated task waits until the tasks that
    run have ended, and tasks that begin wait until it has ended. If a device fails meanwhile, the
    isolated task is the one suspect. A task that lacks memory waits for the tasks of its device
    only, and only they wait for it.

    No task waits without end, since a task may wait for another one. A task that secedes from its
    thread gives up its turn, and nobody waits for it. Nobody waits for methods of actors either,
    and they wait for nobody. All others continue when their patience ends. Tasks that then run at
    the same time are suspects together.

    Thread-safe: a call is added to the sets, or taken out, in one step.
    """

    def __init__(self) -> None:
        self.running: set[Call] = set()
        self.turns: set[Call] = set()
        self.works = _Works(self)
        self.lock = threading.Lock()
        self.closed = False  # whether all waits end
        self.failure: Failure | None = None  # the first one; the process ends

    def running_on(self, device: Device | None) -> list[Call]:
        """Return the running calls, of one device or of all."""
        return [one for one in tuple(self.running) if device is None or device in one.devices]

    def suspects(self, device: Device | None = None) -> list[tuple[Hashable, Device]]:
        """Return suspects, tasks and the device that each gave work: running, then latest first."""
        every = [(one.key, on) for one in tuple(self.running) for on in one.devices]
        for work in tuple(self.works.values()):
            every += [(key, work.device) for _, key in reversed(tuple(work.left))]
        return [one for one in dict.fromkeys(every) if device is None or one[1] is device]

    # -- calls that run alone

    def may_begin(self, call: Call) -> bool:
        """Return whether a call need not wait for others; one that runs alone holds others back."""
        with self.lock:
            now = time.monotonic()
            if self.closed:
                return True
            if call not in self.turns:
                turns = [o for o in tuple(self.turns) if now < o.until and o.key != call.key]
                if any(one.alone_on in (None, *call.devices) for one in turns):
                    return False
                if not call.alone:
                    return True
                call.be_patient()
                self.turns.add(call)
            others = self.running_on(call.alone_on) if now < call.until else ()
            return all(one.aside or one.key == call.key for one in others)

    def is_alone_on(self, device: Device) -> bool:
        """Return whether a task that lacked memory has a device for itself."""
        return any(one.alone_on is device for one in tuple(self.turns))


class Work:
    """The unfinished work of a device's tasks, and whether the device still works.

    A kernel can still be running after its task's Python has returned. So a task is a suspect from
    its start until its device has done all work that it had when the task ended. This is known from
    an event, which is recorded and queried without waiting, or by waiting for the device.
    """

    def __init__(self, device: Device, calls: Calls) -> None:
        self.device = device
        self.numbers = itertools.count(1)
        # The tasks that ended, and when: by the next one of the numbers.
        self.left: deque[tuple[int, Hashable]] = deque(maxlen=_REMEMBERED)
        self.looked_at = float("-inf")  # when a look at its marks ended, by ``perf_counter``
        self._calls = calls
        # The events that the device has not reached, each with the number at which it was recorded.
        self._marks: deque[tuple[int, Event]] = deque(maxlen=_REMEMBERED)
        self._event: Event | None = None  # of all marks that nobody keeps
        self._looking = threading.Lock()  # held while the marks or the rest are in use

    def wait(self) -> None:
        """Wait for the device, which is current, clear its suspects and probe it."""
        calls, mark = self.device._backend.calls, next(self.numbers)
        with RelaxedCapture(calls.work):
            calls.synchronize()
            with self._looking:
                while self.left and self.left[0][0] < mark:
                    self.left.popleft()
            calls.work.look()

    def look(self, *, mark: bool, kept: bool = False) -> Event | None:
        """Query the progress and health of the device, current or not, without waiting.

        If the device reached a mark and has not failed, the tasks that had ended at the mark are
        cleared. A mark is made when the device has reached all others; one that is ``kept`` is made
        at once, and its event is returned, unless that cannot be recorded.
        """
        look, marks = self.device._backend.calls.work.look, self._marks
        if not (marks or mark) or not self._looking.acquire(blocking=False):
            look(self.device._handle)
            return None
        try:
            asked = bool(marks)
            while marks and look.reached(marks[0][1]._handle):
                number, _ = marks.popleft()
                while self.left and self.left[0][0] < number:
                    self.left.popleft()
            # Recording an event on the whole context ends a graph capture of another thread.
            calls, wanted = self._calls, mark and (kept or not marks)
            if wanted and not (calls.running and calls.running_on(self.device)):
                if self._event is None:
                    self._event = Event(self.device)
                event = Event(self.device, self._event) if kept else self._event
                number = next(self.numbers)
                if look.record(event._handle, self.device._handle):
                    marks.append((number, event))
                    return event if kept else None  # an old driver has no marks: nothing is cleared
                self._event = None  # another context's, if the device was reset
            elif asked:
                return None
            look(self.device._handle)
        except DriverError as error:
            if statuses.failed(error.code):
                raise
            logger.debug("the progress of %s is unknown: %s", self.device, error)
            look(self.device._handle)
        finally:
            self._looking.release()
            self.looked_at = time.perf_counter()
        return None


class _Works(dict[Device, Work]):
    """The unfinished work by device."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __missing__(self, device: Device) -> Work:
        return self.setdefault(device, Work(device, self._calls))
