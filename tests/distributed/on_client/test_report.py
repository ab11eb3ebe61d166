"""What ran where: the worker's metrics, its record, the report, and dask's task stream."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import dask
import pytest
from distributed import Client, Event, LocalCluster, Scheduler, Status, Worker, secede, wait
from distributed.comm.registry import backends
from distributed.comm.tcp import TCPBackend, TCPConnector, TCPListener
from distributed.utils_test import gen_test, poll_for

from dask_devctx import (
    Device,
    DeviceNotFoundError,
    DevicePlugin,
    LocalDeviceCluster,
    SimulatedArray,
    report,
    timeline,
)
from dask_devctx.client.report import Report, ReportedDevice
from dask_devctx.scheduler.messages import HISTORY
from tests.distributed.devices import fail, started, submit_on


def nap(seconds: float) -> int:
    time.sleep(seconds)
    device = Device.current()
    return device.device_id


def run_some(client: Client) -> dict[str, int]:
    """Run six tasks on each device and one that fails on device 3; return who ran where."""
    ran = {}
    for ordinal in (0, 2, 1, 3):  # of one worker and the other
        with dask.annotate(device=ordinal):
            futures = client.map(nap, [0.01 + n / 10000 + ordinal / 1000000 for n in range(6)])
        ran.update(dict.fromkeys([future.key for future in futures], ordinal))
        assert client.gather(futures) == [ordinal] * 6
    error = submit_on(client, 3, fail, key="fail-1").exception()
    assert isinstance(error, ZeroDivisionError)
    assert error.__notes__[0].startswith("'fail-1' ran on cuda:3 of inproc://")
    return ran


def test_what_waits_and_what_runs(client: Client, cluster: LocalDeviceCluster) -> None:
    go = Event("go")
    futures = [submit_on(client, 1, lambda e, n: e.wait(20), go, n) for n in range(5)]

    def counted() -> tuple[int, int, int]:
        (row,) = [device for device in report(client).devices if device.device_id == 1]
        return row.running, row.queued, row.done

    poll_for(lambda: counted() == (2, 3, 0), timeout=10)
    many = client.map(nap, [0] * 200, workers=["nobody"], pure=False)
    poll_for(lambda: report(client).waiting == 200, timeout=10)
    assert "on no worker yet: 200 tasks" in str(report(client))
    client.cancel(many)
    go.set()
    client.gather(futures)
    assert counted() == (0, 0, 5)


def secedes(fails: bool) -> None:
    secede()
    time.sleep(0.5)
    if fails:
        raise ValueError("on purpose")


def test_tasks_that_seceded_are_reported(client: Client) -> None:
    with dask.annotate(device=1):
        futures = client.map(secedes, [False, True], pure=False)
    poll_for(lambda: "seceded, such as tasks that wait for tasks: 2" in str(report(client)), 10)
    wait(futures)
    found = report(client)
    assert sorted(task.outcome for task in found) == ["error", "memory"]
    assert {task.device_id for task in found} == {1}
    device = found.devices[1]
    assert (device.queued, device.running, device.done, device.failed) == (0, 0, 1, 1)


def test_the_task_stream_knows_the_device_and_does_not_break(
    client: Client, cluster: LocalDeviceCluster
) -> None:
    components = pytest.importorskip("distributed.dashboard.components.scheduler")
    client.get_task_stream()  # from now on it is kept
    ran = run_some(client)
    for message in client.get_task_stream():
        if message["status"] == "OK":
            assert message["metadata"]["device"] == Device(ran[message["key"]]).uuid

    async def draw() -> set[str]:
        stream = components.TaskStream(cluster.scheduler, n_rectangles=1000)
        stream.update()
        return {*stream.source.data["key"]}  # a slow moment is a rectangle of the same key

    assert client.sync(draw) == {*ran, "fail-1"}


def test_it_has_a_line_for_each_device_as_text_and_in_a_notebook(client: Client) -> None:
    ran = run_some(client)
    found = report(client)
    assert [task.start for task in found] == sorted(task.start for task in found)
    head, *lines, failed = str(found).splitlines()
    assert failed == "failed: 1 of fail"
    names = ["device", "worker", "runs", "waits", "done", "failed", "use", "memory used", "kept"]
    assert re.split("  +", head)[:9] == names
    assert [line.split()[0] for line in lines] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    (device,) = [device for device in found.devices if device.device_id == 3]
    assert lines[3].split()[:6] == ["cuda:3", device.worker_name, "0", "0", "6", "1"]
    assert "of 16.0 GiB" in lines[3]
    assert str(Report()).startswith("device  worker")
    assert submit_on(client, 9, nap, 1, key="<b>bold</b>-1").exception() is not None
    html = report(client)._repr_html_()
    assert "<b>" not in html
    table = ElementTree.fromstring(html[: html.index("</table>") + len("</table>")])
    names, *rows = (["".join(cell.itertext()) for cell in row] for row in table.iter("tr"))
    done = [int(row[names.index("done")]) for row in rows]
    assert (len(done), sum(done)) == (4, len(ran))


def test_a_task_of_two_devices_counts_on_both(tmp_path: Path) -> None:
    with started(n_workers=1) as client:
        with dask.annotate(devices=[1, 3]):
            client.submit(nap, 0.2, key="both-1").result()
        found = report(client)
        timeline(client, tmp_path / "all.json")
    (task,) = found
    assert (task.key, task.device_id, task.device_ids) == ("both-1", 1, (1, 3))
    seconds = task.stop - task.start
    busy = {device.device_id: device.busy_s for device in found.devices}
    assert busy == pytest.approx({0: 0, 1: seconds, 2: 0, 3: seconds})
    assert [device.done for device in found.devices] == [0, 1, 0, 1]
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [lanes[e["tid"]] for e in events if e["name"] == "both"] == ["cuda:1", "cuda:3"]


def test_tasks_without_a_device_are_counted(client: Client) -> None:
    with dask.annotate(device=None):
        client.gather(client.map(time.sleep, [0.001, 0.002, 0.003]))
    found = report(client)
    assert list(found) == []
    assert (found.hosted, len(found.without_device)) == (3, 3)
    assert {(task.uuid, task.device_id) for task in found.without_device} == {(None, None)}
    assert "tasks without a device: 3" in str(found).splitlines()


def test_the_rate_of_copies_within_a_worker(client: Client, tmp_path: Path) -> None:
    made = submit_on(client, 2, SimulatedArray, (2048, 1024), key="made")
    submit_on(client, 0, lambda x: x.device.device_id, made).result()
    found = report(client)
    (row,) = [row for row in found.transfers if row.transport == "peer"]
    assert row.nbytes == row.measured_nbytes == 16 << 20
    assert row.rate == pytest.approx(row.nbytes / row.measured_s)
    (line,) = [line for line in str(found).splitlines() if line.startswith("moved by peer")]
    assert line == f"moved by peer: 16.0 MiB in 1 value, {row.rate / 1e9:.3g} GB/s"
    timeline(client, tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    copies = [event for event in events if event["name"] == "copy by peer"]
    assert len(copies) == 2
    for copy in copies:
        assert copy["dur"] == pytest.approx(1e6 * row.measured_s, abs=1.1)
        assert copy["args"]["GB/s"] == pytest.approx(row.rate / 1e9, abs=0.002)


def test_a_cluster_without_the_plugin_has_nothing_to_report() -> None:
    with started(LocalCluster, n_workers=1) as client:
        found = report(client)
        assert (list(found), found.devices) == ([], [])
        assert list(found.workers.values()) == [False]
        *_, last = str(found).splitlines()
        assert last == "no worker runs the plugin: client.register_plugin(DevicePlugin())"
        with pytest.raises(DeviceNotFoundError):
            client.register_plugin(DevicePlugin(devices=[9]))
        (address,) = found.workers
        client.cluster.scheduler.workers[address].status = Status.paused
        assert f"\npaused by dask, as host memory is nearly full: {address}" in str(report(client))
        client.cluster.scheduler.workers[address].status = Status.running
        assert "\non disk, as host memory is nearly full: 1.0 MiB" in str(Report(on_disk=2**20))
        without = f"\nwith the plugin and without devices: {address}"
        assert str(report(client)).endswith(without)
        client.register_plugin(DevicePlugin())
        client.submit(str, 1).result()
        with pytest.raises(DeviceNotFoundError):
            client.register_plugin(DevicePlugin(devices=[9]))
        assert str(report(client)).endswith(without)  # beside the counts of the devices it had
        client.register_plugin(DevicePlugin())
        found = report(client)
        assert len(found.devices) == 4
        assert "plugin" not in str(found)
        assert list(found.workers.values()) == [True]


async def late(*args: object, **kwargs: object) -> None:
    await asyncio.sleep(2)


@pytest.mark.parametrize("why", ["AttributeError(", "TimeoutError('none within 0.2 s')"])
def test_a_worker_that_cannot_answer_does_not_hide_the_others(
    client: Client, cluster: LocalDeviceCluster, monkeypatch: Any, tmp_path: Path, why: str
) -> None:
    run_some(client)
    mute, other = cluster.workers.values()
    if why.startswith("Timeout"):  # as one that is stopped
        mute.handlers |= {"echo": late, HISTORY: late}
        monkeypatch.setattr("dask_devctx.dask_internals.scheduler._ANSWER_S", 0.2)
        assert timeline(client, tmp_path / "timeline.json").silent == [mute.address]
    else:
        mute.plugins["devctx"].extension.record = object()  # as of another version
    found = report(client)
    assert {device.worker for device in found.devices} == {other.address}
    assert list(found.workers) == [other.address]
    assert list(found.silent) == [mute.address]
    assert f"no answer from {mute.address}: {why}" in str(found)


def test_a_cluster_without_workers_has_nothing_to_report() -> None:
    with started(LocalCluster, n_workers=0) as client:
        assert str(report(client)).splitlines()[-1] == "the cluster has no workers"


def test_refused_tasks_are_counted(client: Client, cluster: LocalDeviceCluster) -> None:
    for n in range(3):
        future = submit_on(client, 9, nap, n, key=f"nap-{n}")
        assert isinstance(future.exception(), DeviceNotFoundError)
    assert isinstance(submit_on(client, 1.5, fail, key="fail-1").exception(), TypeError)
    found = report(client)
    assert (found.hosted, found.without_device) == (0, [])
    assert {task.key for task in found.refused} == {"nap-0", "nap-1", "nap-2", "fail-1"}
    assert all(task.worker in cluster.scheduler.workers for task in found.refused)
    assert (
        sum(task.reason.startswith("DeviceNotFoundError: no device 9.") for task in found.refused)
        == 3
    )
    assert list(found) == []
    assert {(device.done, device.failed) for device in found.devices} == {(0, 0)}
    text = [line for line in str(found).splitlines() if line.startswith("refused: ")]
    assert len(text) == 2
    assert text[0].startswith("refused: 3 of nap: DeviceNotFoundError: no device 9.")
    assert text[1].startswith("refused: 1 of fail: TypeError: the annotation 'device' is")
    assert "GPU-" in str(found)


def test_devices_of_the_same_ordinal_on_one_host_have_a_part_of_their_uuid() -> None:
    """With CUDA_VISIBLE_DEVICES=0 and =2, two workers call their devices cuda:0."""
    rows = [("tcp://a:1", "GPU-1111-1"), ("tcp://a:2", "GPU-2222-1"), ("tcp://b:1", "GPU-3333-1")]
    devices = [
        ReportedDevice(0, uuid, "A GPU", worker=worker, worker_name=worker) for worker, uuid in rows
    ]
    names = [line.split("  ")[0] for line in str(Report(devices=devices)).splitlines()[1:4]]
    assert names == ["cuda:0 GPU-1111", "cuda:0 GPU-2222", "cuda:0"]


# -- a protocol of UCX


class _Connector(TCPConnector):  # type: ignore[misc]
    prefix = "ucxx://"


class _Listener(TCPListener):  # type: ignore[misc]
    prefix = "ucxx://"


class _Backend(TCPBackend):  # type: ignore[misc]
    """Connections with UCX's name. Their values go by TCP."""

    _connector_class = _Connector
    _listener_class = _Listener


@gen_test(timeout=60)
async def test_values_that_ucx_carries_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(backends, "ucxx", _Backend())
    async with (
        Scheduler(protocol="ucxx", port=0, dashboard_address=":0") as scheduler,
        Worker(scheduler.address, protocol="ucxx", nthreads=4),
        Worker(scheduler.address, protocol="ucxx", nthreads=4),
        Client(scheduler.address, asynchronous=True) as client,
    ):
        await client.register_plugin(DevicePlugin(devices_per_worker=2))
        x = submit_on(client, Device(0).uuid, SimulatedArray, (1000,), key="x")
        assert await submit_on(client, Device(3).uuid, lambda x: float(x.sum()), x, key="sum") == 0
        (row,) = [row for row in (await report(client)).transfers if row.source == Device(0).uuid]
        assert (row.transport, row.nbytes, row.copies, row.reason) == ("ucx", 8000, 1, None)
        assert "moved by ucx: 7.8 KiB in 1 value" in str(await report(client))
        assert (await timeline(client, tmp_path / "all.json")).tasks == 2
