"""The order in which a worker's tasks get the slots, shares and bytes of its devices.

Their priorities are made in `worker/execute.py`. All that a task needs is taken at once, on all of
its devices, under one lock. So no task holds a part and waits for the rest, and no two tasks can
wait for each other.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, Final

from dask_devctx.cuda.device import Device

# A whole device. Shares are counted in whole millionths: sums of floats would go beyond 1.
WHOLE: Final = 1_000_000


class Claim:
    """All that one run of a task takes on its devices; the smallest priority gets it first."""

    key: Hashable
    ts: Any = None  # dask's state of its task
    devices: tuple[Device, ...]
    share: int  # of each device, in millionths
    priority: tuple[Any, ...]
    held = False
    waits = False
    given = False  # whether others have got its slot, and it keeps its thread
    nbytes = 0  # on each device
    placed_at = began_at = 0.0
    anywhere = False  # whether it could be on any other device as well
    counted = False  # whether the placement counts its task
    # For the choice of the next task's device: the slots of each device, and the seconds of these.
    prefix = ""
    slots = 1.0
    expected_s = 0.0
    # The call for the first device's threads when it is granted; or a function to call then.
    call: Any = None
    granted: Callable[[], object] | None = None

    def seceded(self) -> None:
        """Called on its thread each time that it secedes."""


_Entry = tuple[tuple[Any, ...], int, Claim]


class DeviceState:
    """One device: what is free there, the claims that wait, and the calls that may start."""

    def __init__(self, admission: Admission, device: Device, nbytes: float) -> None:
        self.admission = admission
        self.device = device
        self.free = WHOLE
        self.free_nbytes = nbytes
        self.holding: list[Claim] = []
        self.waiting: list[_Entry] = []  # a heap
        self.queue: list[object] = []  # a worker that closes clears it; threads may wait for claims
        self.ready: deque[Any] = deque()
        self.running: dict[int, Any] = {}  # by thread
        self.threads = 0  # as many may run here; `grow` starts more
        self.grow: Callable[[int], object] = lambda threads: None
        self.is_ended = False
        self.changed = threading.Condition(admission.lock)
        # Kept by the placement, on the event loop.
        self.tasks = 0  # that run or wait
        self.busy_s = 0.0  # the seconds that are expected of them
        self.last_turn = 0  # when it got the last one
        self.free_memory: int | None = None  # in bytes
        self.since = 0.0  # the moment since which it has tasks
        self.occupied_s = 0.0  # with tasks, before that
        self.used_s = 0.0  # the sum of the seconds of tasks that ended

    # -- as the queue of a thread pool

    def put(self, call: Any) -> None:
        """Queue a call before all tasks; None ends the threads after all."""
        with self.changed:
            if call is None:
                self.is_ended = True
                self.changed.notify_all()
            else:
                self.ready.appendleft(call)
                self.changed.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next call for this thread; None to end it."""
        with self.admission.lock:  # that of ``changed``, without two calls of Python's
            if not self.ready:
                if self.is_ended and not any(
                    one.waits and one.devices[0] is self.device for _, _, one in self.waiting
                ):
                    return None
                self.changed.wait(timeout)
                if not self.ready:
                    raise queue.Empty
            call = self.ready.popleft()
            claim = getattr(call, "claim", None)  # others than tasks have none
            if claim is not None:
                self.running[threading.get_ident()] = claim
            return call

    def left(self) -> None:
        """Release what this thread's task has: it seceded, and may do so again."""
        if (claim := self.running.get(threading.get_ident())) is not None:
            self.admission.give_up(claim, keeps_thread=False)

    def rejoined(self) -> None:
        """Let this thread's task have that again at once, also beyond what is free."""
        with self.admission.lock:
            claim = self.running.get(threading.get_ident())
            if claim is not None and not claim.held:
                claim.given, claim.held = False, True
                for one in map(self.admission.states.__getitem__, claim.devices):
                    one.holding.append(claim)
                    one.free -= claim.share
                    one.free_nbytes -= claim.nbytes

    def start_threads(self) -> None:
        """Let the calls that are ready have threads beside those of running tasks."""
        runs = (*self.running.values(),)  # at once: a call that ends takes itself out
        self.grow(len(self.ready) + sum(run.held or run.given for run in runs))


class Admission:
    """Decides which tasks of one worker may start on its devices; thread-safe.

    A claim of several devices reserves them while it is the most urgent on each.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        tasks_per_device: int,
        limits: Mapping[Device, int] | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.tasks_per_device = tasks_per_device
        self.slot = WHOLE // tasks_per_device
        self.limits = limits or {}  # the bytes that tasks may reserve
        self.states = {
            device: DeviceState(self, device, self.limits.get(device, math.inf))
            for device in devices
        }
        self._count = 0
        self._several = 0  # the waiting claims of several devices

    def submit(self, claim: Claim) -> None:
        """Let a claim wait for its turn, which may come at once."""
        with self.lock:
            self._count += 1
            claim.waits, claim.held = True, False
            entry = claim.priority, self._count, claim
            for device in claim.devices:
                heappush(self.states[device].waiting, entry)
            self._several += len(claim.devices) > 1
            self._look(claim)

    def withdraw(self, claim: Claim) -> bool:
        """Take a claim out of the line, so that it never begins; return whether it waited."""
        with self.lock:
            waited = claim.waits
            if waited:
                claim.waits = False
                self._several -= len(claim.devices) > 1
                self._look(claim)
            return waited

    def late(self, since: float) -> list[Claim]:
        """Return claims that wait since before a moment and could be anywhere, the last first."""
        with self.lock:
            self._look_at_all()  # one that was cancelled since holds up others no more
            every = [one for state in self.states.values() for one in state.waiting]
        claims = [claim for _, _, claim in sorted(every, reverse=True)]
        return [one for one in claims if one.waits and one.anywhere and one.placed_at < since]

    def release(self, claim: Claim) -> None:
        """Give back what a claim holds; a second call does nothing."""
        with self.lock:
            if not claim.held:
                return
            claim.held = False
            for device in claim.devices:
                one = self.states[device]
                one.holding.remove(claim)
                one.free += claim.share
                one.free_nbytes += claim.nbytes
            self._look(claim)

    def give_up(self, claim: Claim, *, keeps_thread: bool) -> None:
        """Release what a claim holds while its task goes on: it seceded, or others may run."""
        claim.given = keeps_thread
        self.release(claim)
        if keeps_thread:  # it may have rejoined on the thread of a call that was ready
            with self.lock:
                self.states[claim.devices[0]].start_threads()
        claim.seceded()

    def waiting_for(self, device: Device) -> int:
        """Return how many tasks wait for a device."""
        with self.lock:
            return sum(claim.waits for _, _, claim in self.states[device].waiting)

    # -- decisions, with the lock held

    def _look(self, claim: Claim) -> None:
        """Grant the claims whose turn it is, after a claim came or went."""
        if self._several:
            self._look_at_all()
            return
        for device in claim.devices:
            one = self.states[device]
            waiting = one.waiting
            while waiting:
                first = waiting[0][2]
                if not first.waits:
                    heappop(waiting)
                elif first.share <= one.free and first.nbytes <= one.free_nbytes:
                    heappop(waiting)
                    self._grant(first, (one,))
                else:
                    break

    def _look_at_all(self) -> None:
        """Grant claims in their order; one that is first on all of its devices holds up others."""
        waiting: set[_Entry] = set()
        for one in self.states.values():
            while one.waiting and not one.waiting[0][2].waits:
                heappop(one.waiting)
            waiting.update(one.waiting)
        waited_for: set[Device] = set()
        for _, _, claim in sorted(waiting):
            if len(waited_for) == len(self.states):
                break
            if not (claim.waits and waited_for.isdisjoint(claim.devices)):
                continue
            states = [self.states[device] for device in claim.devices]
            if all(claim.share <= one.free and claim.nbytes <= one.free_nbytes for one in states):
                self._grant(claim, states)
            elif getattr(claim.ts, "state", "") != "cancelled":
                waited_for.update(claim.devices)

    def _grant(self, claim: Claim, states: Sequence[DeviceState]) -> None:
        """Let a claim's call begin, which has its part of its devices from now on."""
        claim.waits, claim.held = False, True
        for one in states:
            one.holding.append(claim)
            one.free -= claim.share
            one.free_nbytes -= claim.nbytes
        self._several -= len(claim.devices) > 1
        if claim.granted is not None:
            claim.granted()
            return
        first = self.states[claim.devices[0]]
        first.ready.append(claim.call)
        first.changed.notify()
        if len(first.ready) + len(first.running) > first.threads:
            first.start_threads()
