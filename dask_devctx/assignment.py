"""Which device a task gets that asks for none: a policy, which is one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dask_devctx.device import Device

# What a link between two GPUs carries, in bytes per second: PCIe 5 at 16 lanes, the slower one.
LINK_BYTES_PER_S = 50e9
# What starting a copy takes of a worker's time, which its devices share, however small it is.
COPY_S = 1e-4
# How far behind a device has to be before its inputs are taken to one that has work, too.
RELUCTANCE_S = 0.05
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
        How many bytes of the task's inputs live on other devices.
    since
        How many tasks were assigned since this device last got one; larger is longer ago.
    free_nbytes
        How much of its memory is free; None where nobody says.
    moves
        How many of the task's inputs live on other devices.
    """

    device: Device
    queued: int
    busy_s: float
    move_nbytes: int
    since: int
    free_nbytes: int | None = None
    moves: int = 0


Policy = Callable[[Sequence[Candidate]], Candidate]


def start_soonest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate where the task would start first.

    It has to wait for what is queued there and for its inputs to be moved. Its inputs are not taken
    to a device that has work already, unless the one where they are is far behind: what is gained
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
    away_s = min(map(_moving_s, candidates)) + COPY_S

    def cost(candidate: Candidate) -> tuple[bool, float, int, int]:
        _, queued, busy_s, move_nbytes, since, free_nbytes, _ = candidate
        full = free_nbytes is not None and free_nbytes < move_nbytes + FULL_NBYTES
        moving_s = _moving_s(candidate)
        if queued and moving_s >= away_s:
            moving_s += RELUCTANCE_S
        return full, busy_s + moving_s, queued, -since

    return min(candidates, key=cost)


def _moving_s(candidate: Candidate) -> float:
    return candidate.moves * COPY_S + candidate.move_nbytes / LINK_BYTES_PER_S
