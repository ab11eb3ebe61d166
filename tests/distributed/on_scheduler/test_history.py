"""The history of the workers: rows there, collected on the scheduler for its readers."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import fields as fields_of
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
from distributed import Worker
from distributed.utils_test import async_poll_for
from prometheus_client import REGISTRY

from dask_devctx import Device, DevicePlugin
from dask_devctx.scheduler.history import DeviceHistory, Ring
from dask_devctx.scheduler.messages import ACTION, PROTOCOL, TOPIC, Failure
from dask_devctx.scheduler.rows import Copy, DeviceCounts, Sample, TaskRun, Transfer
from dask_devctx.worker.metrics.history import History
from tests.distributed.devices import fail, nap, submit_on, with_plugin

FIELDS = ("cuda:1", "GPU-1", "CUDA_ERROR_ASSERT", 710, (), False, False, "")


async def all_rows(scheduler: Any) -> list[Any]:
    history = DeviceHistory.of(scheduler)
    await history.collect()
    return [row for _, row in history.rows().rows]


@with_plugin(devices=[0, 1], tasks_per_device=1)
async def test_tasks_with_their_devices_and_waits(client: Any, scheduler: Any) -> None:
    first = submit_on(client, 1, nap, 0.2, key="first-1")
    second = submit_on(client, 1, nap, 0.1, key="second-1")
    await asyncio.gather(first, second)
    await submit_on(client, 1, fail, key="fail-1").exception()
    await submit_on(client, 0, nap, 0.0, first, key="moved-1")
    await submit_on(client, None, sum, [1, 2], key="host-1")
    rows = {row.key: row for row in await all_rows(scheduler) if isinstance(row, TaskRun)}
    assert {key: row.device_id for key, row in rows.items()} == {
        "first-1": 1,
        "second-1": 1,
        "fail-1": 1,
        "moved-1": 0,
        "host-1": None,
    }
    assert (rows["first-1"].uuid, rows["host-1"].uuid) == (Device(1).uuid, None)
    assert {key for key, row in rows.items() if row.outcome == "error"} == {"fail-1"}
    later = max(rows["first-1"], rows["second-1"], key=lambda row: row.start)
    assert 0.05 < later.slot_s < 5
    assert 0 < rows["moved-1"].inputs_s < 5
    assert rows["first-1"].thread == rows["second-1"].thread != rows["moved-1"].thread
    for row in rows.values():
        assert row.prefix == row.key.split("-")[0]
        assert row.start <= row.stop
        assert abs(row.stop - time.time()) < 30


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
    history = DeviceHistory.of(scheduler)
    history.patience_s = 0.6
    await client.submit(nap, 0.0, key="before-1")
    await asyncio.sleep(0.7)
    assert asked == 0
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
    await asyncio.sleep(1.5)
    stopped = asked
    await asyncio.sleep(0.7)
    assert asked == stopped
    worker.handlers["devctx_history"] = answer


@with_plugin(devices=[0])
async def test_what_ended_before_it_is_collected_is_in_it(
    client: Any, scheduler: Any, worker: Worker
) -> None:
    answer, asked, go_on = worker.handlers["devctx_history"], asyncio.Event(), asyncio.Event()

    async def late(**content: Any) -> Any:
        rows = answer(**content)
        asked.set()
        await go_on.wait()
        return rows

    worker.handlers["devctx_history"] = late
    DeviceHistory.of(scheduler).read()  # as a page does
    await asked.wait()
    await client.submit(nap, 0.0, key="x-1")
    asyncio.get_running_loop().call_soon(go_on.set)
    assert "x-1" in {getattr(row, "key", "") for row in await all_rows(scheduler)}


@with_plugin(devices=[0, 2])
async def test_samples_come_with_heartbeats(client: Any, scheduler: Any, worker: Worker) -> None:
    made = submit_on(client, 2, nap, 0.3)
    await submit_on(client, 0, nap, 0.0, made)
    history = DeviceHistory.of(scheduler)
    latest: dict[str, Any] = {}

    async def collected() -> bool:
        await worker.heartbeat()
        await history.collect()
        latest.update((row.uuid, row) for _, row in history.samples(0).rows)
        return Device(0).uuid in latest and latest[Device(0).uuid].memory_copies == 80_000

    begun = time.monotonic()
    while not await collected():
        assert time.monotonic() - begun < 20
        await asyncio.sleep(0.05)
    assert {*latest} == {Device(0).uuid, Device(2).uuid}
    busy = latest[Device(2).uuid]
    assert busy.memory_total == 16 * 2**30
    assert 0.2 < busy.occupied_s < 5
    assert busy.memory_free < busy.memory_total
    assert (busy.running, busy.queued) == (0, 0)
    assert history.workers[worker.address].devices[Device(0).uuid] == 0


@with_plugin(devices=[0, 1, 2, 3])
async def test_heartbeats_grow_by_two_kibibytes_for_each_device_at_most(
    client: Any, worker: Worker
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
    told = Failure(("cuda:1", Device(1).uuid, *FIELDS[2:]), (), (), ())
    event = {"action": ACTION, "protocol": PROTOCOL, **told._asdict()}
    counter = "dask_devctx_device_failures_total", {"device": Device(1).uuid}
    before = REGISTRY.get_sample_value(*counter)
    worker.log_event(TOPIC, {**event, "protocol": PROTOCOL + 1})
    worker.log_event(TOPIC, event)
    history = DeviceHistory.of(scheduler)
    await async_poll_for(lambda: bool(history.rows().rows), timeout=10)
    ((address, row),) = history.rows().rows
    assert (address, row.what, row.uuid) == (worker.address, "device-failed", Device(1).uuid)
    assert "failed with CUDA_ERROR_ASSERT (710)" in row.text
    assert history.workers[address].host == "127.0.0.1"
    assert REGISTRY.get_sample_value(*counter) == before + 1


@with_plugin(devices=[0])
async def test_a_worker_that_comes_back_to_its_address_has_its_lane_again(
    client: Any, scheduler: Any, worker: Worker
) -> None:
    feeds = pytest.importorskip("dask_devctx.scheduler.dashboard.feed", reason="it needs bokeh")
    batches: list[Any] = []
    feed = feeds.Feed(scheduler, [SimpleNamespace(show=batches.append)])
    port, history = worker.port, DeviceHistory.of(scheduler)
    await history.collect()
    await worker.close()
    feed.update()
    async with Worker(scheduler.address, port=port) as again:
        await async_poll_for(lambda: again.plugins["devctx"].worker_devices, timeout=10)
        await history.collect()
        feed.update()
        await client.register_plugin(DevicePlugin(devices=[1]))  # it gives the other one up
        await history.collect()
        feed.update()
    seen = [[], [Device(0).uuid], [Device(1).uuid]]
    assert [[*batch.lanes.names] for batch in batches] == seen


def test_the_rows_of_workers_that_left_long_ago_are_forgotten() -> None:
    scheduler: Any = SimpleNamespace(workers={}, plugins={})
    history, many = DeviceHistory(scheduler, list), 300
    for number in range(many):
        history.failed(f"worker {number}", Failure(FIELDS, (), (), ()))
        history.left(f"worker {number}")
    kept = [address for address, _ in history.rows().rows]
    assert 1 < len(kept) < many
    assert kept == list(history.workers) == [f"worker {n}" for n in range(many)][-len(kept) :]


def test_old_names_of_fields_can_be_read() -> None:
    assert Transfer("a", "b", "host", 8, 1, 0, 0.0).way == "host"
    assert DeviceCounts(0, "GPU-0", None, device_memory_limit=8).memory_limit == 8
    assert DeviceCounts(0, "GPU-0", None, slot_s=2.0).place_s == 2
    assert TaskRun("x", "x", None, None, 0.0, 1.0, "memory", slot_s=2.0).place_s == 2
    assert Sample(0, "GPU-0", None, device_memory_limit=8).memory_limit == 8


def test_rows_of_other_fields_have_another_protocol() -> None:
    rows = (TaskRun, Copy, DeviceCounts, Transfer)
    fields = " ".join(field.name for row in rows for field in fields_of(row))
    assert (PROTOCOL, crc32(fields.encode())) == (14, 683285964), "one higher, and the new sum"


def test_a_ring_tells_how_many_rows_are_lost() -> None:
    ring = Ring(2)
    for row in "abc":
        ring.append((row,))
    assert ring.since(0) == ([("b",), ("c",)], 3, 1)
    assert ring.since(2) == ([("c",)], 3, 0)


def test_a_copy_has_the_times_of_the_schedulers_clock() -> None:
    worker = History(10, offset=lambda: 100.0)
    before = time.time()
    worker.copied("a", "b", 8, 2.0, "ipc")
    worker.copied("a", "b", 8, 2.0, "ipc", begun=50.0)
    (ended, begun), *_ = worker.copies.since(0)
    assert 98 <= ended[3] - before < 99
    assert 100 <= ended[4] - before < 101
    assert begun[3:5] == (150.0, 152.0)
