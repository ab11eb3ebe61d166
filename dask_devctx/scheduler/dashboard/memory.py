"""The plot of each device's memory over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from dask.utils import format_bytes

from dask_devctx.scheduler.dashboard.levels import Level, LevelsPlot
from dask_devctx.scheduler.dashboard.sources import UNKNOWN
from dask_devctx.scheduler.dashboard.theme import COPIES, HELD, LIMIT, OTHERS, REST, SPILLED
from dask_devctx.scheduler.rows import Sample

_TITLE: Final = "Memory of each device"
# A lane shows half of a device's memory where no device uses more, or a quarter, and so on.
_SMALLEST: Final = 2.0**-10


class MemoryPlot(LevelsPlot):
    """A lane for each device, which its memory fills from the bottom to the top."""

    name = "device_memory"
    title = _TITLE
    levels = (
        Level("to_held", HELD, "held", "low"),
        Level("to_copies", COPIES, "copies", "to_held"),
        Level("to_rest", REST, "other use", "to_copies"),
        Level("to_others", OTHERS, "other processes", "to_rest"),
        Level("spilled_at", SPILLED, "spilled", dash=[5, 3]),
        Level("limit_at", LIMIT, "limit"),
    )
    background = "free"
    columns = "held copies rest staging others free total limit spilled"
    hovers: ClassVar[Mapping[str, str]] = {
        "held by dask": "@held{B}",
        "copies of other devices' values": "@copies{B}",
        "other use by tasks and libraries": "@rest{B}",
        "of it, staging for other workers": "@staging{B}",
        "other processes": "@others{B}",
        "free": "@free{B}",
        "in all": "@total{B}",
        "limit for held values and copies": "@limit{B}",
        "spilled to the host": "@spilled{B}",
    }

    # The part of a device's memory that fills a lane.
    _part = 1.0

    def rescaled(self, samples: Sequence[Sample], *, begins: bool) -> bool:
        """Choose the scale for the latest samples: what it once had to show still fits."""
        known = [sample for sample in samples if sample.memory_total]
        before = self._part
        if begins:
            self._part = _SMALLEST
        most = max(map(_most, known), default=1.0)
        while self._part < most:
            self._part *= 2
        totals = {sample.memory_total for sample in known}
        if self._part == 1:
            self.root.title.text = _TITLE
        elif len(totals) == 1:
            height = format_bytes(int(self._part * (totals.pop() or 0)))
            self.root.title.text = f"{_TITLE}: a lane's height is {height}"
        else:
            self.root.title.text = f"{_TITLE}: a lane's height is {self._part:.3%} of it"
        return self._part != before

    def heights(self, before: Sample, after: Sample) -> dict[str, float]:
        """Return where each kind of memory ends in a lane."""
        total = after.memory_total
        if not total:
            return dict.fromkeys((level.name for level in self.levels), math.nan)
        of, full = _kinds(after), self._part * total
        ends = {"to_held": of["held"], "to_copies": of["held"] + of["copies"]}
        ends["to_rest"] = ends["to_copies"] + of["rest"]
        ends["to_others"] = ends["to_rest"] + of["others"]
        ends["spilled_at"] = of["spilled"] or math.nan
        ends["limit_at"] = math.nan if after.memory_limit is None else of["limit"]
        return {name: nbytes / full for name, nbytes in ends.items()}

    def numbers(self, before: Sample, after: Sample) -> dict[str, float]:
        """Return the bytes of each kind."""
        return _kinds(after)

    def texts(self, sample: Sample) -> list[str]:
        """Return the memory in use, and what of it dask holds."""
        if not sample.memory_total:
            return ["memory unknown"]
        total, free = sample.memory_total, sample.memory_free
        parts = [("held", sample.memory_held), ("copies", sample.memory_copies)]
        parts += [("spilled", sample.memory_spilled)]
        used = "" if free is None else f"{format_bytes(total - free)} of "
        more = [f"{name} {format_bytes(nbytes)}" for name, nbytes in parts if nbytes]
        return [used + format_bytes(total), *more]


def _kinds(sample: Sample) -> dict[str, float]:
    """Return the bytes of each kind."""
    total = sample.memory_total or 0
    free = total if sample.memory_free is None else sample.memory_free
    held, copies = sample.memory_held or 0, sample.memory_copies or 0
    others, limit = sample.memory_others or 0, sample.memory_limit
    return {
        "held": held,
        "copies": copies,
        "rest": max(total - free - held - copies - others, 0),
        "staging": sample.memory_staging or 0,
        "others": others,
        "free": free,
        "total": total,
        "limit": UNKNOWN if limit is None else limit,
        "spilled": sample.memory_spilled or 0,
    }


def _most(sample: Sample) -> float:
    """Return the highest level of a device, as a part of its memory."""
    of = _kinds(sample)
    return min(max(of["total"] - of["free"], of["limit"], of["spilled"]) / of["total"], 1.0)
