"""Counts of the copies from one device to another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.timing import OrderedCopy, TimedCopies, TimedCopy

# The earlier copies that each new one looks at, whether they are complete.
_LOOK_AT_MOST: Final = 4


@dataclass
class Traffic:
    """The traffic from one device to another.

    Attributes
    ----------
    nbytes, copies
        The number of bytes moved, and of inputs copied.
    saved
        How many times a task found a copy of its input there already.
    seconds
        Time that threads spent on starting the copies; they do not wait for the end.
    measured_nbytes, measured_s
        The bytes of copies that the device timed, and the time that it took for them.
    """

    nbytes: int = 0
    copies: int = 0
    saved: int = 0
    seconds: float = 0.0
    measured_nbytes: int = 0
    measured_s: float = 0.0


class TrafficCounts:
    """Counts copies by source and destination; threads may call all methods.

    Attributes
    ----------
    on_copy
        Called with the source, the destination, the bytes, the time of the start as
        :func:`time.time` tells it, and the seconds of each copy, on any thread. The seconds are
        None if the device did not time the copy.
    """

    def __init__(self) -> None:
        self.on_copy: Callable[[Device, Device, int, float, float | None], object] | None = None
        self._lock = threading.Lock()
        self._traffic: dict[tuple[Device, Device], Traffic] = {}
        self._timed = TimedCopies()

    def saved(self, sources: Mapping[Device, int], device: Device) -> None:
        """Count an input that was there already, in place of a copy from some sources."""
        with self._lock:
            for source in sources:
                self._of(source, device).saved += 1

    def copied(
        self,
        sources: Mapping[Device, int],
        device: Device,
        begun: float,
        seconds: float,
        timed: Sequence[TimedCopy],
    ) -> None:
        """Count a copy that was ordered.

        Parameters
        ----------
        sources
            The bytes that come from each device.
        device
            The destination.
        begun
            When it was ordered, as :func:`time.time` tells it.
        seconds
            The time that the thread spent on it.
        timed
            Its parts that the device times.
        """
        for source, nbytes in sources.items():
            with self._lock:
                traffic = self._of(source, device)
                traffic.nbytes += nbytes
                traffic.copies += 1
                traffic.seconds += seconds / len(sources)
            parts = [part for part in timed if part.source is source]
            self._timed.add(OrderedCopy(source, device, nbytes, begun, parts))
        self.measure(_LOOK_AT_MOST)

    def measure(self, at_most: int | None = None) -> None:
        """Note the durations of copies that are complete by now; does not wait."""
        for copy, measured_nbytes, measured_s in self._timed.complete(at_most):
            if measured_s:
                with self._lock:
                    traffic = self._of(copy.source, copy.device)
                    traffic.measured_nbytes += measured_nbytes
                    traffic.measured_s += measured_s
            if self.on_copy is not None:
                # The small parts of a value are not timed.
                seconds = measured_s * copy.nbytes / measured_nbytes if measured_s else None
                self.on_copy(copy.source, copy.device, copy.nbytes, copy.begun, seconds)

    def rows(self) -> dict[tuple[Device, Device], Traffic]:
        """Return the traffic until now, for each pair of source and destination."""
        with self._lock:
            return {pair: replace(traffic) for pair, traffic in self._traffic.items()}

    def _of(self, source: Device, device: Device) -> Traffic:
        return self._traffic.setdefault((source, device), Traffic())
