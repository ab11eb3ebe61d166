"""The plot of the tasks and copies on each device over time."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from bokeh.core.properties import value
from bokeh.models import LegendItem

from dask_devctx.dask_internals.dashboard import color_of
from dask_devctx.scheduler.dashboard.batches import Batch
from dask_devctx.scheduler.dashboard.figures import (
    LaneAxis,
    TimeAxis,
    colour_sample,
    hover,
    legend_below,
    over_time,
)
from dask_devctx.scheduler.dashboard.intervals import Intervals
from dask_devctx.scheduler.dashboard.slots import Slots
from dask_devctx.scheduler.dashboard.sources import MOST_ROWS, UNKNOWN, Rows, Texts, rgba
from dask_devctx.scheduler.dashboard.theme import (
    COPY,
    FAILED,
    WAY_NAMES,
    WAYS,
    Colours,
)
from dask_devctx.scheduler.rows import TaskRun

# The parts of a lane, measured from its middle.
_TASKS: Final = (-0.26, 0.44)
_COPIES: Final = (-0.44, -0.32)
# Without a sample for this long, nothing is known of the tasks that run.
_STALE_S: Final = 3.0

_BOX: Final = "left right bottom top "
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
    """A lane for each device with its tasks and copies.

    Attributes
    ----------
    root
        The figure.
    """

    def __init__(self, times: TimeAxis, lanes: LaneAxis, colours: Colours) -> None:
        self._times, self._lanes, self._colours = times, lanes, colours
        self._slots = Slots()
        self._about, self._ends = Texts("name outcome lane"), Texts("source target way")
        self._tasks = Rows(_BOX + "color about place inputs memory", "key")
        self._failed = Rows("x y")
        self._copies = Rows(_BOX + "color ends nbytes rate values")
        self._running = Rows(_BOX + "running queued about")
        self._kept: deque[_Ran] = deque(maxlen=MOST_ROWS)
        self._intervals = Intervals()
        # When the latest task ended on each device, and since when it has tasks without a pause.
        self._ended: dict[tuple[str, str | None], float] = {}
        self._running_since: dict[tuple[str, str], float] = {}
        self.root = over_time("device_timeline", _TITLE, times, lanes)
        box = {name: name for name in _BOX.split()}
        running = self.root.quad(
            **box,
            source=self._running.source,
            fill_color=colours.grid,
            fill_alpha=0.8,
            line_color=None,
            legend_label="running",
        )
        tasks = self.root.quad(
            **box, source=self._tasks.source, fill_color="color", line_color="color", line_alpha=0.6
        )
        copies = self.root.quad(
            **box, source=self._copies.source, fill_color="color", line_color="color"
        )
        self.root.scatter(
            x="x", y="y", source=self._failed.source, marker="x", size=11, line_width=3,
            line_color=FAILED, legend_label="failed",
        )  # fmt: skip
        for glyph in (running, tasks, copies):
            glyph.nonselection_glyph = None
        for way, name in WAY_NAMES.items():
            colour_sample(self.root, WAYS[way], f"copy {name}")
        self._kinds = _Kinds(self.root)
        legend_below(self.root)
        self.root.add_tools(
            hover(
                [tasks],
                {
                    "key": "@key",
                    "device": "@about{lane}",
                    "ran for": "@left{span}",
                    "waited for a free place": "@place{s}",
                    "waited for its inputs": "@inputs{s}",
                    "waited for memory": "@memory{s}",
                },
                "@about{name} @about{outcome}",
                self._about,
            ),
            hover(
                [copies],
                {
                    "from": "@ends{source}",
                    "to": "@ends{target}",
                    "bytes": "@nbytes{B}",
                    "values": "@values",
                    "took": "@left{span}",
                    "rate": "@rate{B/s}",
                },
                "copy @ends{way}",
                self._ends,
            ),
            hover(
                [running],
                {
                    "device": "@about{lane}",
                    "tasks that run": "@running",
                    "tasks that wait": "@queued",
                },
                "running",
                self._about,
            ),
        )
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
                rows.replace(())
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
            self._tasks.replace(())
            self._failed.replace(())
            self._slots.clear()
            ran = list(self._kept)
            slots = self._placed(ran)
        self._show_tasks(batch, ran, slots)
        self._copies.add(self._copy_rows(batch))
        self._running.replace(self._running_rows(batch))
        self._about.send()
        self._ends.send()
        if batch.left_out:
            self._left_out += batch.left_out
            self.root.title.text = f"{_TITLE}: the {self._left_out:,} shortest ones are left out"

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
        number, label_of = self._about.number, batch.lanes.label
        for (host, row, start, stop), slot in zip(ran, slots, strict=True):
            middle = batch.lanes.position(host, row.uuid)
            if middle is None:  # its worker left long ago
                continue
            height = (high - low) / self._slots.count((host, row.uuid))
            top = middle + high - slot * height
            left, right = batch.ms(start), batch.ms(stop)
            wrong = row.outcome == "error"
            rows.append(
                {
                    "left": left,
                    "right": right,
                    "bottom": top - 0.92 * height,
                    "top": top,
                    "color": rgba(self._colours.failed if wrong else color_of(row.prefix)),
                    "about": number(
                        row.prefix, "failed" if wrong else "", label_of(host, row.uuid)
                    ),
                    "key": str(row.key),
                    "place": row.place_s,
                    "inputs": row.inputs_s,
                    "memory": row.memory_s,
                }
            )
            if wrong:
                failed.append({"x": right, "y": top - 0.46 * height})
        self._tasks.add(rows)
        self._failed.add(failed)

    def _copy_rows(self, batch: Batch) -> Iterator[dict[str, Any]]:
        low, high = _COPIES
        lanes, number = batch.lanes, self._ends.number
        for host, row in batch.copies:
            middle = lanes.position(host, row.target) or lanes.position(host, row.source)
            if middle is None:
                continue
            yield {
                "left": batch.ms(row.start),
                "right": batch.ms(row.stop),
                "bottom": middle + low,
                "top": middle + high,
                "color": rgba(WAYS.get(row.way, COPY)),
                "ends": number(
                    lanes.label(host, row.source),
                    lanes.label(host, row.target),
                    WAY_NAMES.get(row.way, row.way),
                ),
                "nbytes": row.nbytes,
                "rate": UNKNOWN if row.rate is None else row.rate,
                "values": row.values,
            }

    def _running_rows(self, batch: Batch) -> Iterator[dict[str, Any]]:
        """Yield a row for each device with tasks: since they began, or since the last task ended.

        A task's own row comes when it ends.
        """
        low, high = _TASKS
        for one in self._intervals.of(batch, batch.lanes):
            place = one.host, one.after.uuid
            if not one.after.running:
                self._running_since.pop(place, None)
            else:
                self._running_since.setdefault(place, one.before.time)
        for place, since in self._running_since.items():
            one = self._intervals.latest[place]
            start = max(since, self._ended.get(place, 0.0))
            if start < batch.now < one.after.time + _STALE_S:
                yield {
                    "left": batch.ms(start),
                    "right": batch.ms(batch.now),
                    "bottom": one.middle + low,
                    "top": one.middle + high,
                    "running": one.after.running,
                    "queued": one.after.queued,
                    "about": self._about.number("", "", one.lane),
                }


class _Kinds:
    """The entries of the legend for the kinds of tasks that took the most time so far."""

    def __init__(self, plot: Any) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._shown: list[str] = []
        samples = [colour_sample(plot, COPY, f"kind {n}") for n in range(_NAMED)]
        entries = [item for item in plot.legend[0].items if item.renderers[0] in samples]
        self._entries: list[tuple[Any, LegendItem]] = list(zip(samples, entries, strict=True))
        for entry in entries:
            entry.visible = False

    def count(self, ran: Sequence[_Ran]) -> None:
        """Add tasks that ran, and name their kinds."""
        for _, row, start, stop in ran:
            self._seconds[row.prefix] += stop - start
        found = set(heapq.nlargest(_NAMED, self._seconds, key=self._seconds.__getitem__))
        if found - set(self._shown):
            self._shown = sorted(found)
            for prefix, (sample, entry) in zip(self._shown, self._entries, strict=False):
                sample.glyph.update(fill_color=color_of(prefix), line_color=color_of(prefix))
                short = len(prefix) <= _NAME_LENGTH
                entry.label = value(prefix if short else f"{prefix[:_NAME_LENGTH]}…")
                entry.visible = True
