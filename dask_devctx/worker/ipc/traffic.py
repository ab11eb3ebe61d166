"""Counts of the transfers between workers, by the way that they take."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

from dask_devctx.cuda.device import Device

# Each heartbeat carries all rows. In a large cluster, a worker sends to a thousand others.
_MOST_ROWS: Final = 256
_OTHERS: Final = "other workers"


class Traffic:
    """Counts transfers between this worker and others, by source, destination and way.

    Parameters
    ----------
    by_dask
        The way of the values that dask sends: ``"host"``, or ``"ucx"`` where its connections are.

    Attributes
    ----------
    reasons
        The reasons why values last went through the host, by the destination in a row.
    on_copy
        Called with the arguments of each :meth:`count`, the bytes' way after the seconds.
    """

    def __init__(self, by_dask: str = "host") -> None:
        self.by_dask = by_dask
        self.reasons: dict[str, str] = {}
        self.on_copy: Callable[[str, str, int, float, str, int], object] | None = None
        self._rows: dict[tuple[str, str, str], list[float]] = {}

    def count(
        self, source: str, destination: str, way: str, nbytes: int, seconds: float, copies: int = 1
    ) -> str:
        """Count a transfer. Each end is a device's UUID, or a worker's address.

        Returns
        -------
        str
            The destination in the row. Workers that come last in a large cluster are counted
            together, as "other workers".
        """
        ends = source, destination, way
        if ends not in self._rows and way == self.by_dask and len(self._rows) >= _MOST_ROWS:
            ends = source, _OTHERS, way
        row = self._rows.setdefault(ends, [0, 0, 0.0])
        row[0] += nbytes
        row[1] += copies
        row[2] += seconds
        if self.on_copy is not None:
            self.on_copy(source, destination, nbytes, seconds, way, copies)
        return ends[1]

    def sent_by_dask(
        self, places: Mapping[Hashable, Mapping[Device, int]], who: str, reason: str
    ) -> None:
        """Count values that dask sends to a worker, each with its bytes by device."""
        for each in places.values():
            for device, nbytes in each.items():
                self.reasons[self.count(device.uuid, who, self.by_dask, nbytes, 0.0)] = reason

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each source, destination and way, as plain data."""
        return [
            {
                "source": source,
                "destination": destination,
                "way": way,
                "nbytes": int(nbytes),
                "copies": int(copies),
                "saved": 0,
                "seconds": seconds,
                "measured_nbytes": int(nbytes) if seconds else 0,
                "measured_s": seconds,
                "reason": self.reasons.get(destination) if way == "host" else None,
            }
            for (source, destination, way), (nbytes, copies, seconds) in self._rows.items()
        ]
