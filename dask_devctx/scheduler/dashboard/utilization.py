"""The plot of each device's load over time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from dask_devctx.scheduler.dashboard.levels import Level, LevelsPlot
from dask_devctx.scheduler.dashboard.sources import UNKNOWN
from dask_devctx.scheduler.dashboard.theme import BANDWIDTH, COMPUTE, OCCUPIED
from dask_devctx.scheduler.rows import Sample


class UtilizationPlot(LevelsPlot):
    """A lane for each device, which its load fills from the bottom to the top."""

    name = "device_utilization"
    title = "Utilization of each device: a lane's height is 100% of the time"
    levels = (
        Level("occupied_to", OCCUPIED, "has a task", "low"),
        Level("computing_to", COMPUTE, "computes (NVML)", "low"),
        Level("bandwidth_at", BANDWIDTH, "reads or writes memory (NVML)"),
    )
    background = "idle"
    columns = "occupied computing bandwidth"
    hovers: ClassVar[Mapping[str, str]] = {
        "has a task": "@occupied{%}",
        "computes, by NVML": "@computing{%}",
        "reads or writes memory, by NVML": "@bandwidth{%}",
    }

    def heights(self, before: Sample, after: Sample) -> dict[str, float]:
        """Return the load as parts of the time."""
        return {
            "occupied_to": _occupied(before, after),
            "computing_to": math.nan if after.utilization is None else after.utilization,
            "bandwidth_at": math.nan if after.bandwidth is None else after.bandwidth,
        }

    def numbers(self, before: Sample, after: Sample) -> dict[str, float]:
        """Return the load as parts of the time."""
        return {
            "occupied": _occupied(before, after),
            "computing": UNKNOWN if after.utilization is None else after.utilization,
            "bandwidth": UNKNOWN if after.bandwidth is None else after.bandwidth,
        }

    def texts(self, sample: Sample) -> list[str]:
        """Return the load that NVML tells."""
        if sample.utilization is None:
            return ["no numbers from NVML"]
        texts = [f"{sample.utilization:.0%}"]
        return texts if sample.bandwidth is None else [*texts, f"memory {sample.bandwidth:.0%}"]


def _occupied(before: Sample, after: Sample) -> float:
    passed = after.time - before.time
    return min(max(after.occupied_s - before.occupied_s, 0.0) / passed, 1.0) if passed else 0.0
