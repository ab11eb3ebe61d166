"""The plots of the devices: their lanes, and the rows of tasks that ran at the same time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.utils import color_of

pytest.importorskip("bokeh")

from dask_devctx.scheduler.dashboard.feed import Batch, Intervals, Lanes
from dask_devctx.scheduler.dashboard.figures import TRANSPORTS, Axes
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


def data(plot: Any, nth: int = 1) -> dict[str, list[Any]]:
    """The rows of a part: in the timeline first tasks, then what runs, then copies."""
    parts = plot.figure.renderers
    return {name: list(values) for name, values in parts[nth].data_source.data.items()}


def keys(plot: Any) -> list[str]:
    return [re.findall("key</td><td>(.*?)<", about)[0] for about in data(plot)["about"]]


def test_lanes_of_several_hosts_have_their_names() -> None:
    found = lanes("node-1", "node-2")
    assert list(found.names.values()) == [
        *("node-2 cuda:1", "node-2 cuda:0", "node-1 cuda:1", "node-1 cuda:0")
    ]
    assert found.positions["GPU-node-2-0"] == 1.5
    assert (found.name("GPU-node-1-1"), found.name("tcp://a:1")) == ("node-1 cuda:1", "tcp://a:1")


def run(
    key: str, start: float | None, stop: float | None, outcome: str = "memory", prefix: str = "work"
) -> TaskRun:
    return TaskRun(key, prefix, "GPU-a-0", 0, start, stop, outcome)


def legend(plot: Any) -> dict[str, str]:
    """Return the words of a plot's legend, with their colours."""
    entry = r"<i style='background: (.+?)'></i>(.+?)</span>"
    return {words: colour for colour, words in re.findall(entry, plot.root.children[1].text)}


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
    (text,) = data(plot)["about"]
    for line in ("has a task</td><td>25%", "(NVML)</td><td>50%", "downwards)</td><td>unknown"):
        assert line in text
    assert {*legend(plot)} == {"idle", "computes (NVML)"}


def test_each_device_at_a_glance() -> None:
    there, plot, before = lanes("a"), Glance(), Intervals()
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
    cells = dict(
        zip(re.findall("<th>(.*?)</th>", plot.root.text), first.split("<td>"), strict=True)
    )
    said = {"device": "cuda:0<", "computes": ">50%<", "memory used": ">15.0 of 16.0 GiB<"}
    said |= {"spilled": "1.0 MiB<", "power": "310 W<", "temperature": "41 °C<", "queued": "3<"}
    said["held by dask"] = "0 B<"
    assert [name for name, text in said.items() if text not in cells[name]] == []
    assert "<td>3</td><td><div>2 × &lt;train&gt;</div></td>" in first
    assert second.startswith("cuda:1<")
    assert ">idle<" in second
    plot.show(batch(there, samples=[("w", Sample(0, "GPU-a-0", None, time=88.0))]))
    assert ">no news for 12 s<" in plot.root.text
    left = Lanes([("a", 1, "GPU-a-1")], known=[("a", 0, "GPU-a-0")])
    plot.show(batch(left, samples=[("w", idle)]))
    assert left.name("GPU-a-0") == "cuda:0"
    assert "; cuda:0 left with the worker</h3>" in plot.root.text
    assert "<h3>1 device; NVML has no numbers for it" in plot.root.text


def test_a_lane_splits_when_two_tasks_ran_at_once() -> None:
    plot, there = Timeline(Axes()), lanes("a", devices=1)
    copies = [Copy("GPU-a-0", end, 9, 1.0, 1.5, "host") for end in ("tcp://b:1", "host")]
    plot.show(batch(there, [run("one", 1.0, 2.0)], copies=copies, again=True))
    (height,) = (top - low for top, low in zip(*sides(plot), strict=True))
    assert data(plot, 3)["kind"] == ["copy through the host"] * 2
    later = [run("two", 1.5, 3.0), run("three", 2.0, 3.0), run("never ran", None, None, "error")]
    plot.show(batch(there, later))
    assert keys(plot) == ["one", "two", "three"]
    # A browser that is given an array has no place in it for texts.
    assert isinstance(plot.figure.renderers[1].data_source.data["about"], list)
    tops, bottoms = sides(plot)
    assert tops[0] == tops[2]
    assert tops[1] <= bottoms[0]
    assert tops[0] - bottoms[0] == pytest.approx(height / 2)
    plot.show(batch(lanes("a"), [run("one", 1.0, 2.0)], again=True))
    assert keys(plot) == ["one"]


def test_tasks_that_run_or_failed_and_idle_devices() -> None:
    plot, there = Timeline(Axes()), lanes("a", devices=1)
    plot.show(batch(there, again=True))
    assert plot.figure.title.text.endswith(": no task ran so far")
    assert legend(plot) == {}
    plot.show(batch(there, [run("bad", 10.0, 20.0, "error"), run("good", 20.0, 40.0)]))
    assert data(plot)["kind"] == ["failed", "work"]
    assert plot.figure.title.text.endswith(": idle for 60.00 s")
    now = Sample(0, "GPU-a-0", None, running=1, queued=2, tasks_now=("train",), time=99.0)
    plot.show(batch(there, samples=[("w", now)]))
    shown = data(plot, 2)
    assert (shown["left"], shown["right"]) == ([99_000], [100_000])
    assert "1 × train</td>" in shown["about"][0]
    assert "idle" not in plot.figure.title.text


def test_kinds_in_the_legend_are_in_sight_and_have_the_colours_of_the_task_stream() -> None:
    plot, there = Timeline(axes := Axes()), lanes("a", devices=1)
    axes.show(batch(there))  # from 70 to 100 s
    tasks = [run(f"{n}-{k}", 80 + k, 81 + k, prefix=f"kind-{n}") for n in range(12) for k in (0, 1)]
    tasks += [run("bad", 90.0, 91.0, "error"), run("old", 10.0, 11.0, prefix="old")]
    copies = [Copy("GPU-a-0", "host", 9, 80.0, 81.0, way) for way in TRANSPORTS]
    plot.show(batch(there, tasks, copies=copies))
    found = legend(plot)
    assert {"failed", "copy within a worker"} < found.keys()
    assert {f"kind-{n}": color_of(f"kind-{n}") for n in range(12)}.items() < found.items()
    assert "old" not in found
    assert len(found) == 12 + 1 + len(TRANSPORTS)
    assert {*data(plot)["kind"], *data(plot, 3)["kind"]} == {*found, "old"}


def sides(plot: Any) -> tuple[list[float], list[float]]:
    tasks = data(plot)
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
    shown = data(plot)
    bases, tops = shown["base"], shown["whole"]
    parts = [[shown[name][n] for name in ("to_held", "to_rest", "to_others")] for n in (0, 1)]
    assert [
        [round((level - base) / (top - base), 2) for level in levels]
        for base, top, levels in zip(bases, tops, parts, strict=True)
    ] == [[0.3, 0.3, 0.6], [0.35, 0.35, 0.6]]
    assert {*legend(plot)} == {"free", "held", "other processes"}
    for text in ("held by dask</td><td>350 B", "free</td><td>400 B", "processes</td><td>250 B"):
        assert text in shown["about"][-1]


def test_the_matrix_adds_up_the_rows_of_heartbeats() -> None:
    row = {"source": "GPU-a-0", "destination": "GPU-a-1", "nbytes": 2048, "copies": 2, "saved": 1}
    timed = {"measured_nbytes": 2_000_000_000, "measured_s": 1.0}
    metrics = {"devctx-traffic": [{**row, "transport": "peer", **timed, "newer": 1}]}
    worker = SimpleNamespace(metrics=metrics, name="w")
    scheduler: Any = SimpleNamespace(workers={"one": worker, "two": worker})
    plot = TransferMatrix(scheduler)
    plot.show(batch(lanes("a"), again=True))
    assert "<th>from</th><th>to cuda:1</th>" in plot.root.text
    assert re.search("<td>cuda:0</td><td><i [^>]+></i>4.0 KiB<br>2 GB/s</td>", plot.root.text)
    assert re.search("<h3>Transfers: 4.0 KiB in 4 values .*within a worker</h3>", plot.root.text)
