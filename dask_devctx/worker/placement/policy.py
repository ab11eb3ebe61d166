"""The choice of devices for a task that names none: by a policy, which is one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from dask.utils import funcname

from dask_devctx.cuda.device import Device

# The speed of a link between two GPUs, in bytes per second. PCIe 5 with 16 lanes is assumed; NVLink
# is faster.
LINK_BYTES_PER_S = 50e9
# The time of a worker that the start of a copy takes, for any size. A worker's devices share it.
COPY_S = 1e-4
# A task's inputs move to a device that is busy too only if this saves so much time. The queues of
# short tasks differ by some milliseconds all the time.
RELUCTANCE_S = 0.01
# The memory that a context and the libraries on it take before any data: with less, a device is
# full.
FULL_NBYTES = 512 * 2**20


class Candidate(NamedTuple):
    """A device that a task could get, with its present state.

    Parameters
    ----------
    device
        The device.
    queued
        How many tasks run there or wait for it.
    busy_s
        The expected seconds until the last of them is done.
    move_nbytes
        The bytes of the task's inputs that are not there, also not as a copy.
    since
        The number of tasks that were assigned since this device last got one.
    free_nbytes
        The free bytes of its memory; None if they are unknown.
    moves
        The number of the task's inputs that are not there, also not as a copy.
    waits
        Whether the task would wait there for other tasks.
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

    A task waits for the queue of its device and for its inputs to move there. If it would wait on
    another device too, its inputs move there only if the device that has them is far behind: the
    copies cost more than the gain. Among equal candidates, the one with the shortest queue wins,
    then the one that has waited longest for a task (round-robin). A device comes last if its memory
    is full, or would be full with the inputs.

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
    return _in_order(candidates)[0]


def choose_group(candidates: Sequence[Candidate], count: int) -> tuple[Device, ...]:
    """Return the devices where a task of several devices would start soonest.

    The one with most bytes of its inputs comes first.
    """
    best = {one.device for one in _in_order(candidates)[:count]}
    group = [one for one in candidates if one.device in best]
    return tuple(one.device for one in sorted(group, key=attrgetter("move_nbytes")))


def _in_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    moving_s = [c.moves * COPY_S + c.move_nbytes / LINK_BYTES_PER_S for c in candidates]
    far_s = min(moving_s) + COPY_S / 2  # at least one copy more than for the nearest device

    def cost(which: int) -> tuple[bool, float, int, int]:
        one = candidates[which]
        full = one.free_nbytes is not None and one.free_nbytes < one.move_nbytes + FULL_NBYTES
        reluctance_s = RELUCTANCE_S if one.waits and moving_s[which] > far_s else 0.0
        return full, one.busy_s + moving_s[which] + reluctance_s, one.queued, -one.since

    return [candidates[which] for which in sorted(range(len(candidates)), key=cost)]


def choose(policy: Policy, candidates: Sequence[Candidate]) -> Device:
    """Return the device that a policy chooses; its errors name the policy."""
    try:
        chosen = policy(candidates)
    except Exception as error:
        error.add_note(f"It comes from the placement policy {funcname(policy)}, policy=...")
        raise
    if not isinstance(chosen, Candidate) or chosen not in candidates:
        raise TypeError(
            f"the placement policy {funcname(policy)} must return one of the candidates that it is "
            f"given, and not its device or another value; got {chosen!r}"
        )
    return chosen.device
