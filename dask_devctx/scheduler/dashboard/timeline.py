"""The plot of the tasks and copies on each device over time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from dask.utils import format_bytes, format_time

from dask_devctx.dask_internals.dashboard import color_of
from dask_devctx.scheduler.dashboard.feed import Batch
from dask_devctx.scheduler.dashboard.figures import (
    BOX,
    FAILED,
    MOST_ROWS,
    Axes,
    Rows,
    about,
    hover,
    legend_below,
    transport,
)
from dask_devctx.scheduler.rows import TaskRun

# The parts of a lane, measured from its middle.
_TASKS: Final = (-0.26, 0.44)
_COPIES: Final = (-0.44, -0.32)
# The most slots of a lane: more tasks at a time share one.
_MOST_SLOTS: Final = 8
# Tasks that follow each other may overlap by this.
_OVERLAP_S: Final = 1e-3
_TITLE: Final = "Tasks and copies on each device"


class Timeline:
    """A lane for each device with its tasks and copies.

    A lane is divided among as many slots as it had tasks at a time.
    """

    def __init__(self, axes: Axes) -> None:
        self._tasks = Rows("left right bottom top", "color key about")
        self._copies = Rows("left right bottom top nbytes", "color copy about")
        self._begin()
        self.root = axes.plot("device_timeline", _TITLE)
        # The edge tells two tasks of one kind apart, and shows one that is too short to be seen.
        tasks = self.root.quad(**BOX, source=self._tasks.source, color="color", fill_alpha=0.75)
        copies = self.root.quad(
            **BOX, source=self._copies.source, color="color", legend_field="copy"
        )
        legend_below(self.root)
        self.root.add_tools(hover(tasks, copies))

    def _begin(self) -> None:
        """Begin from nothing."""
        self._left_out = 0
        # For each slot of a device: when its last task ended.
        self._slots: dict[str, list[float]] = {}
        # The tasks that are shown, with their slots.
        self._kept: deque[tuple[TaskRun, int]] = deque(maxlen=MOST_ROWS)

    def show(self, batch: Batch) -> None:
        """Show the tasks and copies of a batch."""
        if batch.again:
            self._begin()
        n_slots = sum(map(len, self._slots.values()))
        tasks = [row for row in batch.tasks if row.uuid in batch.lanes.positions and row.stop]
        tasks.sort(key=lambda row: row.start or 0.0)
        fresh = [(row, self._slot(row)) for row in tasks]
        self._kept.extend(fresh)
        # With one more slot, all tasks of a lane move.
        again = batch.again or sum(map(len, self._slots.values())) != n_slots
        shown = self._kept if again else fresh
        self._tasks.add((self._task(batch, *one) for one in shown), again=again)
        self._copies.add(_copies(batch), again=batch.again)
        self._left_out += batch.left_out
        left_out = f": the {self._left_out:,} shortest ones are left out"
        self.root.title.text = _TITLE + (left_out if self._left_out else "")

    def _slot(self, row: TaskRun) -> int:
        """Return the slot of a task; those of a device come in about the order of their starts."""
        ends = self._slots.setdefault(str(row.uuid), [])
        start = (row.start or 0.0) + _OVERLAP_S
        slot = next((n for n, end in enumerate(ends) if end <= start), len(ends))
        if slot == _MOST_SLOTS:
            slot = ends.index(min(ends))
        ends[slot : slot + 1] = [row.stop or 0.0]
        return slot

    def _task(self, batch: Batch, row: TaskRun, slot: int) -> dict[str, Any]:
        uuid, start, stop = str(row.uuid), row.start or 0.0, row.stop or 0.0
        low, high = _TASKS
        height = (high - low) / len(self._slots[uuid])
        top = batch.lanes.positions[uuid] + high - slot * height
        wrong = row.outcome == "error"
        lines = {
            "key": str(row.key),
            "device": batch.lanes.name(uuid),
            "ran for": format_time(stop - start),
            "waited for a free slot": format_time(row.slot_s),
            "waited for its inputs": format_time(row.inputs_s),
            "waited for memory": format_time(row.memory_s),
        }
        return {
            "left": batch.ms(start),
            "right": batch.ms(stop),
            "bottom": top - 0.92 * height,
            "top": top,
            "color": FAILED if wrong else color_of(row.prefix),
            "key": str(row.key),
            "about": about(f"{row.prefix}{' failed' if wrong else ''}", lines),
        }


def _copies(batch: Batch) -> Iterator[dict[str, Any]]:
    positions, (low, high) = batch.lanes.positions, _COPIES
    for row in batch.copies:
        middle = positions.get(row.destination, positions.get(row.source))
        if middle is None:  # its worker left
            continue
        words, colour = transport(row.transport)
        lines = {
            "from": batch.lanes.name(row.source),
            "to": batch.lanes.name(row.destination),
            "bytes": format_bytes(row.nbytes),
            "values": str(row.values),
            "took": format_time(row.stop - row.start),
            "rate": "not measured" if row.rate is None else f"{row.rate / 1e9:.3g} GB/s",
        }
        yield {
            "left": batch.ms(row.start),
            "right": batch.ms(row.stop),
            "bottom": middle + low,
            "top": middle + high,
            "color": colour,
            "nbytes": row.nbytes,
            "copy": f"copy {words}",
            "about": about(f"copy {words}", lines),
        }
