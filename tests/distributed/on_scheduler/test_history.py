"""The history of the workers: rows there, collected on the scheduler for its readers."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from distributed import Client, Nanny, Worker, secede
from distributed.protocol import dumps, loads
from distributed.utils_test import async_poll_for, gen_cluster

from dask_devctx import Device, DevicePlugin, devices, report
from dask_devctx.scheduler.history import DeviceHistory, KnownWorker
from dask_devctx.scheduler.messages import HISTORY, SHARE
from dask_devctx.scheduler.rows import Copy, Incident, TaskRun
from dask_devctx.simulated_array import SimulatedArray
from dask_devctx.worker.metrics.history import History, Ring
from tests.distributed.devices import with_plugin


def nap(seconds: float, *inputs: object) -> SimulatedArray:
    time.sleep(seconds)
    return SimulatedArray((100, 100))


def secedes() -> None:
    secede()


def fail() -> None:
    raise ZeroDivisionError


def run_out(n: list[int]) -> int:
    if n:
        n.pop()
        raise RuntimeError("CUDA out of memory on purpose")
    return 1


def history_of(scheduler: Any) -> DeviceHistory:
    history = DeviceHistory.of(scheduler)
    assert history is not None
    return history


async def all_rows(scheduler: Any) -> list[Any]:
    history = history_of(scheduler)
    await history.collect()
    return [row for _, row in history.rows().rows]


# -- the rings


def test_a_reader_learns_how_many_rows_are_lost() -> None:
    ring = Ring(3)
    for n in range(5):
        ring.append((n,))
    assert ring.since(0) == ([(2,), (3,), (4,)], 5, 2)
    assert ring.since(0, most=2) == ([(2,), (3,)], 4, 2)
    assert ring.since(4) == ([(4,)], 5, 0)
    assert ring.since(5) == ([], 5, 0)
    assert Ring(0).since(0) == ([], 0, 0)


def test_no_row_is_lost_or_read_twice_while_threads_append() -> None:
    ring = Ring(100_000)
    threads = [
        threading.Thread(target=lambda n=n: [ring.append((n, m)) for m in range(5000)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    found, number = [], 0
    while any(thread.is_alive() for thread in threads) or len(found) < 20_000:
        rows, number, lost = ring.since(number, most=777)
        found += rows
        assert lost == 0
    assert sorted(found) == [(n, m) for n in range(4) for m in range(5000)]


def test_another_epoch_begins_at_the_first_row() -> None:
    first, second = History(10), History(10)
    for history in (first, second):
        history.copied("a", "b", 5, 0.5, "peer")
    told = first.answer()
    assert told["rows"]["copies"][0][:3] == ("a", "b", 5)
    assert first.answer(told["epoch"], told["next"])["rows"]["copies"] == []
    assert len(second.answer(told["epoch"], told["next"])["rows"]["copies"]) == 1


def test_times_are_by_the_schedulers_clock() -> None:
    history = History(10, offset=lambda: 1000.0)
    history.copied("a", "b", 5, 0.5, "ipc")
    ((*_, start, stop, way, values, timed),) = history.copies.since(0)[0]
    assert 999 < stop - time.time() < 1001
    assert (round(stop - start, 6), way, values, timed) == (0.5, "ipc", 1, True)


# -- on a cluster


@with_plugin(devices=[0, 1], tasks_per_device=1)
async def test_tasks_with_their_devices_and_waits(
    client: Any, scheduler: Any, worker: Worker
) -> None:
    with dask.annotate(device=1):
        first = client.submit(nap, 0.2, key="first-1")
        second = client.submit(nap, 0.1, key="second-1")
        await asyncio.gather(first, second)
        await client.submit(fail, key="fail-1").exception()
    with dask.annotate(device=0):
        await client.submit(nap, 0.0, first, key="moved-1")
    with dask.annotate(device=None):
        await client.submit(sum, [1, 2], key="host-1")
    rows = {row.key: row for row in await all_rows(scheduler) if isinstance(row, TaskRun)}
    assert {key: row.device_id for key, row in rows.items()} == {
        "first-1": 1,
        "second-1": 1,
        "fail-1": 1,
        "moved-1": 0,
        "host-1": None,
    }
    assert rows["first-1"].uuid == Device(1).uuid
    assert rows["host-1"].uuid is None
    assert {key for key, row in rows.items() if row.outcome == "error"} == {"fail-1"}
    later = max(rows["first-1"], rows["second-1"], key=lambda row: row.start)
    assert 0.05 < later.slot_s < 5
    assert rows["moved-1"].inputs_s > 0
    assert rows["first-1"].thread == rows["second-1"].thread != rows["moved-1"].thread
    for row in rows.values():
        assert row.prefix == row.key.split("-")[0]
        assert row.start <= row.stop
        assert abs(row.stop - time.time()) < 30


@with_plugin(devices=[0, 1])
async def test_copies_and_retries(client: Any, scheduler: Any, worker: Worker) -> None:
    with dask.annotate(device=1):
        made = client.submit(nap, 0.0, key="made")
    with dask.annotate(device=0):
        await client.submit(nap, 0.0, made)
    with dask.annotate(device=1):
        assert await client.submit(run_out, [1], key="tight-1") == 1
    rows = await all_rows(scheduler)
    (copy,) = [row for row in rows if isinstance(row, Copy) and row.transport == "peer"]
    assert (copy.source, copy.destination) == (Device(1).uuid, Device(0).uuid)
    assert (copy.nbytes, copy.transport) == (80_000, "peer")
    assert (copy.timed, copy.rate) == (False, None)  # it is too small
    (retry,) = [row for row in rows if isinstance(row, Incident)]
    assert (retry.what, retry.key, retry.uuid) == ("out-of-memory", "tight-1", Device(1).uuid)
    assert "RuntimeError: CUDA out of memory on purpose" in retry.text
    (tight,) = [row for row in rows if getattr(row, "key", "") == "tight-1" and row is not retry]
    assert tight.memory_s > 0


def always_runs_out() -> None:
    raise RuntimeError("CUDA out of memory on purpose")


@with_plugin(devices=[0])
async def test_a_task_that_ran_out_of_memory_twice(
    client: Any, scheduler: Any, worker: Worker
) -> None:
    """It ran again once, and then it failed: so say its error and the rows."""
    error = await client.submit(always_runs_out, key="tight-1").exception()
    assert "the task ran 2 times" in str(error)
    rows = [row for row in await all_rows(scheduler) if isinstance(row, Incident)]
    assert [(row.what, row.key) for row in rows] == [
        ("out-of-memory", "tight-1"),
        ("error", "tight-1"),
    ]


@with_plugin(16, 16, tasks_per_device=2)
async def test_values_between_workers_are_copies(
    client: Any, scheduler: Any, one: Worker, two: Worker
) -> None:
    made = client.submit(nap, 0.0, workers=[one.address])
    await client.submit(nap, 0.0, made, workers=[two.address])
    copies = [row for row in await all_rows(scheduler) if isinstance(row, Copy)]
    (copy,) = [row for row in copies if row.transport in ("ipc", "host")]
    assert copy.nbytes == 80_000
    assert copy.source == one.plugins["devctx"].worker_devices[0].uuid


@with_plugin(devices=[0, 1])
async def test_it_is_collected_while_somebody_reads(
    client: Any, scheduler: Any, worker: Worker
) -> None:
    asked = 0
    answer = worker.handlers["devctx_history"]

    def counted(**content: Any) -> Any:
        nonlocal asked
        asked += 1
        return answer(**content)

    worker.handlers["devctx_history"] = counted
    history = history_of(scheduler)
    history.patience_s = 0.6
    await client.submit(nap, 0.0, key="before-1")
    await asyncio.sleep(0.7)
    assert (asked, history.collecting) == (0, False)
    number, found = 0, []
    begun = time.monotonic()
    while not {"before-1", "after-1"} <= {row.key for row in found}:
        reading = history.read(number)
        number = reading.next
        found += [row for _, row in reading.rows]
        if "before-1" in {row.key for row in found}:
            await client.submit(nap, 0.0, key="after-1")
        await asyncio.sleep(0.05)
        assert time.monotonic() - begun < 20
    assert [row.key for row in found].count("before-1") == 1
    await async_poll_for(lambda: not history.collecting, timeout=20)
    stopped = asked
    await asyncio.sleep(0.7)
    assert asked == stopped
    worker.handlers["devctx_history"] = answer


@gen_cluster(client=True, nthreads=[("127.0.0.1", 4)], timeout=60)
async def test_lost_rows_are_told(client: Any, scheduler: Any, worker: Any) -> None:
    with dask.config.set({"devctx.history": 5}):
        await client.register_plugin(DevicePlugin())
    await client.gather(client.map(nap, [0.0] * 12, pure=False))
    rows = await all_rows(scheduler)
    assert len([row for row in rows if isinstance(row, TaskRun)]) == 5
    (lost,) = [row for row in rows if isinstance(row, Incident)]
    assert (lost.what, lost.text.split()[0]) == ("lost", "7")


@with_plugin(devices=[0, 2])
async def test_samples_come_with_heartbeats(client: Any, scheduler: Any, worker: Worker) -> None:
    with dask.annotate(device=2):
        made = client.submit(nap, 0.3)
    with dask.annotate(device=0):
        await client.submit(nap, 0.0, made)
    history = history_of(scheduler)
    key = worker.address, Device(0).uuid

    async def collected() -> bool:
        await worker.heartbeat()
        await history.collect()
        return key in history.samples and history.samples[key][-1].memory_copies == 80_000

    begun = time.monotonic()
    while not await collected():
        assert time.monotonic() - begun < 20
        await asyncio.sleep(0.05)
    assert {uuid for _, uuid in history.samples} == {Device(0).uuid, Device(2).uuid}
    busy = history.samples[worker.address, Device(2).uuid][-1]
    assert busy.memory_total == 16 * 2**30
    assert 0.2 < busy.occupied_s < 5
    assert busy.memory_free < busy.memory_total
    assert (busy.running, busy.queued) == (0, 0)
    assert history.devices[key].device_id == 0
    assert history.workers[worker.address].present


@with_plugin(devices=[0, 1, 2, 3])
async def test_heartbeats_grow_by_two_kibibytes_for_each_device_at_most(
    client: Any, scheduler: Any, worker: Worker
) -> None:
    await client.gather(client.map(nap, [0.0] * 8, pure=False))
    names = [name for name in worker.metrics if name.startswith("devctx")]
    told = {name: worker.metrics[name](worker) for name in names}
    assert "devctx" in told
    assert len(json.dumps(told)) < 4 * 2048


@with_plugin(devices=[0, 1])
async def test_a_device_that_fails_is_an_incident(
    client: Any, scheduler: Any, worker: Worker
) -> None:
    event = {"action": "device-failed", "device": Device(1).uuid, "error": "it broke"}
    worker.log_event("devctx", {**event, "suspects": []})
    history = history_of(scheduler)
    await async_poll_for(lambda: bool(history.rows().rows), timeout=10)
    ((address, row),) = history.rows().rows
    assert (address, row.what, row.uuid) == (worker.address, "device-failed", Device(1).uuid)
    assert row.text == "it broke"
    assert history.workers[address].host == "127.0.0.1"


@with_plugin(devices=[0, 1])
async def test_malformed_messages_about_histories_and_shares_are_refused_and_logged(
    client: Any, scheduler: Any, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[object] = []

    def lie(**question: object) -> object:
        asked.append(question)
        return {**right(), "rows": {"tasks": [["key", 7]]}}

    right, worker.handlers[HISTORY] = worker.handlers[HISTORY], lie
    history = history_of(scheduler)
    for _ in range(3):
        await history.collect()
    assert len(asked) == 1
    assert "The history of" in caplog.text
    assert history.rows().rows == []
    held = [Device(0).uuid, Device(1).uuid]
    assert await worker.handlers[SHARE](uuids=7, version=10**30) == held
    assert f"A message {SHARE} was refused" in caplog.text
    assert await client.submit(lambda: Device.current().device_id) in (0, 1)


@gen_cluster(client=True, nthreads=[], timeout=60)
async def test_workers_that_left_long_ago_are_forgotten_but_for_those_of_rows(
    client: Any, scheduler: Any
) -> None:
    history = DeviceHistory(scheduler, list)
    event = {"action": "device-failed", "worker": "tcp://10.0.0.1:5", "error": "it broke"}
    history.event("devctx", event)
    for n in range(500):
        address = f"tcp://10.0.0.2:{n}"
        history.workers[address] = KnownWorker(str(n), "10.0.0.2")
        history.left(address)
    assert "tcp://10.0.0.1:5" in history.workers
    assert "tcp://10.0.0.2:499" in history.workers
    assert len(history.workers) < 150


@with_plugin()
async def test_nothing_is_left_when_it_is_unregistered(
    client: Client, scheduler: Any, worker: Worker
) -> None:
    assert "devctx_history" in worker.handlers
    await client.unregister_worker_plugin("devctx")
    assert "devctx_history" not in worker.handlers
    history = history_of(scheduler)
    history.read()
    await scheduler.plugins["devctx-routing"].close()
    assert not history.collecting


# -- counts that outlive their worker


def total(scheduler: Any, name: str) -> float:
    counts = scheduler.plugins["devctx-routing"].counts
    return sum(getattr(device.counts, name) for device in counts.past.values())


@pytest.mark.parametrize("how", ["close", "kill"])
@gen_cluster(client=True, nthreads=[], Worker=Nanny, timeout=60)
async def test_counts_of_a_worker_that_left_stay(client: Any, scheduler: Any, how: str) -> None:
    async with Nanny(scheduler.address, nthreads=4) as nanny:
        await client.register_plugin(DevicePlugin())
        await client.gather(client.map(nap, [0.01] * 5, pure=False))
        await client.submit(fail).exception()
        assert total(scheduler, "done") == 0
        await getattr(nanny, how)()
        await async_poll_for(lambda: total(scheduler, "done") == 5, timeout=10)
        assert total(scheduler, "failed") == 1
        assert 0.04 < total(scheduler, "busy_s") < 10
        past = scheduler.plugins["devctx-routing"].counts.past
        assert set(past) <= {device.uuid for device in devices()}


@with_plugin(devices=[0, 1])
async def test_counts_go_on_when_the_plugin_is_registered_again(
    client: Any, scheduler: Any, worker: Worker
) -> None:
    with dask.annotate(device=1):
        await client.gather(client.map(nap, [0.01] * 3, pure=False))
    await client.register_plugin(DevicePlugin(devices=[0, 1, 2]))
    with dask.annotate(device=1):
        await client.gather(client.map(nap, [0.01] * 2, pure=False))
    rows = worker.plugins["devctx"].extension.record.rows()
    assert {row["device_id"]: row["done"] for row in rows} == {0: 0, 1: 5, 2: 0}
    assert rows[1]["busy_s"] > 0.04
    assert rows[1]["occupied_s"] > 0.04


def test_a_thousand_tasks_a_second_cost_the_scheduler_little() -> None:
    worker, scheduler = History(10_000, devices()), SimpleNamespace(workers={}, plugins={})
    history = DeviceHistory(scheduler, list)  # type: ignore[arg-type]
    known, used_s = history._known("tcp://10.0.0.1:5"), 0.0
    for _ in range(20):  # ten seconds
        for n in range(500):
            device = devices()[n % 4]
            where = device.uuid, device.device_id
            worker.tasks.append(("x-123", "x", *where, 1.0, 2.0, "memory", 0.0, 0.0, 0.0, 5))
        for device in devices() * 2:
            worker.samples.append((device.uuid, 1.0))
        answer = worker.answer(known.epoch, known.since)
        frames = dumps({"status": "OK", "result": answer})
        begun = time.process_time()
        history._take("tcp://10.0.0.1:5", known, loads(frames)["result"])
        used_s += time.process_time() - begun
    assert len(history.rows().rows) == 10_000
    assert used_s < 0.05 * 10


@with_plugin(devices=[0, 1, 2])
async def test_a_task_of_several_devices_has_a_row_for_each(
    client: Any, scheduler: Any, worker: Worker
) -> None:
    with dask.annotate(devices=[2, 0]):
        await client.submit(nap, 0.1, key="both-1")
    with dask.annotate(devices=[1, 2]):
        await client.submit(secedes, key="secedes-1")
    rows = [row for row in await all_rows(scheduler) if isinstance(row, TaskRun)]
    both = [(row.device_id, row.nth) for row in rows if row.key == "both-1"]
    assert both == [(2, 0), (0, 1)]
    seceded = [(row.device_id, row.nth) for row in rows if row.key == "secedes-1"]
    assert seceded == [(1, 0), (2, 1)]
    found = await report(client)
    assert [(task.key, task.device_id) for task in found] == [("both-1", 2), ("secedes-1", 1)]
    assert found.hosted == 0
    devices = {device.device_id: device for device in found.devices}
    assert {n: device.done for n, device in devices.items()} == {0: 0, 1: 1, 2: 1}
    assert devices[0].busy_s == devices[2].busy_s > 0.09
    assert devices[0].occupied_s > 0.09
    assert {(device.running, device.queued) for device in found.devices} == {(0, 0)}
