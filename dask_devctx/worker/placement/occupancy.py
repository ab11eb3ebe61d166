"""The tasks on each device of a worker, and how much of the device is free, from when on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from dask_devctx.cuda.device import Device

# A whole device. Shares are counted in whole millionths: sums of floats would go beyond 1.
WHOLE: Final = 1_000_000


def share_units(share: float) -> int:
    """Return a share in millionths, rounded down, so that n shares of 1/n fit on a device."""
    return max(int(share * WHOLE + 1e-6), 1)


class Part(Protocol):
    """A part of some devices, that a task takes."""

    prefix: str
    devices: tuple[Device, ...]
    share: int
    nbytes: int
    for_life: bool


class Waiting(Protocol):
    """The queue of a device's plain tasks, which take a place each."""

    def running(self) -> Iterable[tuple[str, float]]:
        """Return the prefix and the start of each plain task that runs."""

    def first(self) -> tuple[Any, ...] | None:
        """Return the urgency of the most urgent plain task that waits; None if none waits."""

    def waiting(self) -> int:
        """Return how many plain tasks wait."""

    def look_again(self) -> None:
        """Let the device's threads look again for a task that they may start."""

    def give_back(self, priority: tuple[Any, ...]) -> bool:
        """Let the scheduler send a plain task that waits again; return whether it waited."""


class Occupancy:
    """The places, shares and bytes of a worker's devices, and the tasks that have them.

    Parameters
    ----------
    devices
        The worker's devices.
    tasks_per_device
        How many tasks that say nothing run on a device at a time.
    durations
        The measured duration of tasks by prefix, in seconds; read at any time.
    limits
        The bytes that tasks may reserve, by device; a device without an entry is unlimited.

    Attributes
    ----------
    place
        The share of a task that says nothing.
    holding
        The parts of each device that are taken, with the time since when.
    queues
        The queue of each device's plain tasks.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        tasks_per_device: int,
        durations: Mapping[str, float],
        limits: Mapping[Device, int],
    ) -> None:
        self.place = WHOLE // tasks_per_device
        self.limits = dict(limits)
        self.holding: dict[Device, dict[Any, float]] = {device: {} for device in devices}
        self.queues: dict[Device, Waiting] = {}
        self._durations = durations

    def fits(self, part: Part) -> bool:
        """Return whether there is room for a part on all of its devices."""
        for device in part.devices:
            share, nbytes = self.free(device)
            if part.share > share or part.nbytes > nbytes:
                return False
        return True

    def left(self, device: Device) -> tuple[int, float] | None:
        """Return the share and the bytes of a device that actors leave; None if none is there."""
        kept = [one for one in self.holding[device] if one.for_life]
        if not kept:
            return None
        share = WHOLE - sum(one.share for one in kept)
        room = self.limits.get(device, math.inf) - sum(one.nbytes for one in kept)
        return max(share, 0), max(room, 0)

    def seconds(self, prefix: str) -> float | None:
        """Return how long tasks of a prefix run; None if that is unknown."""
        return self._durations.get(prefix)

    def expected_start(self, part: Part, now: float) -> float | None:
        """Return when a part is free if nothing else starts; None if that is unknown."""
        latest = now
        unknown = False
        for device in part.devices:
            start = self.free_at(device, part.share, part.nbytes, now)
            if start is None:
                unknown = True
            else:
                latest = max(latest, start)
        return latest if latest == math.inf or not unknown else None

    def free_at(self, device: Device, share: int, nbytes: int, now: float) -> float | None:
        """Return when a device has so much free; None if that is unknown."""
        free, room = self.free(device)
        if share <= free and nbytes <= room:
            return now
        unknown = False
        for end, its_share, its_nbytes in sorted(self._ends(device, now), key=_by_end):
            if end is None:
                unknown = True
            if end == math.inf:
                break
            free, room = free + its_share, room + its_nbytes
            if share <= free and nbytes <= room:
                return None if unknown else end
        return math.inf

    def _ends(self, device: Device, now: float) -> Iterator[tuple[float | None, int, int]]:
        """Yield the expected end of each task on a device, with its share and its bytes."""
        for claim, since in self.holding[device].items():
            end = math.inf if claim.for_life else self._end(claim.prefix, since, now)
            yield end, claim.share, claim.nbytes
        for prefix, since in self._plain(device):
            yield self._end(prefix, since, now), self.place, 0

    def _end(self, prefix: str, since: float, now: float) -> float | None:
        seconds = self._durations.get(prefix)
        return None if seconds is None else max(since + seconds, now)

    def free(self, device: Device) -> tuple[int, float]:
        """Return the free share and the free bytes of a device."""
        free = WHOLE - self.place * sum(1 for _ in self._plain(device))
        room = self.limits.get(device, math.inf)
        for claim in self.holding[device]:
            free -= claim.share
            room -= claim.nbytes
        return free, room

    def _plain(self, device: Device) -> Iterable[tuple[str, float]]:
        queue = self.queues.get(device)
        return () if queue is None else queue.running()


def _by_end(one: tuple[float | None, int, int]) -> float:
    # An unknown end comes after all known ones, and before those that never come.
    return 1e300 if one[0] is None else one[0]
