"""The choice of several devices for one task."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from dask_devctx.cuda.device import Device
from dask_devctx.worker.placement.policy import COPY_S, LINK_BYTES_PER_S, Candidate

# A task of several devices waits so much longer for devices that are linked one rank better.
SLOWER_LINK_S = 1.0
# The most groups that are compared; of many devices, only those that are free soonest are.
_GROUPS = 500

# The bytes of one input on each device, and the devices that have a copy.
Location = tuple[Mapping[Device, int], frozenset[Device]]


def choose_group(
    candidates: Sequence[Candidate],
    count: int,
    inputs: Iterable[Location],
    link_rank: Callable[[Device, Device], int],
) -> tuple[Device, ...]:
    """Return the devices where a task of several devices would start soonest.

    A group is as late as its last device. A slower link between two of its devices counts as
    ``SLOWER_LINK_S`` for each rank. Among equal groups, the one whose devices have waited longest
    for a task wins.
    """
    inputs = [one for one in inputs if one[0]]
    most = len(candidates)
    while most > count and math.comb(most, count) > _GROUPS:
        most -= 1
    soonest = sorted(candidates, key=lambda one: (one.busy_s, one.queued))[:most]
    chosen = {one.device for one in soonest}
    order = [one for one in candidates if one.device in chosen]

    def cost(group: Sequence[Candidate]) -> tuple[float, int, int]:
        devices = {one.device for one in group}
        slowest = max(
            (link_rank(a.device, b.device) for a, b in itertools.combinations(group, 2)), default=0
        )
        seconds = max(one.busy_s for one in group) + slowest * SLOWER_LINK_S
        for parts, copies in inputs:
            if not (parts.keys() <= devices or copies & devices):
                seconds += COPY_S + sum(parts.values()) / LINK_BYTES_PER_S
        return seconds, sum(one.queued for one in group), -sum(one.since for one in group)

    best = [one.device for one in min(itertools.combinations(order, count), key=cost)]
    first = max(best, key=lambda device: sum(parts.get(device, 0) for parts, _ in inputs))
    return first, *(device for device in best if device is not first)
