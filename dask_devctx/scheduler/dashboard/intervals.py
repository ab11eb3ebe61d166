"""The times between two samples of a device, which the plots of memory and load show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from dask_devctx.scheduler.dashboard.batches import Batch
from dask_devctx.scheduler.dashboard.lanes import Lanes
from dask_devctx.scheduler.rows import OF_A_WORKER, ON_A_DEVICE, Sample

# Two samples of a device further apart than this show nothing of the time between them.
_APART_S: Final = 5.0
# The values of a sample that belong to the worker, and not to the device.
_OWN: Final = ("running", "queued", *(f"memory_{kind}" for kind in OF_A_WORKER))


class Interval(NamedTuple):
    """The time between two samples of a device.

    Parameters
    ----------
    host
        The host of the device's worker.
    middle
        The middle of the device's lane.
    lane
        The lane's name.
    before, after
        The samples.
    """

    host: str
    middle: float
    lane: str
    before: Sample
    after: Sample


class Intervals:
    """Makes intervals of the samples of batches.

    Attributes
    ----------
    latest
        The last interval of each device, by host and UUID.

    Notes
    -----
    Several workers may use one device. Each of them samples it, and their own values are added.
    """

    def __init__(self) -> None:
        self.latest: dict[tuple[str, str], Interval] = {}
        self._samples: dict[tuple[str, str], dict[str, Sample]] = {}

    def of(self, batch: Batch, lanes: Lanes) -> Iterator[Interval]:
        """Yield the intervals that end with the samples of a batch, placed in some lanes."""
        if batch.again:
            self.latest.clear()
            self._samples.clear()
        for host, worker, sample in batch.samples:
            place = host, sample.uuid
            middle = lanes.position(*place)
            if middle is None:
                continue
            workers = self._samples.setdefault(place, {})
            workers[worker] = sample
            for other in [w for w, s in workers.items() if sample.time - s.time > _APART_S]:
                del workers[other]
            last = self.latest.get(place)
            before = sample if last is None else last.after
            after = sample if len(workers) == 1 else _added(sample, list(workers.values()))
            interval = Interval(host, middle, lanes.label(*place), before, after)
            self.latest[place] = interval
            if 0 < after.time - before.time < _APART_S:
                yield interval


def _added(latest: Sample, samples: Sequence[Sample]) -> Sample:
    """Return the sample of a device that several workers use."""
    sums: dict[str, Any] = {name: sum(getattr(s, name) or 0 for s in samples) for name in _OWN}
    taken = sum(sums[f"memory_{kind}"] for kind in ON_A_DEVICE)
    others = max((latest.memory_total or 0) - (latest.memory_free or 0) - taken, 0)
    return replace(latest, **sums, memory_others=others)
