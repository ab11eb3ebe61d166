"""The plot of the tasks and copies on each device over time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

from dask.utils import format_bytes, format_time

from dask_devctx.dask_internals.dashboard import color_of
from dask_devctx.scheduler.dashboard.feed import STALE_S, Batch
from dask_devctx.scheduler.dashboard.figures import GREY, Axes, LanesPlot, Rows, bar, transport
from dask_devctx.scheduler.rows import TaskRun

# The parts of a lane, measured from its middle.
_TASKS: Final = (-0.26, 0.44)
_COPIES: Final = (-0.44, -0.32)
# The most slots of a lane: more tasks at a time share one.
_MOST_SLOTS: Final = 8
_FAILED: Final = ("failed", "#e31a1c")
_MOST: Final = 40_000  # the most tasks that move when a lane gets a slot
_IDLE_S: Final = 30.0  # how long nothing runs before the title says so
# Tasks that follow each other may overlap by this.
_OVERLAP_S: Final = 1e-3
_TITLE: Final = "Tasks and copies on each device"


class Timeline(LanesPlot):
    """A lane for each device with its tasks and copies.

    A lane is divided among as many slots as it had tasks at a time.
    """

    def __init__(self, axes: Axes) -> None:
        super().__init__(_TITLE, axes)
        self._tasks, self._running, self._copies = self._parts = (Rows(), Rows(), Rows())
        self._begin()
        # The edge tells two tasks of one kind apart, and shows one that is too short to be seen.
        tasks = self.boxes(self._tasks, color="color", fill_alpha=0.75)
        running, copies = (self.boxes(rows, color="color") for rows in self._parts[1:])
        self.hover(tasks, copies, running)

    def _begin(self) -> None:
        """Begin from nothing."""
        self._left_out = 0
        # When the last task of a device ended, and since when it has tasks without a pause.
        self._ended: dict[str, float] = {}
        self._running_since: dict[str, float] = {}
        # For each slot of a device: when its last task ended.
        self._slots: dict[str, list[float]] = {}
        # The tasks that are shown, with their slots.
        self._kept: deque[tuple[TaskRun, int]] = deque(maxlen=_MOST)

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
        running = [*self._running_rows(batch)]
        self._running.add(running, again=True)
        self._left_out += batch.left_out
        self.figure.title.text = _TITLE + self._news(batch, is_running=bool(running))
        view = self.axes.view
        self.explain(dict(chain.from_iterable(rows.colours(view) for rows in self._parts)))

    def _news(self, batch: Batch, *, is_running: bool) -> str:
        """Return the end of the title."""
        if self._left_out:
            return f": the {self._left_out:,} shortest ones are left out"
        if not self._ended:
            return "" if is_running else ": no task ran so far"
        idle = batch.now - max(self._ended.values())
        return "" if is_running or idle < _IDLE_S else f": idle for {format_time(idle)}"

    def _slot(self, row: TaskRun) -> int:
        """Return the slot of a task; those of a device come in about the order of their starts."""
        ends = self._slots.setdefault(str(row.uuid), [])
        start = (row.start or 0.0) + _OVERLAP_S
        slot = next((n for n, end in enumerate(ends) if end <= start), len(ends))
        if slot == _MOST_SLOTS:
            slot = ends.index(min(ends))
        ends[slot : slot + 1] = [row.stop or 0.0]
        self._ended[str(row.uuid)] = max(ends)
        return slot

    def _task(self, batch: Batch, row: TaskRun, slot: int) -> dict[str, Any]:
        uuid, start, stop = str(row.uuid), row.start or 0.0, row.stop or 0.0
        low, high = _TASKS
        height = (high - low) / len(self._slots[uuid])
        top = batch.lanes.positions[uuid] + high - slot * height
        kind, head = (row.prefix, color_of(row.prefix)), row.prefix
        if row.outcome == "error":
            kind, head = _FAILED, f"{row.prefix} failed"
        lines = {
            "key": str(row.key),
            "device": batch.lanes.name(uuid),
            "ran for": format_time(stop - start),
            "waited for a free slot": format_time(row.slot_s),
            "waited for its inputs": format_time(row.inputs_s),
            "waited for memory": format_time(row.memory_s),
        }
        return bar(batch, (start, stop), (top - 0.92 * height, top), kind, head, lines)

    def _running_rows(self, batch: Batch) -> Iterator[dict[str, Any]]:
        """Yield a row for each device with tasks, whose own rows come when they end."""
        low, high = _TASKS
        for uuid, middle in batch.lanes.positions.items():
            one = batch.latest.get(uuid)
            if one is None or not one.after.tasks_now:
                self._running_since.pop(uuid, None)
                continue
            since = self._running_since.setdefault(uuid, one.before.time)
            start = max(since, self._ended.get(uuid, 0.0))
            if start < batch.now < one.after.time + STALE_S:
                names = f"{one.after.running} × {', '.join(one.after.tasks_now)}"
                lines = {
                    "device": batch.lanes.name(uuid),
                    "tasks": names,
                    "waiting": str(one.after.queued),
                }
                part, kind = (middle + low, middle + high), ("running", GREY)
                yield bar(batch, (start, batch.now), part, kind, "running", lines)


def _copies(batch: Batch) -> Iterator[dict[str, Any]]:
    positions, (low, high) = batch.lanes.positions, _COPIES
    for row in batch.copies:
        middle = positions.get(row.destination, positions.get(row.source))
        if middle is None:  # its worker left
            continue
        words, colour = transport(row.transport)
        head = f"copy {words}"
        lines = {
            "from": batch.lanes.name(row.source),
            "to": batch.lanes.name(row.destination),
            "bytes": format_bytes(row.nbytes),
            "values": str(row.values),
            "took": format_time(row.stop - row.start),
            "rate": "not measured" if row.rate is None else f"{row.rate / 1e9:.3g} GB/s",
        }
        part = middle + low, middle + high
        yield bar(batch, (row.start, row.stop), part, (head, colour), head, lines)
