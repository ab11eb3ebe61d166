"""The plot of the tasks and copies on each device over time."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator
from typing import Any, Final

from dask.utils import format_bytes, format_time

from dask_devctx.dask_internals.dashboard import color_of
from dask_devctx.scheduler.dashboard.feed import Batch
from dask_devctx.scheduler.dashboard.figures import (
    BOX,
    COPIES,
    FAILED,
    MOST_ROWS,
    OTHER,
    STALE_S,
    TRANSPORTS,
    WINDOW_S,
    Colours,
    LaneAxis,
    Rows,
    TimeAxis,
    about,
    hover,
    legend_below,
    over_time,
)
from dask_devctx.scheduler.rows import Copy, TaskRun

# The parts of a lane, measured from its middle.
_TASKS: Final = (-0.26, 0.44)
_COPIES: Final = (-0.44, -0.32)
# The most rows of a lane: more tasks at a time share one.
_MOST_SLOTS: Final = 8
# The kinds of tasks that the legend names, and the most characters of a name.
_NAMED: Final = 6
_NAME_LENGTH: Final = 18
_TITLE: Final = "Tasks and copies on each device"


class Slots:
    """The rows of all lanes, so that tasks that ran at the same time do not hide each other.

    A lane has as many as it had tasks at a time, eight at most. The tasks of one thread ran one
    after the other, even if their times overlap.

    Examples
    --------
    >>> slots = Slots()
    >>> [slots.place("cuda:0", *task) for task in ((0, 2, 7), (1, 3, 8), (2, 4, 9))]
    [0, 1, 0]
    >>> slots.count("cuda:0"), slots.count("cuda:1")
    (2, 1)
    """

    def __init__(self) -> None:
        # The thread of the last task of each row, and when that task ended.
        self._lanes: dict[Hashable, list[tuple[Hashable, float]]] = {}

    def place(self, lane: Hashable, start: float, stop: float, thread: Hashable) -> int:
        """Return the row of a task; the tasks of a lane come in about the order of their starts."""
        rows = self._lanes.setdefault(lane, [])
        same = [n for n, (last, _) in enumerate(rows) if last == thread is not None]
        free = [n for n, (_, until) in enumerate(rows) if until <= start]
        if not (same or free) and len(rows) < _MOST_SLOTS:
            rows.append((thread, stop))
            return len(rows) - 1
        number = [*same, *free, min(range(len(rows)), key=lambda n: rows[n][1])][0]
        rows[number] = thread, stop
        return number

    def count(self, lane: Hashable) -> int:
        """Return how many rows a lane has."""
        return len(self._lanes.get(lane, ())) or 1

    def counts(self) -> dict[Hashable, int]:
        """Return how many rows each lane has that has more than one."""
        return {lane: len(rows) for lane, rows in self._lanes.items() if len(rows) > 1}


class Timeline:
    """A lane for each device with its tasks and copies."""

    def __init__(self, times: TimeAxis, lanes: LaneAxis, colours: Colours) -> None:
        self._tasks = Rows("left right bottom top", "color kind key about")
        self._copies = Rows("left right bottom top nbytes", "color copy about")
        self._failed, self._running = Rows("x y"), Rows("left right bottom top", "state about")
        self._begin()
        self.root = over_time("device_timeline", _TITLE, times, lanes)
        running = self.root.quad(
            **BOX, source=self._running.source, fill_color=colours.grid, fill_alpha=0.8,
            line_color=None, legend_field="state",
        )  # fmt: skip
        # The edge tells two tasks of one kind apart, and shows one that is too short to be seen.
        tasks = self.root.quad(
            **BOX, source=self._tasks.source, fill_color="color", line_color="color",
            fill_alpha=0.75, legend_field="kind",
        )  # fmt: skip
        copies = self.root.quad(
            **BOX, source=self._copies.source, fill_color="color", line_color="color",
            legend_field="copy",
        )  # fmt: skip
        self.root.scatter(
            x="x", y="y", source=self._failed.source, marker="x", size=9, line_width=2,
            line_color=colours.text,
        )  # fmt: skip
        legend_below(self.root)
        self.root.add_tools(hover(tasks), hover(copies), hover(running))
        times.follow(self.root)

    def _begin(self) -> None:
        """Begin from nothing."""
        self._left_out = 0
        self._slots = Slots()
        # The tasks that are shown, with their hosts and their rows in the lanes.
        self._kept: deque[tuple[str, TaskRun, int]] = deque(maxlen=MOST_ROWS)
        # When the latest task ended on each device, and since when it has tasks without a pause.
        self._ended: dict[tuple[str, str | None], float] = {}
        self._running_since: dict[tuple[str, str | None], float] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by kind of task

    def show(self, batch: Batch) -> None:
        """Show the tasks, copies and failures of a batch."""
        if batch.again:
            self._begin()
            self._copies.replace()
        counts, fresh = self._slots.counts(), []
        for host, row in sorted(batch.tasks, key=lambda pair: pair[1].start or 0.0):
            lane, start, stop = (host, row.uuid), row.start, row.stop
            if start is None or stop is None:  # it failed before it could run
                continue
            fresh.append((host, row, self._slots.place(lane, start, stop, row.thread)))
            self._ended[lane] = max(stop, self._ended.get(lane, 0.0))
            self._seconds[row.prefix] += stop - start
        self._kept.extend(fresh)
        if batch.again or self._slots.counts() != counts:  # all tasks of the lane move
            self._tasks.replace()
            self._failed.replace()
            fresh = list(self._kept)
        named = set(heapq.nlargest(_NAMED, self._seconds, key=self._seconds.__getitem__))
        rows = [made for one in fresh if (made := self._task(batch, named, *one)) is not None]
        self._tasks.add(rows)
        self._failed.add(
            {"x": made["right"], "y": (made["bottom"] + made["top"]) / 2}
            for made in rows
            if made["color"] == FAILED
        )
        self._copies.add(self._copy_rows(batch))
        running = list(self._running_rows(batch))
        self._running.replace(running)
        self._left_out += batch.left_out
        self.root.title.text = _TITLE + self._news(batch, is_running=bool(running))

    def _news(self, batch: Batch, *, is_running: bool) -> str:
        """Return the end of the title: what the plot cannot show."""
        if self._left_out:
            return f": the {self._left_out:,} shortest ones are left out"
        last = max(self._ended.values(), default=None)
        if is_running or (last is not None and batch.now - last < WINDOW_S):
            return ""
        return ": no task so far" if last is None else f": idle for {format_time(batch.now - last)}"

    def _task(
        self, batch: Batch, named: set[str], host: str, row: TaskRun, slot: int
    ) -> dict[str, Any] | None:
        low, high = _TASKS
        middle = batch.lanes.position(host, row.uuid)
        if middle is None:  # its worker left long ago
            return None
        height = (high - low) / self._slots.count((host, row.uuid))
        top = middle + high - slot * height
        start, stop = row.start or 0.0, row.stop or 0.0
        wrong = row.outcome == "error"
        short = row.prefix if len(row.prefix) <= _NAME_LENGTH else f"{row.prefix[:_NAME_LENGTH]}…"
        lines = {
            "key": str(row.key),
            "device": batch.lanes.label(host, row.uuid),
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
            "kind": "failed" if wrong else short if row.prefix in named else "other kinds",
            "key": str(row.key),
            "about": about(f"{row.prefix}{' failed' if wrong else ''}", lines),
        }

    def _copy_rows(self, batch: Batch) -> Iterator[dict[str, Any]]:
        low, high = _COPIES
        for host, row in batch.copies:
            middle = batch.lanes.position(host, row.destination)
            if middle is None:
                middle = batch.lanes.position(host, row.source)
            if middle is not None:
                yield {
                    "left": batch.ms(row.start),
                    "right": batch.ms(row.stop),
                    "bottom": middle + low,
                    "top": middle + high,
                    "color": COPIES.get(row.transport, OTHER),
                    "nbytes": row.nbytes,
                    "copy": f"copy {TRANSPORTS.get(row.transport, row.transport)}",
                    "about": _about_copy(host, row, batch),
                }

    def _running_rows(self, batch: Batch) -> Iterator[dict[str, Any]]:
        """Yield a row for each device with tasks: since they began, or since the last task ended.

        A task's own row comes when it ends.
        """
        low, high = _TASKS
        for place, one in batch.latest.items():
            middle = batch.lanes.positions[place]
            if not one.after.running:
                self._running_since.pop(place, None)
                continue
            since = self._running_since.setdefault(place, one.before.time)
            start = max(since, self._ended.get(place, 0.0))
            if start < batch.now < one.after.time + STALE_S:
                lines = {
                    "device": one.lane,
                    "tasks that run": f"{one.after.running} × {', '.join(one.after.tasks_now)}",
                    "tasks that wait": str(one.after.queued),
                }
                yield {
                    "left": batch.ms(start),
                    "right": batch.ms(batch.now),
                    "bottom": middle + low,
                    "top": middle + high,
                    "state": "running",
                    "about": about("running", lines),
                }


def _about_copy(host: str, row: Copy, batch: Batch) -> str:
    lines = {
        "from": batch.lanes.label(host, row.source),
        "to": batch.lanes.label(host, row.destination),
        "bytes": format_bytes(row.nbytes),
        "values": str(row.values),
        "took": format_time(row.stop - row.start),
        "rate": "not measured" if row.rate is None else f"{row.rate / 1e9:.3g} GB/s",
    }
    return about(f"copy {TRANSPORTS.get(row.transport, row.transport)}", lines)
