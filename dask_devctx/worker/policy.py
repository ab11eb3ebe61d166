"""Which device a task gets that asks for none: a policy, which is one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dask_devctx.cuda.device import Device

# What a link between two GPUs carries, in bytes per second: PCIe 5 at 16 lanes, the slower one.
LINK_BYTES_PER_S = 50e9
# What starting a copy takes of a worker's time, which its devices share, however small it is.
COPY_S = 1e-4
# How far behind a device has to be before its inputs are taken to one that has work, too. Queues of
# short tasks differ by some milliseconds all the time.
RELUCTANCE_S = 0.01
# What a context and the libraries on it take before any data: with less, a device is full.
FULL_NBYTES = 512 * 2**20


class Candidate(NamedTuple):
    """A device that a task could get, as things stand.

    Parameters
    ----------
    device
        The device.
    queued
        How many tasks run there or wait for it.
    busy_s
        In how many seconds the last of them is expected to be done.
    move_nbytes
        How many bytes of the task's inputs are not there, nor is a copy of them.
    since
        How many tasks were assigned since this device last got one; larger is longer ago.
    free_nbytes
        How much of its memory is free; None where nobody says.
    moves
        How many of the task's inputs are not there, nor is a copy of them.
    waits
        Whether the task would wait there for others.
    """

    device: Device
    queued: int
    busy_s: float
    move_nbytes: int
    since: int
    free_nbytes: int | None = None
    moves: int = 0
    waits: bool = False


Policy = Callable[[Sequence[Candidate]], Candidate]


def start_soonest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate where the task would start first.

    It has to wait for what is queued there and for its inputs to be moved. Its inputs are not taken
    to a device where it waits as well, unless the one where they are is far behind: what is gained
    there is lost on copies. Among equals the one with the shortest queue, then the one that has
    waited longest for a task: round-robin. A device whose memory is full, or would be with the
    inputs moved there, comes after all others.

    Parameters
    ----------
    candidates
        One for each device of the worker; not empty.

    Examples
    --------
    >>> near = Candidate(Device(0), queued=1, busy_s=0.01, move_nbytes=0, since=0)
    >>> far = Candidate(Device(1), queued=0, busy_s=0, move_nbytes=10**9, since=1, moves=1)
    >>> start_soonest([near, far]) is near  # 20 ms of moving against 10 of waiting
    True
    """
    moving_s = [c.moves * COPY_S + c.move_nbytes / LINK_BYTES_PER_S for c in candidates]
    far_s = min(moving_s) + COPY_S / 2  # at least one copy more than the nearest

    def cost(which: int) -> tuple[bool, float, int, int]:
        _, queued, busy_s, move_nbytes, since, free_nbytes, _, waits = candidates[which]
        full = free_nbytes is not None and free_nbytes < move_nbytes + FULL_NBYTES
        reluctance_s = RELUCTANCE_S if waits and moving_s[which] > far_s else 0.0
        return full, busy_s + moving_s[which] + reluctance_s, queued, -since

    return candidates[min(range(len(candidates)), key=cost)]
