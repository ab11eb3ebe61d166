"""The plots of the devices: their lanes, and the rows of tasks that ran at the same time."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("bokeh")

from dask_devctx.scheduler.dashboard.feed import Batch, Intervals, Lanes
from dask_devctx.scheduler.dashboard.figures import Axes
from dask_devctx.scheduler.dashboard.levels import memory_plot, utilization_plot
from dask_devctx.scheduler.dashboard.tables import Glance, TransferMatrix
from dask_devctx.scheduler.dashboard.timeline import Timeline
from dask_devctx.scheduler.rows import Copy, Sample, TaskRun


def lanes(*hosts: str, devices: int = 2) -> Lanes:
    return Lanes((h, n, f"GPU-{h}-{n}") for h in hosts for n in range(devices))


def batch(
    lanes: Lanes,
    tasks: Iterable[TaskRun] = (),
    samples: Iterable[tuple[str, Sample]] = (),
    copies: Iterable[Copy] = (),
    again: bool = False,
    before: Intervals | None = None,
) -> Batch:
    intervals = before or Intervals()
    return Batch(
        lanes,
        again,
        now=100.0,
        offset=0.0,
        left_out=0,
        tasks=list(tasks),
        copies=list(copies),
        incidents=[],
        intervals=list(intervals.of(samples)),
        latest=intervals.latest,
    )


def data(plot: Any, column: str) -> dict[str, list[Any]]:
    (found,) = {
        id(renderer.data_source): renderer.data_source.data
        for renderer in plot.root.renderers
        if column in renderer.data_source.data
    }.values()
    return {name: list(values) for name, values in found.items()}


def test_lanes_of_several_hosts_have_their_names() -> None:
    found = lanes("node-1", "node-2")
    assert list(found.names.values()) == [
        *("node-2 cuda:1", "node-2 cuda:0", "node-1 cuda:1", "node-1 cuda:0")
    ]
    assert found.positions["GPU-node-2-0"] == 1.5
    assert (found.name("GPU-node-1-1"), found.name("tcp://a:1")) == ("node-1 cuda:1", "tcp://a:1")


def run(key: str, start: float | None, stop: float | None, outcome: str = "memory") -> TaskRun:
    return TaskRun(key, "work", "GPU-a-0", 0, start, stop, outcome)


def test_the_load_of_a_device() -> None:
    plot, before = utilization_plot(Axes()), Intervals()
    first, later = (
        Sample(0, "GPU-a-0", None, utilization=use, occupied_s=busy, time=at)
        for use, busy, at in ((None, 0.0, 1.0), (0.5, 0.25, 2.0))
    )
    plot.show(batch(lanes("a"), samples=[("w", first)], again=True, before=before))
    elsewhere = Sample(0, "GPU-left", None, time=2.0)
    samples = [("w", later), ("v", elsewhere)]
    plot.show(batch(lanes("a"), samples=samples, before=before))
    (text,) = data(plot, "about")["about"]
    for line in ("has a task</td><td>25%", "NVML</td><td>50%", "memory, by NVML</td><td>unknown"):
        assert line in text


def test_each_device_at_a_glance() -> None:
    there, plot, before = lanes("a"), Glance("glance"), Intervals()
    plot.show(batch(there, again=True))
    assert plot.root.text == "<h3>No device has answered yet</h3>"
    idle = Sample(1, "GPU-a-1", None, time=99.0)
    busy = Sample(
        0, "GPU-a-0", None, queued=3, running=2, utilization=0.5, power_w=310.4, temperature=41,
        memory_free=2**30, memory_total=2**34, memory_spilled=2**20, tasks_now=("<train>",),
        time=99.0,
    )  # fmt: skip
    plot.show(batch(there, samples=[("w", idle), ("w", busy)], before=before))
    assert "<h3>2 devices</h3>" in plot.root.text  # NVML has numbers of one
    first, second = plot.root.text.split("<tr><td>")[1:]
    for text in ("cuda:0<", ">50%<", ">15.00 GiB of 16.00 GiB<", "1.00 MiB<", "310 W<", "41 °C<"):
        assert text in first
    assert "<td>2 × &lt;train&gt;</td><td>3</td>" in first
    assert second.startswith("cuda:1<")
    assert ">idle<" in second
    plot.show(batch(there, samples=[("w", idle)]))
    assert "<h3>1 device; NVML has no numbers for it" in plot.root.text


def test_a_lane_splits_when_two_tasks_ran_at_once() -> None:
    plot, there = Timeline(Axes()), lanes("a", devices=1)
    copies = [Copy("GPU-a-0", end, 9, 1.0, 1.5, "host") for end in ("tcp://b:1", "host")]
    plot.show(batch(there, [run("one", 1.0, 2.0)], copies=copies, again=True))
    (height,) = (top - low for top, low in zip(*sides(plot), strict=True))
    assert data(plot, "nbytes")["copy"] == ["copy through the host"] * 2
    later = [run("two", 1.5, 3.0), run("three", 2.0, 3.0), run("never ran", None, None, "error")]
    plot.show(batch(there, later))
    assert data(plot, "key")["key"] == ["one", "two", "three"]
    # A browser that is given an array has no place in it for texts.
    kept = [r.data_source.data for r in plot.root.renderers if "key" in r.data_source.data]
    assert [type(each["key"]) for each in kept] == [list]
    tops, bottoms = sides(plot)
    assert tops[0] == tops[2]
    assert tops[1] <= bottoms[0]
    assert tops[0] - bottoms[0] == pytest.approx(height / 2)
    plot.show(batch(lanes("a"), [run("one", 1.0, 2.0)], again=True))
    assert data(plot, "key")["key"] == ["one"]


def test_tasks_that_run_or_failed_and_idle_devices() -> None:
    plot, there = Timeline(Axes()), lanes("a", devices=1)
    plot.show(batch(there, again=True))
    assert plot.root.title.text.endswith(": no task ran so far")
    plot.show(batch(there, [run("bad", 10.0, 20.0, "error"), run("good", 20.0, 40.0)]))
    assert data(plot, "key")["kind"] == ["failed", "work"]
    assert plot.root.title.text.endswith(": idle for 60.00 s")
    now = Sample(0, "GPU-a-0", None, running=1, queued=2, tasks_now=("train",), time=99.0)
    plot.show(batch(there, samples=[("w", now)]))
    shown = data(plot, "state")
    assert (shown["left"], shown["right"]) == ([99_000], [100_000])
    assert "1 × train</td>" in shown["about"][0]
    assert "idle" not in plot.root.title.text


def sides(plot: Any) -> tuple[list[float], list[float]]:
    tasks = data(plot, "key")
    return tasks["top"], tasks["bottom"]


def test_memory_of_a_device_that_two_workers_use() -> None:
    plot = memory_plot(Axes())

    def sample(time: float, held: int) -> Sample:
        return Sample(
            0, "GPU-a-0", None, memory_free=400, memory_total=1000, memory_held=held,
            memory_others=300, time=time,
        )  # fmt: skip

    samples = [("w", sample(10.0, 100)), ("v", sample(10.2, 200)), ("w", sample(10.5, 150))]
    plot.show(batch(lanes("a", devices=1), samples=samples, again=True))
    shown = data(plot, "to_held")
    lows, tops = shown["low"], shown["high"]
    parts = [[shown[name][n] for name in ("to_held", "to_rest", "to_others")] for n in (0, 1)]
    assert [
        [round((level - low) / (top - low), 2) for level in levels]
        for low, top, levels in zip(lows, tops, parts, strict=True)
    ] == [[0.3, 0.3, 0.6], [0.35, 0.35, 0.6]]
    for text in ("held by dask</td><td>350 B", "free</td><td>400 B", "processes</td><td>250 B"):
        assert text in shown["about"][-1]


def test_the_matrix_adds_up_the_rows_of_heartbeats() -> None:
    row = {"source": "GPU-a-0", "destination": "GPU-a-1", "nbytes": 2048, "copies": 2, "saved": 1}
    timed = {"seconds": 0.5, "measured_nbytes": 2_000_000_000, "measured_s": 1.0}
    metrics = {"devctx-traffic": [{**row, "transport": "peer", **timed, "newer": 1}]}
    worker = SimpleNamespace(metrics=metrics, name="w")
    scheduler: Any = SimpleNamespace(workers={"one": worker, "two": worker})
    plot = TransferMatrix("transfers", scheduler)
    plot.show(batch(lanes("a"), again=True))
    assert "<th>from</th><th>to cuda:1</th>" in plot.root.text
    assert "<td>cuda:0</td><td>4.00 kiB within a worker, 2 GB/s</td>" in plot.root.text
    assert "<h3>Transfers: 4.00 kiB in 4 values</h3>" in plot.root.text
