"""The timeline is a trace by the rules of its format, with the tasks and copies of the report."""

from __future__ import annotations

import json
import time
from pathlib import Path

import dask
from distributed import Client, wait

from dask_devctx import report, timeline
from dask_devctx.client.timeline import Stretch, trace
from dask_devctx.scheduler.history import KnownWorker
from dask_devctx.scheduler.rows import Copy, TaskRun
from tests.distributed.devices import fail, nap, started, submit_on
from tests.distributed.traces import assert_equal, check, checked, lanes, slices


def test_every_task_and_copy_of_the_report_is_in_it(client: Client, tmp_path: Path) -> None:
    values = client.map(nap, [0.02 + n / 1e5 for n in range(12)], pure=False)
    wait(values)
    client.gather(client.map(nap, [0.01] * 12, values[::-1], [values[0]] * 12, pure=False))
    assert isinstance(submit_on(client, 3, fail, key="fail-1").exception(), ZeroDivisionError)
    submit_on(client, None, sum, [1, 2], key="host-1").result()
    made = timeline(client, tmp_path / "timeline.json")
    found, content = report(client), checked(tmp_path / "timeline.json")
    assert_equal(content, found)
    (event,) = (e for e in slices(content, "task") if e["args"]["key"] == "host-1")
    assert lanes(content)[event["pid"], event["tid"]] == "no device"
    assert made.copies == sum(row.copies for row in found.transfers) > 0
    assert made.tasks == len(found) + 1
    assert content["otherData"]["lost_rows"] == made.lost == 0


def test_since(client: Client, tmp_path: Path) -> None:
    client.gather(client.map(nap, [0.0] * 5, key="before", pure=False))
    time.sleep(0.3)  # workers know the scheduler's clock only about
    began = time.time()
    time.sleep(0.3)
    client.gather(client.map(nap, [0.0] * 7, key="inside", pure=False))
    made = timeline(client, tmp_path / "timeline.json", since=began)
    keys = [e["args"]["key"] for e in slices(checked(made.path), "task")]
    assert len(keys) == made.tasks == 7
    assert all("inside" in key for key in keys)


def test_lost_rows_are_told(tmp_path: Path) -> None:
    with dask.config.set({"devctx.history": 4}), started(n_workers=1) as client:
        client.gather(client.map(nap, [0.0] * 10, pure=False))
        made = timeline(client, tmp_path / "timeline.json")
        content = checked(tmp_path / "timeline.json")
    assert (made.tasks, made.lost, content["otherData"]["lost_rows"]) == (4, 6, 6)
    (said,) = [e for e in content["traceEvents"] if e["ph"] == "i" and e["s"] == "g"]
    assert (said["name"], said["args"]) == ("6 earlier rows are lost", {"rows": 6})


def test_values_between_workers_and_the_host() -> None:
    workers = {
        "tcp://a:1": KnownWorker("a", "host", devices={"GPU-1": 0}),
        "tcp://a:2": KnownWorker("b", "host", devices={"GPU-2": 1}),
    }
    copies = [
        ("tcp://a:2", Copy("GPU-1", "GPU-2", 10, 5.0, 6.0, "ipc")),
        ("tcp://a:1", Copy("GPU-1", "tcp://a:2", 10, 5.5, 5.5, "host")),
        ("tcp://a:1", Copy("GPU-1", "tcp://client:9", 10, 6.5, 6.6, "host")),
        ("tcp://a:1", Copy("GPU-1", "host", 10, 7.0, 7.1, "spill")),
        ("tcp://a:1", Copy("host", "GPU-1", 10, 8.0, 8.1, "spill")),
    ]
    running = ("tcp://a:1", TaskRun(("x", 1, 2), "x", "GPU-1", 0, 5.1, 5.2, "memory"))
    content = trace(Stretch([*copies, running], workers))
    check(json.loads(json.dumps(content)))
    where = lanes(content)
    ends = [(e["pid"], where[e["pid"], e["tid"]]) for e in slices(content, "copy")]
    assert ends == [
        *[(1, "cuda:0 sends"), (2, "cuda:1 receives")],
        *[(1, "cuda:0 sends (2)"), (2, "host receives")],
        *[(1, "cuda:0 sends"), (3, "host receives")],
        *[(1, "cuda:0 sends"), (1, "host receives")],
        *[(1, "host sends"), (1, "cuda:0 receives")],
    ]
    (task,) = slices(content, "task")
    assert task["args"]["key"] == "('x', 1, 2)"
