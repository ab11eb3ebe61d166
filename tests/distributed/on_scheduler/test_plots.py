"""The plots of the devices: their lanes, and the rows of tasks that ran at the same time."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("bokeh")

from dask_devctx.scheduler.dashboard.feed import Batch, Intervals, Lanes, Member
from dask_devctx.scheduler.dashboard.figures import LIGHT, LaneAxis, TimeAxis
from dask_devctx.scheduler.dashboard.levels import memory_plot, utilization_plot
from dask_devctx.scheduler.dashboard.tables import Glance, TransferMatrix
from dask_devctx.scheduler.dashboard.timeline import Timeline
from dask_devctx.scheduler.history import DeviceHistory
from dask_devctx.scheduler.rows import Sample, TaskRun


def members(*hosts: str, devices: int = 2) -> list[Member]:
    return [Member(h, f"GPU-{h}-{n}", n) for h in hosts for n in range(devices)]


def batch(
    lanes: Lanes,
    tasks: Iterable[TaskRun] = (),
    samples: Iterable[tuple[str, Sample]] = (),
    again: bool = False,
    before: Intervals | None = None,
) -> Batch:
    intervals = before or Intervals()
    found = [*intervals.of([("a", worker, sample) for worker, sample in samples], lanes)]
    return Batch(
        lanes,
        lanes,
        again,
        now=100.0,
        offset=0.0,
        left_out=0,
        tasks=[("a", task) for task in tasks],
        copies=[],
        incidents=[],
        intervals=found,
        latest=intervals.latest,
    )


def data(plot: Any, column: str) -> dict[str, list[Any]]:
    (found,) = {
        id(renderer.data_source): renderer.data_source.data
        for renderer in plot.root.renderers
        if column in renderer.data_source.data
    }.values()
    return {name: list(values) for name, values in found.items()}


def test_hosts_are_groups_in_the_order_of_their_numbers() -> None:
    lanes = Lanes([*members("node-10", "node-9"), Member("node-9", None, None)])
    assert lanes.factors == [
        ("node-10", "cuda:1"),
        ("node-10", "cuda:0"),
        ("node-9", "no device"),
        ("node-9", "cuda:1"),
        ("node-9", "cuda:0"),
    ]
    assert lanes.label("node-9", "GPU-node-9-1") == "node-9 cuda:1"
    assert lanes.position("node-10", "GPU-node-10-1") == 0.5
    assert lanes.position("node-9", "GPU-node-9-1") == pytest.approx(3.5 + 0.6)
    assert lanes.position("node-9", "GPU-elsewhere") is None


def run(
    key: str, start: float | None, stop: float | None, outcome: str = "memory", kind: str = "work"
) -> TaskRun:
    return TaskRun(key, kind, "GPU-a-0", 0, start, stop, outcome)


def timeline(tasks: Iterable[TaskRun] = (), samples: Iterable[Any] = ()) -> Any:
    plot = Timeline(TimeAxis(), LaneAxis(devices=False), LIGHT)
    plot.show(batch(Lanes(members("a", devices=1)), tasks, samples, again=True))
    return plot


def test_without_nvml_the_title_says_so_once() -> None:
    lanes = Lanes(members("a", devices=4))
    plot = utilization_plot(TimeAxis(), LaneAxis(devices=True), LIGHT)
    samples = [("w", Sample(0, f"GPU-a-{n}", None, time=1.0)) for n in range(4)]
    intervals = Intervals()
    plot.show(batch(lanes, samples=samples, again=True, before=intervals))
    assert "NVML has no numbers" in plot.root.title.text
    later = Sample(0, "GPU-a-0", None, utilization=0.5, occupied_s=0.25, time=2.0)
    plot.show(batch(lanes, samples=[("w", later)], before=intervals))
    assert "NVML" not in plot.root.title.text
    # The legend has what the plot shows.
    shown = [entry.label.value for entry in plot.root.legend[0].items if entry.visible]
    assert shown == ["idle", "has a task", "computes (NVML)"]


def test_each_device_at_a_glance() -> None:
    lanes, plot, intervals = Lanes(members("a")), Glance(LIGHT), Intervals()
    plot.show(batch(lanes, again=True))
    assert plot.root.text == "<h3>No device has answered yet</h3>"
    idle = Sample(1, "GPU-a-1", None, time=99.0)
    busy = Sample(
        0, "GPU-a-0", None, queued=3, running=2, utilization=0.5, power_w=310.4, temperature=41,
        memory_free=2**30, memory_total=2**34, memory_spilled=2**20, tasks_now=("<train>",),
        time=99.0,
    )  # fmt: skip
    plot.show(batch(lanes, samples=[("w", idle)], before=intervals))
    assert "<h3>1 device: idle</h3>" in plot.root.text
    plot.show(batch(lanes, samples=[("w", busy)], before=intervals))
    first, second = plot.root.text.split("<tr><td>")[1:]
    for text in ("cuda:0<", ">50%<", ">15.00 GiB of 16.00 GiB<", "1.00 MiB<", "310 W<", "41 °C<"):
        assert text in first
    assert "<td>2 × &lt;train&gt;</td><td>3</td>" in first
    assert second.startswith("cuda:1<")
    assert ">idle<" in second


def test_a_lane_splits_when_two_tasks_ran_at_once() -> None:
    plot, lanes = timeline([run("one", 1.0, 2.0)]), Lanes(members("a", devices=1))
    (height,) = (top - low for top, low in zip(*sides(plot), strict=True))
    plot.show(batch(lanes, [run("two", 1.5, 3.0), run("never ran", None, None, "error")]))
    assert data(plot, "key")["key"] == ["one", "two"]
    # A browser that is given an array has no place in it for texts.
    kept = [r.data_source.data for r in plot.root.renderers if "key" in r.data_source.data]
    assert [type(each["key"]) for each in kept] == [list]
    tops, bottoms = sides(plot)
    assert tops[1] <= bottoms[0]
    assert tops[0] - bottoms[0] == pytest.approx(height / 2)
    plot.show(batch(Lanes(members("a")), [run("one", 1.0, 2.0)], again=True))
    assert data(plot, "key")["key"] == ["one"]


def sides(plot: Any) -> tuple[list[float], list[float]]:
    tasks = data(plot, "key")
    return tasks["top"], tasks["bottom"]


def test_memory_of_a_device_that_two_workers_use() -> None:
    lanes = Lanes(members("a", devices=1))
    plot = memory_plot(TimeAxis(), LaneAxis(devices=True), LIGHT)

    def sample(time: float, held: int) -> Sample:
        return Sample(
            0, "GPU-a-0", None, memory_free=400, memory_total=1000, memory_held=held,
            memory_others=300, time=time,
        )  # fmt: skip

    samples = [("w", sample(10.0, 100)), ("v", sample(10.2, 200)), ("w", sample(10.5, 150))]
    plot.show(batch(lanes, samples=samples, again=True))
    shown = data(plot, "to_held")
    lows, tops = shown["low"], shown["high"]
    parts = [[shown[name][n] for name in ("to_held", "to_rest", "to_others")] for n in (0, 1)]
    assert [
        [round((level - low) / (top - low), 2) for level in levels]
        for low, top, levels in zip(lows, tops, parts, strict=True)
    ] == [[0.3, 0.3, 0.6], [0.35, 0.35, 0.6]]
    for text in ("held by dask</td><td>350 B", "free</td><td>400 B", "processes</td><td>250 B"):
        assert text in shown["about"][-1]
    assert not [e for e in plot.root.legend[0].items if e.visible and e.label.value == "spilled"]


def test_the_matrix_adds_up_the_rows_of_heartbeats() -> None:
    row = {"source": "GPU-a-0", "destination": "GPU-a-1", "nbytes": 2048, "copies": 2, "saved": 1}
    timed = {"seconds": 0.5, "measured_nbytes": 2_000_000_000, "measured_s": 1.0}
    metrics = {"devctx-traffic": [{**row, "transport": "peer", **timed, "newer": 1}]}
    worker = SimpleNamespace(metrics=metrics)
    scheduler: Any = SimpleNamespace(workers={"one": worker, "two": worker}, plugins={})
    scheduler.plugins["routing"] = SimpleNamespace(history=DeviceHistory(scheduler, list))
    plot = TransferMatrix(scheduler, LIGHT)
    plot.show(batch(Lanes(members("a")), again=True))
    assert "<th>from</th><th>to cuda:1</th>" in plot.root.text
    assert "<td>cuda:0</td><td>4.00 kiB within a worker, 2 GB/s</td>" in plot.root.text
    assert "<h3>Transfers: 4.00 kiB in 4 values</h3>" in plot.root.text
