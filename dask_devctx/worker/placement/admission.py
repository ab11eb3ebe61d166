"""The decision which waiting task may start: places, shares and bytes of a worker's devices.

A task that asks for more than a place on one device has a :class:`Claim`. All that the claim needs
is taken at once, when it is there on all of its devices. So tasks that hold a part of it and wait
for the rest do not exist, and no two tasks can wait for each other.

A claim that waits reserves its devices. Less urgent tasks fill in there only if they end in time.
"""

from __future__ import annotations

import math
import threading
from bisect import insort
from collections.abc import Callable, Hashable, Mapping, Sequence
from time import monotonic
from typing import Any, Final

from dask_devctx.cuda.device import Device
from dask_devctx.errors.base import counted, listed
from dask_devctx.worker.placement.occupancy import Occupancy

# Where durations are unknown, less urgent tasks start on a reserved device for so long.
PATIENCE_S: Final = 1.0
_SHOWN: Final = 8  # the most actors that a report names
_REMEDY: Final = (
    "Release the actor when it is not needed (del its future), give it a smaller device_share, or "
    "let tasks name no device"
)


class Claim:
    """All that one run of a task takes on its devices.

    Parameters
    ----------
    key, prefix
        The task's key, and the common name of tasks of its kind.
    devices
        The task's devices; the first one's threads run it.
    share
        The share of each device, in millionths.
    nbytes
        The bytes that it reserves on each.
    urgency
        The task's priority among all that wait for these devices; the smallest comes first.
    later
        Its priority once it has waited for the admission's ``patience_s``.

    Attributes
    ----------
    held
        Whether it has what it needs now.
    void
        Whether its task was cancelled while it waited. It gets nothing, and its task must not run.
    for_life
        Whether it is kept until it is released explicitly: an actor's claim.
    given_back
        Called once when it is released.
    """

    __slots__ = (
        *("_admission", "_granted", "_number", "devices", "for_life", "given_back", "held"),
        *("key", "later"),
        *("nbytes", "prefix", "share", "since", "urgency", "void", "waits"),
    )

    def __init__(
        self,
        admission: Admission,
        key: Hashable,
        prefix: str,
        devices: Sequence[Device],
        share: int,
        nbytes: int,
        urgency: tuple[Any, ...],
        later: tuple[Any, ...] | None = None,
    ) -> None:
        self.key = key
        self.prefix = prefix
        self.devices = tuple(devices)
        self.share = share
        self.nbytes = nbytes
        self.urgency = urgency
        self.later = urgency if later is None else later
        self.held = self.void = self.waits = self.for_life = False
        self.since = 0.0
        self.given_back: Callable[[], None] = _nothing
        self._number = 0
        self._admission = admission
        self._granted: Callable[[], None] = _nothing

    def __lt__(self, other: Claim) -> bool:
        return (self.urgency, self._number) < (other.urgency, other._number)

    def submit(self, granted: Callable[[], None]) -> None:
        """Wait until all that the claim needs is there, and take it.

        Parameters
        ----------
        granted
            Called once, with the lock of the admission held, on any thread: it must not wait. The
            claim is ``held`` then, or ``void``.
        """
        self._admission.submit(self, granted)

    def withdraw(self) -> None:
        """Stop waiting, because the task was cancelled; nothing happens if it does not wait."""
        self._admission.withdraw(self)

    def ended(self) -> None:
        """Give all back when the task's call is over, unless its actor keeps it."""
        if not self.for_life:
            self.release()

    def release(self) -> None:
        """Give all back; a second call does nothing."""
        self._admission.release(self)

    def wait(self) -> None:
        """Submit it and wait on this thread until it is granted."""
        there = threading.Event()
        self.submit(there.set)
        there.wait()


def _nothing() -> None:
    pass


class Admission:
    """Decides which tasks of one worker may start on its devices.

    Parameters
    ----------
    devices
        The worker's devices.
    tasks_per_device
        How many tasks that say nothing run on a device at a time.
    durations
        The measured duration of tasks by prefix, in seconds; read at any time.
    limits
        The bytes that claims may reserve, by device; a device without an entry is unlimited.
    patience_s
        How long tasks of unknown duration may start on a device that a claim waits for.

    Attributes
    ----------
    lock
        Guards this object and the queues of the devices.
    occupancy
        The places, shares and bytes of the devices, and who has them.
    idle
        Whether no claim waits or holds anything: then plain tasks need no permission.

    Notes
    -----
    Thread-safe. The first claim in line for its devices reserves them, so each device is reserved
    by one claim at most. Others that are less urgent start there only if they end before the claim
    can start, by measured durations. Where a duration is unknown, they may start until the claim
    has waited for ``patience_s``. A claim that waits for the end of an actor reserves nothing.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        tasks_per_device: int,
        durations: Mapping[str, float],
        *,
        limits: Mapping[Device, int] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.lock = threading.RLock()
        self.idle = True
        self.tasks_per_device = tasks_per_device
        self._patience_s = patience_s
        self.occupancy = Occupancy(devices, tasks_per_device, durations, limits or {})
        self._waiting: list[Claim] = []
        self._reserved: dict[Device, Claim] = {}
        self._count = 0

    # -- claims

    def submit(self, claim: Claim, granted: Callable[[], None]) -> None:
        """Let a claim wait for its turn, which may come at once."""
        with self.lock:
            self._count += 1
            claim._number, claim._granted = self._count, granted
            claim.held = claim.void = False
            claim.since, claim.waits = monotonic(), True
            insort(self._waiting, claim)
            self.idle = False
            self.look()

    def withdraw(self, claim: Claim) -> None:
        """Take a claim that waits out of the line; its task must not run."""
        with self.lock:
            if claim.waits:
                claim.void = True
                self._leave_line(claim)
                self.look()

    def release(self, claim: Claim) -> None:
        """Give back what a claim holds."""
        with self.lock:
            claim.for_life = False
            if claim.held:
                claim.held = False
                for device in claim.devices:
                    self.occupancy.holding[device].pop(claim, None)
                given_back, claim.given_back = claim.given_back, _nothing
                given_back()
                self.look()

    def keep(self, claim: Claim) -> None:
        """Let a claim of an actor that lives already hold its devices, without a wait."""
        with self.lock:
            claim._admission = self
            claim.for_life = True
            self._take(claim, monotonic())
            self.idle = False

    def forget_actors(self) -> None:
        """Give the devices of actors to the tasks that wait, since no task comes after them."""
        with self.lock:
            for holding in self.occupancy.holding.values():
                for claim in [one for one in holding if one.for_life]:
                    del holding[claim]
            self.look()

    def waiting(self) -> tuple[Claim, ...]:
        """Return the claims that wait, the most urgent first."""
        with self.lock:
            return tuple(self._waiting)

    def waiting_for(self, device: Device) -> int:
        """Return how many tasks wait for a place on a device."""
        with self.lock:
            queue = self.occupancy.queues.get(device)
            claims = sum(device in claim.devices for claim in self._waiting)
            return claims + (0 if queue is None else queue.waiting())

    def holding(self, device: Device) -> tuple[Claim, ...]:
        """Return the claims that hold a part of a device."""
        with self.lock:
            return tuple(self.occupancy.holding[device])

    def waits_for_actors(self) -> str:
        """Return which actors hold devices that tasks wait for, and the remedy; "" without any."""
        found = []
        with self.lock:
            for device, holding in self.occupancy.holding.items():
                keys = [repr(claim.key) for claim in holding if claim.for_life]
                if keys and (count := self.waiting_for(device)):
                    found.append(
                        f"{device} is held by {listed(keys, _SHOWN)} until their futures are "
                        f"released, and {counted(count, 'task')} queued for it"
                    )
        return f"{'; '.join(found)}. {_REMEDY}" if found else ""

    # -- decisions, with the lock held

    def look(self) -> None:
        """Grant the claims whose turn it is; called after each change."""
        if self._waiting:
            now = monotonic()
            self._hurry(now)
            for claim in tuple(self._waiting):
                if self._may_start(claim, now):
                    self._take(claim, now)
                    self._leave_line(claim)
                    self._reserve(now)
        self.idle = not self._waiting and not any(self.occupancy.holding.values())
        for queue in self.occupancy.queues.values():
            queue.look_again()

    def may_start_plain(self, device: Device, urgency: tuple[Any, ...]) -> bool:
        """Return whether a plain task may take a place on a device now."""
        free, _ = self.occupancy.free(device)
        if free < self.occupancy.place:
            return False
        if self._waiting:
            self._hurry(monotonic())
        claim = self._reserved.get(device)
        if claim is None or claim.urgency > urgency:
            return True
        return self._ends_in_time(urgency[-1], claim, monotonic())

    def _hurry(self, now: float) -> None:
        """Raise the priority of claims that have waited for long, and make the reservations."""
        for claim in self._waiting:
            if claim.urgency > claim.later and now - claim.since >= self._patience_s:
                claim.urgency = claim.later
        self._waiting.sort()
        self._reserve(now)

    def _take(self, claim: Claim, now: float) -> None:
        claim.held = True
        for device in claim.devices:
            self.occupancy.holding[device][claim] = now

    def _leave_line(self, claim: Claim) -> None:
        self._waiting.remove(claim)
        self._reserved = {one: by for one, by in self._reserved.items() if by is not claim}
        claim.waits = False
        granted, claim._granted = claim._granted, _nothing
        granted()

    def _reserve(self, now: float) -> None:
        """Let each claim that is the first in line on all of its devices reserve them."""
        self._reserved = {}
        for claim in self._waiting:
            if self._reserved.keys().isdisjoint(claim.devices):
                if self.occupancy.expected_start(claim, now) != math.inf:
                    self._reserved.update(dict.fromkeys(claim.devices, claim))
                if len(self._reserved) == len(self.occupancy.holding):
                    break

    def _may_start(self, claim: Claim, now: float) -> bool:
        return self.occupancy.fits(claim) and all(
            self._may_pass(claim, device, now) for device in claim.devices
        )

    def _may_pass(self, claim: Claim, device: Device, now: float) -> bool:
        """Return whether a claim may start although more urgent tasks wait for a device."""
        ahead = self._reserved.get(device)
        waits = ahead is not None and ahead is not claim and ahead < claim
        if ahead is not None and waits and not self._ends_in_time(claim.prefix, ahead, now):
            return False
        queue = self.occupancy.queues.get(device)
        first = None if queue is None else queue.first()
        if first is None or first > claim.urgency:
            return True
        free, _ = self.occupancy.free(device)
        if free >= self.occupancy.place:
            # the plain task starts at once, unless a claim keeps it back
            enough_for_both = free >= self.occupancy.place + claim.share
            return enough_for_both or not self.may_start_plain(device, first)
        start = self.occupancy.free_at(device, self.occupancy.place, 0, now)
        seconds = self.occupancy.seconds(claim.prefix)
        return start is not None and seconds is not None and now + seconds <= start

    def _ends_in_time(self, prefix: str, claim: Claim, now: float) -> bool:
        """Return whether a task that starts now ends before a waiting claim can start."""
        start, seconds = self.occupancy.expected_start(claim, now), self.occupancy.seconds(prefix)
        if start is None or seconds is None:
            return now - claim.since < self._patience_s
        return now + seconds <= start
