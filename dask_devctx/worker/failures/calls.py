"""The calls that run on a worker's devices, their unfinished work, and the calls that run alone."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Hashable
from typing import Final

from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.driver.relaxed import RelaxedCapture
from dask_devctx.errors import DevctxError, DriverError

logger = logging.getLogger(__name__)

# The number of tasks that are remembered for a device whose driver never reports their work done.
_REMEMBERED: Final = 64
# Other tasks wait this long for an isolated task, since that task may wait for one of them. In each
# further isolated run of the task they wait ten times longer, so that tasks that take long can be
# told apart, too.
PATIENCE_S: Final = 60.0
LONGER: Final = 10

# A task and a device to which it gave work.
Suspect = tuple[Hashable, Device]


class Call:
    """A call of a task, of an actor's method, or of another function, on its devices."""

    key: Hashable
    devices: tuple[Device, ...]
    once = ""  # why it does not run again, while it runs and must not
    # Whether no isolated task waits for its end: it is no task, or may wait for others itself.
    aside = False
    # While it has its turn to run alone: until when others wait for it, and the device that it has
    # for itself; None for an isolated run, which has all devices of the process.
    until = 0.0
    alone_on: Device | None = None
    patience_s = PATIENCE_S  # how long it waits for others, and others for it


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
        self._taking = threading.Lock()
        self._closed = False

    def running_on(self, device: Device | None) -> list[Call]:
        """Return the running calls, of one device or of all."""
        return [one for one in tuple(self.running) if device is None or device in one.devices]

    def suspects(self, device: Device | None = None) -> list[Suspect]:
        """Return all suspects, of one device or of all: running tasks first, then latest first."""
        running = [(one.key, on) for one in tuple(self.running) for on in one.devices]
        left = [
            (key, work.device) for work in self.all_work() for key in reversed(tuple(work.left))
        ]
        every = dict.fromkeys([*running, *left])
        return [one for one in every if device is None or one[1] is device]

    def all_work(self) -> tuple[Work, ...]:
        """Return the unfinished work of all devices that were used."""
        return tuple(self.works.values())

    # -- calls that run alone

    def took_turn(self, call: Call, alone: bool) -> bool:
        """Return whether no other call holds it back; where it is to run alone, it holds others."""
        with self._taking:
            if call in self.turns:
                return True
            if self.holds_back(call):
                return False
            if alone:
                call.until = time.monotonic() + call.patience_s
                self.turns.add(call)
            return True

    def holds_back(self, call: Call) -> bool:
        """Return whether a call has to wait for one that runs alone."""
        now = time.monotonic()
        return not self._closed and any(
            now < one.until
            for one in tuple(self.turns)
            if one.key != call.key and (one.alone_on is None or one.alone_on in call.devices)
        )

    def has_to_wait(self, call: Call) -> bool:
        """Return whether a call that has its turn still waits for others that run."""
        return (
            not self._closed
            and time.monotonic() < call.until
            and any(o.key != call.key and not o.aside for o in self.running_on(call.alone_on))
        )

    def seceded(self, call: Call) -> None:
        """Give a call's turn to the next one, while the first continues: it may wait for others."""
        call.aside = True
        call.until = 0.0

    def is_isolated(self, key: Hashable) -> bool:
        """Return whether a task runs alone, as one that may have broken a device before."""
        return any(one.key == key and one.alone_on is None for one in tuple(self.turns))

    def is_alone_on(self, device: Device) -> bool:
        """Return whether a task that lacked memory has a device for itself."""
        return any(one.alone_on is device for one in tuple(self.turns)) if self.turns else False

    def close(self) -> None:
        """End all waits, and destroy the driver's events."""
        self._closed = True
        for work in self.all_work():
            work.close()


class Work:
    """The unfinished work of a device's tasks, and whether the device still works.

    A kernel can still be running after its task's Python has returned. So a task is a suspect from
    its start until its device has done all work that it had when the task ended. This is known from
    an event, which is recorded and queried without waiting, or by waiting for the device.
    """

    def __init__(self, device: Device, calls: Calls) -> None:
        self.device = device
        self.left: deque[Hashable] = deque(maxlen=_REMEMBERED)  # the keys of tasks that ended
        self.left_behind = 0
        self._calls = calls
        self._lock = threading.Lock()
        self._ended = 0
        self._event = 0
        self._marked: int | None = None  # how many tasks had ended when the event was recorded
        self._looking = threading.Lock()  # held while the event is in use, and after the end

    def ended(self, key: Hashable) -> None:
        """Count a task that returned: its work may still be running on the device."""
        with self._lock:
            self.left.append(key)
            self._ended += 1

    def _done(self, ended: int) -> None:
        """Forget the first ``ended`` tasks."""
        with self._lock:
            while self.left and self._ended - len(self.left) < ended:
                self.left.popleft()

    def check(self, key: Hashable, *, wait: bool) -> None:
        """Check the device inside its scope, after a task; raise if it failed."""
        calls = self.device._backend.calls
        if calls.current() != self.device._handle:
            self._note_left_behind(key)
            calls.set_current(self.device._handle)  # without a context, the probe finds no failure
        if wait:
            self.wait()
        else:
            self.look(mark=True)

    def wait(self) -> None:
        """Wait for the device, which is current, clear its suspects and probe it."""
        calls, ended = self.device._backend.calls, self._ended
        with RelaxedCapture(calls.work):
            calls.synchronize()
            self._done(ended)
            calls.work.probe()

    def look(self, *, mark: bool) -> None:
        """Query the progress and health of the device, which is current, without waiting.

        If the device reached the mark and a probe finds no error, the tasks that had ended at the
        mark are cleared: their work succeeded. The event is recorded again after the device reached
        it.
        """
        calls = self.device._backend.calls.work
        if (self._marked is None and not mark) or not self._looking.acquire(blocking=False):
            calls.look()
            return
        ended, marked = self._ended, self._marked
        # Recording an event on the whole context ends a graph capture of another thread.
        mark = mark and not (self._calls.running and self._calls.running_on(self.device))
        query = marked is not None
        try:
            if mark and not self._event:
                with RelaxedCapture(calls):
                    self._event = calls.event_create()
            handle = self.device._handle
            reached, recorded = calls.look(self._event, handle, query=query, record=mark)
            if reached and marked is not None and self.left:
                self._done(marked)
            if recorded:
                self._marked = ended
            elif reached or not query:
                # A driver that is too old for marks clears no suspect.
                self._marked = None
                if mark:  # perhaps the device failed just now
                    calls.look()
        except DriverError as error:
            if statuses.failed(error.code):
                raise
            logger.debug("the progress of %s is unknown: %s", self.device, error)
            calls.look()
        finally:
            self._looking.release()

    def _note_left_behind(self, key: Hashable) -> None:
        with self._lock:
            self.left_behind += 1
        if self.left_behind == 1:
            logger.warning(
                "the task %r changed the current CUDA context on %s and did not restore it. It did "
                "no harm: the earlier context was restored. 'with Device(n):' restores the context "
                "by itself. Prometheus counts further tasks (dask_devctx_failures_total)",
                *(key, self.device),
            )

    def close(self) -> None:
        """Destroy the driver's event, unless it is in use."""
        if self._looking.acquire(blocking=False) and self._event:
            with contextlib.suppress(DevctxError):
                self.device._backend.calls.work.event_destroy(self._event)


class _Works(dict[Device, Work]):
    """The unfinished work by device."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __missing__(self, device: Device) -> Work:
        return self.setdefault(device, Work(device, self._calls))
