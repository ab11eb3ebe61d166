"""The table with a row for each device, as it is now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dask.utils import format_bytes

from dask_devctx.errors.base import counted
from dask_devctx.scheduler.dashboard.feed import Batch, Interval
from dask_devctx.scheduler.dashboard.figures import Colours, Table, percent

# Without a sample for this long, a device's worker is gone or very busy.
STALE_S: Final = 3.0
_HEAD: Final = (
    *("device", "computes", "has a task", "memory used", "held by dask", "spilled", "power"),
    *("temperature", "runs now", "queued"),
)
_STYLE: Final = "td:not(:nth-child(9)) { white-space: nowrap; }"


class Glance(Table):
    """A row for each device: its load, memory, power and temperature, its tasks and its queue."""

    def __init__(self, colours: Colours) -> None:
        super().__init__("device_glance", colours, _STYLE)

    def show(self, batch: Batch) -> None:
        """Show the latest samples."""
        places = reversed(batch.devices.positions)
        latest = [one for place in places if (one := batch.latest.get(place)) is not None]
        running, queued = (
            sum(getattr(one.after, name) for one in latest) for name in ("running", "queued")
        )
        state = (
            f"{counted(running, 'task')} running, {queued} queued" if running or queued else "idle"
        )
        title = (
            f"{counted(len(latest), 'device')}: {state}" if latest else "No device has answered yet"
        )
        self.write(title, _HEAD, (_cells(one, batch.now) for one in latest))


def _cells(one: Interval, now: float) -> Sequence[str]:
    after = one.after
    tasks = f"{after.running} × {', '.join(after.tasks_now)}" if after.running else "idle"
    if now - after.time > STALE_S:
        tasks = f"no news for {now - after.time:.0f} s"
    used = "-"
    if after.memory_total and after.memory_free is not None:
        used = format_bytes(after.memory_total - after.memory_free)
        used += f" of {format_bytes(after.memory_total)}"
    limit = "" if after.device_memory_limit is None else " of "
    limit += format_bytes(after.device_memory_limit) if limit else ""
    return (
        one.lane,
        percent(after.utilization),
        percent(one.occupied),
        used,
        format_bytes((after.memory_held or 0) + (after.memory_copies or 0)) + limit,
        format_bytes(after.memory_spilled or 0),
        "-" if after.power_w is None else f"{after.power_w:.0f} W",
        "-" if after.temperature is None else f"{after.temperature:.0f} °C",
        tasks,
        str(after.queued),
    )
