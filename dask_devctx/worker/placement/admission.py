"""The order in which a worker's tasks get the slots, shares and bytes of its devices.

All that a task needs is taken at once, on all of its devices, under one lock. So no task holds a
part and waits for the rest, and no two tasks can wait for each other.
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
from dask_devctx.errors import counted, listed

# A whole device. Shares are counted in whole millionths: sums of floats would go beyond 1.
WHOLE: Final = 1_000_000
_SHOWN: Final = 8  # the most actors that a report names
_REMEDY: Final = (
    "Release the actor when it is not needed (del its future), give it a smaller device_share, or "
    "let tasks name no device"
)


def share_units(share: float) -> int:
    """Return a share in millionths, rounded down, so that n shares of 1/n fit on a device."""
    return max(int(share * WHOLE + 1e-6), 1)


class Claim:
    """All that one run of a task takes on its devices; the smallest priority gets it first."""

    any_device = False  # whether it may be of other devices
    held = False
    waits = False
    void = False  # its task was cancelled while it waited, and must not run
    for_life = False  # an actor's: kept until it is released explicitly
    # For the choice of the next task's device: the slots of each device, and the seconds of these.
    prefix = ""
    slots = 1.0
    expected_s = 0.0
    # The call for the first device's threads when it is granted; or a function to call then.
    call: Any = None
    granted: Callable[[], object] | None = None

    def __init__(
        self,
        key: Hashable,
        devices: tuple[Device, ...],
        share: int,
        nbytes: int = 0,
        priority: tuple[Any, ...] = (),
    ) -> None:
        self.key = key
        self.devices = devices
        self.share = share  # of each device, in millionths
        self.nbytes = nbytes  # on each device
        self.priority = priority

    def seceded(self) -> None:
        """Called on its thread each time that it secedes."""

    def released(self) -> None:
        """Called after a claim that reserves bytes has given all back."""


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
        self.running: dict[int, Claim] = {}  # by thread
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
        with self.changed:
            if not self.ready:
                if self.is_ended and not self._is_waited_for():
                    return None
                self.changed.wait(timeout)
                if not self.ready:
                    raise queue.Empty
            call = self.ready.popleft()
            if call.claim is not None:
                self.running[threading.get_ident()] = call.claim
            return call

    def _is_waited_for(self) -> bool:
        return any(c.waits and c.devices[0] is self.device for _, _, c in self.waiting)

    def left(self) -> None:
        """Release what this thread's task has: it seceded, and may do so again."""
        claim = self.running.get(threading.get_ident())
        if claim is not None:
            self.admission.release(claim)
            claim.seceded()

    def over(self) -> None:
        """Release what this thread's task had, unless its actor keeps it."""
        claim = self.running.pop(threading.get_ident(), None)
        if claim is not None and claim.held and not claim.for_life:
            self.admission.release(claim)


class Admission:
    """Decides which tasks of one worker may start on its devices; thread-safe.

    A claim of several devices reserves them while it is the most urgent on each. A claim that only
    the end of an actor could serve reserves nothing.
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
        self._actors: list[Claim] = []

    def submit(self, claim: Claim) -> None:
        """Let a claim wait for its turn, which may come at once."""
        with self.lock:
            self._count += 1
            claim.waits = True
            claim.held = claim.void = False
            entry = claim.priority, self._count, claim
            for device in claim.devices:
                heappush(self.states[device].waiting, entry)
            if len(claim.devices) > 1:
                self._several += 1
            self._look(claim)

    def withdraw(self, claim: Claim) -> None:
        """Take a claim that waits out of the line; its task must not run."""
        with self.lock:
            if claim.waits:
                claim.void = True
                self._end_wait(claim)
                self._look(claim)

    def release(self, claim: Claim) -> None:
        """Give back what a claim holds; a second call does nothing."""
        with self.lock:
            if not claim.held:
                return
            claim.held = False
            claim.for_life = False
            if claim in self._actors:
                self._actors.remove(claim)
            for device in claim.devices:
                one = self.states[device]
                one.holding.remove(claim)
                one.free += claim.share
                one.free_nbytes += claim.nbytes
            if claim.nbytes:
                claim.released()
            self._look(claim)

    def keep(self, claim: Claim) -> None:
        """Let a claim hold its devices until it is released, without a wait: an actor's."""
        with self.lock:
            if not claim.held:
                self._take(claim)
            claim.for_life = True
            self._actors.append(claim)
            self._look(claim)  # tasks behind one that only its end could serve

    def forget_actors(self) -> None:
        """Give the devices of actors to the tasks that wait, since no task comes after them."""
        with self.lock:
            for claim in tuple(self._actors):
                self.release(claim)
                claim.for_life = True

    def free_of_actors(self, device: Device) -> tuple[int, float]:
        """Return the share and the bytes of a device that actors leave."""
        with self.lock:
            one = self.states[device]
            share, nbytes = one.free, one.free_nbytes
            for claim in one.holding:
                if not claim.for_life:
                    share += claim.share
                    nbytes += claim.nbytes
            return share, nbytes

    @property
    def has_actors(self) -> bool:
        """Whether actors keep parts of devices."""
        return bool(self._actors)

    def blocked(self) -> list[Claim]:
        """Return the claims that can never start while the actors of today live."""
        with self.lock:
            waiting = {id(c): c for q in self.states.values() for _, _, c in sorted(q.waiting)}
            return [one for one in waiting.values() if one.waits and not self._may(one)]

    def may_move(self, claim: Claim) -> bool:
        """Return whether other devices of the worker can run a task that names none."""
        with self.lock:
            fit = sum(self._leaves_room(device, claim) for device in self.states)
        return claim.any_device and fit >= len(claim.devices)

    # -- what reports ask

    @property
    def idle(self) -> bool:
        """Whether no claim waits or holds anything."""
        with self.lock:
            return not any(q.holding or _count_of(q) for q in self.states.values())

    def waiting_for(self, device: Device) -> int:
        """Return how many tasks wait for a device."""
        with self.lock:
            return _count_of(self.states[device]) if device in self.states else 0

    def waits_for_actors(self) -> str:
        """Return which actors hold devices that tasks wait for, and the remedy; "" without any."""
        found = []
        with self.lock:
            for device, one in self.states.items():
                keys = [repr(claim.key) for claim in one.holding if claim.for_life]
                if keys and (count := self.waiting_for(device)):
                    found.append(
                        f"{device} is held by {listed(keys, _SHOWN)} until their futures are "
                        f"released, and {counted(count, 'task')} queued for it"
                    )
        return f"{'; '.join(found)}. {_REMEDY}" if found else ""

    # -- decisions, with the lock held

    def _look(self, claim: Claim) -> None:
        """Grant the claims whose turn it is, after a claim came or went."""
        if self._several or self._actors:
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
                    first.held = True  # as `_take`: each that waits here has this device only
                    one.holding.append(first)
                    one.free -= first.share
                    one.free_nbytes -= first.nbytes
                    self._end_wait(first)
                else:
                    break

    def _look_at_all(self) -> None:
        """Grant claims in their order; one that has to wait is waited for on all of its devices.

        A claim that is behind another one on some of its devices is not waited for on the others.
        """
        entries: dict[int, _Entry] = {}
        for one in self.states.values():
            while one.waiting and not one.waiting[0][2].waits:
                heappop(one.waiting)
            entries.update((entry[1], entry) for entry in one.waiting)
        waited_for: set[Device] = set()
        for _, _, claim in sorted(entries.values()):
            if len(waited_for) == len(self.states):
                break
            if not (claim.waits and waited_for.isdisjoint(claim.devices) and self._may(claim)):
                continue
            free = [self.states[device] for device in claim.devices]
            if all(claim.share <= one.free and claim.nbytes <= one.free_nbytes for one in free):
                self._take(claim)
                self._end_wait(claim)
            else:
                waited_for.update(claim.devices)

    def _may(self, claim: Claim) -> bool:
        """Return whether a claim can start while the actors of today live."""
        if not self._actors:
            return True
        return all(self._leaves_room(device, claim) for device in claim.devices)

    def _leaves_room(self, device: Device, claim: Claim) -> bool:
        share, nbytes = self.free_of_actors(device)
        return claim.share <= share and claim.nbytes <= nbytes

    def _take(self, claim: Claim) -> None:
        claim.held = True
        for device in claim.devices:
            one = self.states[device]
            one.holding.append(claim)
            one.free -= claim.share
            one.free_nbytes -= claim.nbytes

    def _end_wait(self, claim: Claim) -> None:
        claim.waits = False
        if len(claim.devices) > 1:
            self._several -= 1
        if claim.granted is not None:
            claim.granted()
            return
        first = self.states[claim.devices[0]]
        first.ready.append(claim.call)
        first.changed.notify()
        if len(first.ready) + len(first.running) > first.threads:
            self._grow(first)

    def _grow(self, one: DeviceState) -> None:
        one.grow(len(one.ready) + sum(claim.held for claim in one.running.values()))


def _count_of(one: DeviceState) -> int:
    return sum(claim.waits for _, _, claim in one.waiting)
