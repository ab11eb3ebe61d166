"""The tasks of one device, and how long it needs for them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Final

from dask_devctx.cuda.device import Device
from dask_devctx.worker.placement.policy import FULL_NBYTES, RELUCTANCE_S

# The least duration that is expected of a task whose prefix was never measured. It is so long that
# no task waits for it only to avoid a copy of its inputs.
_UNKNOWN_S: Final = 10 * RELUCTANCE_S
# The busy time of a place that an actor keeps: tasks go there only if they must.
_KEPT_S: Final = 1e6


class Load:
    """The tasks of a device: the prefix of each task, by key, and the number of tasks by prefix.

    Tasks with a claim are in ``parts``, each with its prefix and the number of places; actors that
    keep a part of the device are in ``kept``.
    """

    __slots__ = ("counts", "device", "free_nbytes", "kept", "last_turn", "parts", "prefixes")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.prefixes: dict[Hashable, str] = {}
        self.counts: dict[str, int] = {}  # kept up to date, since a queue may be long
        self.parts: dict[Hashable, tuple[str, float]] = {}
        self.kept: dict[Hashable, float] = {}
        self.last_turn = 0
        self.free_nbytes: int | None = None

    @property
    def tasks(self) -> int:
        """How many tasks are counted here."""
        return len(self.prefixes) + len(self.parts)

    @property
    def kept_places(self) -> float:
        """The places that actors keep."""
        return sum(self.kept.values())

    def busy_s(self, known: Mapping[str, float], unknown_s: float) -> float:
        """Return how long the device needs for its tasks, as far as durations are known.

        Parameters
        ----------
        known
            The durations of tasks, by prefix.
        unknown_s
            The duration of any other task, as :func:`unknown_s` returns it.
        """
        busy_s = 0.0
        for prefix, count in self.counts.items():
            busy_s += count * known.get(prefix, unknown_s)
        if self.parts:
            for prefix, places in self.parts.values():
                busy_s += places * known.get(prefix, unknown_s)
        if self.kept:
            busy_s += self.kept_places * _KEPT_S
        return busy_s


def unknown_s(typical_s: float) -> float:
    """Return the duration that is expected of a task whose prefix was never measured.

    Parameters
    ----------
    typical_s
        The duration of a task of any kind.
    """
    return max(typical_s, _UNKNOWN_S)


def soonest(loads: Iterable[Load], known: Mapping[str, float], unknown_s: float) -> Load | None:
    """Return what ``start_soonest`` chooses for a task without inputs, in a third of its time.

    None if an actor keeps a part of a device: the policy is to be asked then.

    Parameters
    ----------
    loads
        The tasks of each device.
    known, unknown_s
        As for :meth:`Load.busy_s`.
    """
    best, least = None, (True, float("inf"), 0, 0)
    for load in loads:
        if load.kept:
            return None
        tasks = len(load.prefixes) + len(load.parts)
        free = load.free_nbytes
        full = free is not None and free < FULL_NBYTES
        cost = full, load.busy_s(known, unknown_s) if tasks else 0.0, tasks, load.last_turn
        if cost < least:
            best, least = load, cost
    return best
