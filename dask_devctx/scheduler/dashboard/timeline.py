"""The plot of the tasks and copies on each device over time."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import cycle
from typing import Any, Final, NamedTuple

from bokeh.colors import RGB
from bokeh.core.properties import value
from bokeh.palettes import Category20
from dask.utils import format_bytes, format_time

from dask_devctx.dask_internals.dashboard import color_of
from dask_devctx.scheduler.dashboard.feed import Batch
from dask_devctx.scheduler.dashboard.figures import (
    COPIES,
    FAILED,
    MOST_ROWS,
    OTHER,
    TRANSPORTS,
    WINDOW_S,
    Colours,
    LaneAxis,
    Rows,
    TimeAxis,
    about,
    colour_sample,
    hover,
    legend_below,
    over_time,
)
from dask_devctx.scheduler.dashboard.lanes import Slots
from dask_devctx.scheduler.dashboard.levels import Intervals
from dask_devctx.scheduler.rows import Copy, TaskRun

# The parts of a lane, measured from its middle.
_TASKS: Final = (-0.26, 0.44)
_COPIES: Final = (-0.44, -0.32)
# Without a sample for this long, nothing is known of the tasks that run.
_STALE_S: Final = 3.0
# The kinds of tasks that the legend names, and the most characters of a name.
_NAMED: Final = 6
_NAME_LENGTH: Final = 18
_TITLE: Final = "Tasks and copies on each device"


class _Ran(NamedTuple):
    """A task that ran, and not one that failed before it could run."""

    host: str
    row: TaskRun
    start: float
    stop: float


class Timeline:
    """A lane for each device with its tasks and copies."""

    def __init__(self, times: TimeAxis, lanes: LaneAxis, colours: Colours) -> None:
        self._slots = Slots()
        self._tasks = Rows("left right bottom top", "color edge key about")
        self._copies = Rows("left right bottom top nbytes", "color about")
        self._failed, self._running = Rows("x y"), Rows("left right bottom top", "about")
        self._kept: deque[_Ran] = deque(maxlen=MOST_ROWS)
        self._left_out = 0
        self._intervals = Intervals()
        # When the latest task ended on each device, and since when it has tasks without a pause.
        self._ended: dict[tuple[str, str | None], float] = {}
        self._running_since: dict[tuple[str, str | None], float] = {}
        self.root = over_time("device_timeline", _TITLE, times, lanes)
        box = {name: name for name in ("left", "right", "bottom", "top")}
        running = self.root.quad(
            **box, source=self._running.source, fill_color=colours.grid, fill_alpha=0.8,
            line_color=None, legend_label="running",
        )  # fmt: skip
        # The edge tells two tasks of one kind apart, and shows one that is too short to be seen.
        tasks = self.root.quad(
            **box, source=self._tasks.source, fill_color="color", line_color="edge",
            line_width=1,
        )  # fmt: skip
        copies = self.root.quad(
            **box, source=self._copies.source, fill_color="color", line_color="color"
        )
        colour_sample(self.root, FAILED, "failed")
        self.root.scatter(
            x="x", y="y", source=self._failed.source, marker="x", size=9, line_width=2,
            line_color=colours.text, legend_label="failed",
        )  # fmt: skip
        for glyph in (running, tasks, copies):
            glyph.nonselection_glyph = None
        for transport, name in TRANSPORTS.items():
            colour_sample(self.root, COPIES[transport], f"copy {name}")
        self._kinds = _Kinds(self.root)
        legend_below(self.root)
        self.root.add_tools(hover(tasks), hover(copies), hover(running))
        times.follow(self.root)

    def show(self, batch: Batch) -> None:
        """Show the tasks, copies and failures of a batch."""
        if batch.again:
            self._left_out = 0
            self._slots = Slots()
            self._kept.clear()
            self._ended.clear()
            self._running_since.clear()
            for rows in (self._tasks, self._failed, self._copies, self._running):
                rows.replace()
        ran = [
            _Ran(host, row, row.start, row.stop)
            for host, row in batch.tasks
            if row.start is not None and row.stop is not None
        ]
        self._kept.extend(ran)
        self._kinds.count(ran)
        for host, row, _, stop in ran:
            self._ended[host, row.uuid] = max(stop, self._ended.get((host, row.uuid), 0.0))
        before = self._slots.counts()
        slots = self._placed(ran)
        if self._slots.counts() != before:  # a lane has more rows now: all of it moves
            self._tasks.replace()
            self._failed.replace()
            self._slots.clear()
            ran = list(self._kept)
            slots = self._placed(ran)
        self._show_tasks(batch, ran, slots)
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

    def _placed(self, ran: Sequence[_Ran]) -> list[int]:
        """Return the row of each task in its lane."""
        slots = [0] * len(ran)
        for n in sorted(range(len(ran)), key=lambda n: ran[n].start):
            host, row, start, stop = ran[n]
            slots[n] = self._slots.place((host, row.uuid), start, stop, row.thread)
        return slots

    def _show_tasks(self, batch: Batch, ran: Sequence[_Ran], slots: Sequence[int]) -> None:
        rows, failed = [], []
        low, high = _TASKS
        for (host, row, start, stop), slot in zip(ran, slots, strict=True):
            middle = batch.lanes.position(host, row.uuid)
            if middle is None:  # its worker left long ago
                continue
            height = (high - low) / self._slots.count((host, row.uuid))
            top = middle + high - slot * height
            wrong = row.outcome == "error"
            colour = FAILED if wrong else self._kinds.colour(row.prefix)
            lines = {
                "key": str(row.key),
                "device": batch.lanes.label(host, row.uuid),
                "ran for": format_time(stop - start),
                "waited for a free slot": format_time(row.slot_s),
                "waited for its inputs": format_time(row.inputs_s),
                "waited for memory": format_time(row.memory_s),
            }
            rows.append(
                {
                    "left": batch.ms(start),
                    "right": batch.ms(stop),
                    "bottom": top - 0.92 * height,
                    "top": top,
                    "color": colour,
                    "edge": _edge(colour),
                    "key": str(row.key),
                    "about": about(f"{row.prefix}{' failed' if wrong else ''}", lines),
                }
            )
            if wrong:
                failed.append({"x": batch.ms(stop), "y": top - 0.46 * height})
        self._tasks.add(rows)
        self._failed.add(failed)

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
                    "about": _about_copy(host, row, batch),
                }

    def _running_rows(self, batch: Batch) -> Iterator[dict[str, Any]]:
        """Yield a row for each device with tasks: since they began, or since the last task ended.

        A task's own row comes when it ends.
        """
        low, high = _TASKS
        list(self._intervals.of(batch, batch.lanes))
        for place, one in self._intervals.latest.items():
            if not one.after.running:
                self._running_since.pop(place, None)
                continue
            since = self._running_since.setdefault(place, one.before.time)
            start = max(since, self._ended.get(place, 0.0))
            if start < batch.now < one.after.time + _STALE_S:
                tasks = {"tasks that run": one.after.running, "tasks that wait": one.after.queued}
                lines = {"device": one.lane, **{name: str(n) for name, n in tasks.items()}}
                yield {
                    "left": batch.ms(start),
                    "right": batch.ms(batch.now),
                    "bottom": one.middle + low,
                    "top": one.middle + high,
                    "about": about("running", lines),
                }


@lru_cache
def _edge(colour: str) -> str:
    """Return a colour beside which a colour can be seen, and that is like it."""
    rgb = RGB.from_hex_string(colour)
    lightness = (rgb.r + rgb.g + rgb.b) / (3 * 255)
    return str((rgb.lighten(0.25) if lightness < 0.3 else rgb.darken(0.15)).to_hex())


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


class _Kinds:
    """The colours of the kinds of tasks, and the legend of those that took the most time so far."""

    def __init__(self, plot: Any) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._colours: dict[str, str] = {}
        self._others = cycle(Category20[20])
        self._shown: set[str] = set()
        samples = [colour_sample(plot, OTHER, f"kind {n}") for n in range(_NAMED)]
        entries = [item for item in plot.legend[0].items if item.renderers[0] in samples]
        self._entries = list(zip(samples, entries, strict=True))
        for entry in entries:
            entry.visible = False

    def colour(self, prefix: str) -> str:
        """Return dask's colour of a kind, or another one if it is another kind's here."""
        if prefix not in self._colours:
            colour, taken = color_of(prefix), set(self._colours.values()) | {FAILED}
            if colour in taken:
                others = (next(self._others) for _ in range(20))
                colour = next((one for one in others if one not in taken), colour)
            self._colours[prefix] = colour
        return self._colours[prefix]

    def count(self, ran: Sequence[_Ran]) -> None:
        """Add tasks that ran, and name their kinds."""
        for _, row, start, stop in ran:
            self._seconds[row.prefix] += stop - start
        found = set(heapq.nlargest(_NAMED, self._seconds, key=self._seconds.__getitem__))
        if found - self._shown:
            self._shown = found
            for prefix, (sample, entry) in zip(sorted(found), self._entries, strict=False):
                colour = self.colour(prefix)
                sample.glyph.update(fill_color=colour, line_color=colour)
                short = len(prefix) <= _NAME_LENGTH
                entry.label = value(prefix if short else f"{prefix[:_NAME_LENGTH]}…")
                entry.visible = True
