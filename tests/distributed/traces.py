"""The rules of a trace's format, and a trace's events beside the report of the same tasks."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dask_devctx.client.report import Report


def checked(path: Path) -> dict[str, Any]:
    """Return a trace after its events were checked by the rules of the format."""
    content: dict[str, Any] = json.loads(path.read_text())
    check(content)
    return content


def check(content: dict[str, Any]) -> None:
    events = content["traceEvents"]
    assert content["displayTimeUnit"] in ("ms", "ns")
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)
    slices, flows = defaultdict(list), defaultdict(list)
    named = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    for event in events:
        assert event["ph"] in "XMisf"
        assert isinstance(event["pid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "i":
            assert event["s"] in "gpt"
        elif event["ph"] in "sf":
            flows[event["cat"], event["name"], event["id"]].append(event)
        if event["ph"] in "Xi" and event["pid"]:
            assert named["thread_name", event["pid"], event["tid"]]["name"]
            assert named["process_name", event["pid"], 0]["name"]
    for times in slices.values():  # nothing overlaps on one thread
        assert all(stop <= start for (_, stop), (start, _) in pairwise(times))
    for both in flows.values():
        begin, end = sorted(both, key=lambda event: event["ts"])
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        for event in both:  # readers drop an arrow whose end is not inside a slice
            there = slices[event["pid"], event["tid"]]
            assert any(start <= event["ts"] < stop for start, stop in there)


def lanes(content: dict[str, Any]) -> dict[tuple[int, int], str]:
    events = content["traceEvents"]
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }


def slices(content: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [e for e in content["traceEvents"] if e["ph"] == "X" and e["cat"] == category]


def assert_equal(content: dict[str, Any], report: Report) -> None:
    """Assert that a trace and a report of all its tasks have the same tasks and copies."""
    where, origin = lanes(content), content["otherData"]["begins_at"]
    runs = [*report, *report.without_device]
    drawn = slices(content, "task")
    tasks = {(event["args"]["key"], event["args"]["device"]): event for event in drawn}
    assert len(tasks) == len(drawn) == len(runs) == content["otherData"]["tasks"]
    for run in runs:
        event = tasks[str(run.key), run.uuid]
        lane = "no device" if run.uuid is None else f"cuda:{run.device_id}"
        assert where[event["pid"], event["tid"]].partition(" (")[0] == lane
        assert event["name"] == run.prefix
        assert event["args"]["outcome"] == run.outcome
        assert event["args"]["thread"] == run.thread
        for what, seconds in (
            ("a slot", run.slot_s),
            ("inputs", run.inputs_s),
            ("memory", run.memory_s),
        ):
            assert event["args"][f"waited for {what} (s)"] == round(seconds, 6)
        assert event["ts"] == pytest.approx((run.start - origin) * 1e6, abs=2)
        assert event["dur"] == pytest.approx((run.stop - run.start) * 1e6, abs=2)

    ids = {device.uuid: device.device_id for device in report.devices}
    sums: defaultdict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for event in slices(content, "copy"):
        name, args = where[event["pid"], event["tid"]], event["args"]
        end, _, kind = name.partition(" (")[0].partition(" ")
        place = args["from"] if kind == "sends" else args["to"]
        assert end == (f"cuda:{ids[place]}" if place in ids else "host")
        if kind == "receives":
            moved = sums[args["from"], args["to"], args["transport"]]
            moved[0] += args["bytes"]
            moved[1] += args["values"]
    reported: defaultdict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for row in report.transfers:
        if row.copies:
            moved = reported[row.source, row.destination, row.transport]
            moved[0] += row.nbytes
            moved[1] += row.copies
    assert sums == reported
    arrows = [event for event in content["traceEvents"] if event["ph"] == "s"]
    assert len(slices(content, "copy")) == 2 * len(arrows) == 2 * content["otherData"]["copies"]
