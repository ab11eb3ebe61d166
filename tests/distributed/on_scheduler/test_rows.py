"""The rows of counts, between workers, a scheduler and a client of several versions."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from dask_devctx.scheduler.counts import METRIC, Counts, PastCounts
from dask_devctx.scheduler.rows import Copy, DeviceCounts, Sample, TaskRun, Transfer

ADDRESS = "tcp://10.0.0.1:1"
UUIDS = ["GPU-0", "GPU-1"]
# A worker's counts of a device, as its heartbeats have them.
ROW = {
    "uuid": UUIDS[0], "device_id": 0, "name": "GPU", "done": 1, "failed": 0, "busy_s": 1.0,
    "occupied_s": 1.0, "slot_s": 0.0, "inputs_s": 0.0, "memory_s": 0.0, "out_of_memory": 0,
}  # fmt: skip


def left_with(row: dict[str, Any]) -> Counts:
    counts = Counts(SimpleNamespace(workers={ADDRESS: SimpleNamespace(metrics={METRIC: [row]})}))
    counts.left(ADDRESS)
    return counts


def test_counts_of_an_older_worker_that_left_are_kept() -> None:
    for missing in ("out_of_memory", "memory_s"):
        older = {name: value for name, value in ROW.items() if name != missing}
        assert left_with(older).past[UUIDS[0]].counts.done == 1


def test_a_row_is_read() -> None:
    assert {one.name for one in fields(PastCounts)} <= ROW.keys()
    (past,) = left_with(ROW).past.values()
    assert past.counts == PastCounts(**{one.name: ROW[one.name] for one in fields(PastCounts)})


def test_old_names_of_fields_can_be_read() -> None:
    copy = Copy("a", "b", 8, 0.0, 1.0, "ipc")
    assert (copy.target, copy.way) == (copy.destination, copy.transport) == ("b", "ipc")
    assert Transfer("a", "b", "host", 8, 1, 0, 0.0).way == "host"
    assert DeviceCounts(0, "GPU-0", None, device_memory_limit=8).memory_limit == 8
    assert DeviceCounts(0, "GPU-0", None, slot_s=2.0).place_s == 2
    assert TaskRun("x", "x", None, None, 0.0, 1.0, "memory", slot_s=2.0).place_s == 2
    assert Sample("GPU-0", 0.0, device_memory_limit=8).memory_limit == 8
