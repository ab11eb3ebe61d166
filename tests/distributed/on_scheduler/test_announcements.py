"""The scheduler reads what it is told of devices, and a message that is wrong harms nobody."""

from __future__ import annotations

import logging
from typing import Any

import dask
import pytest
from distributed import Client, Scheduler, Worker, rpc
from distributed.utils_test import async_poll_for, captured_logger

from dask_devctx import Device, DeviceNotFoundError, DevicePlugin
from dask_devctx.scheduler import routing
from dask_devctx.scheduler.messages import ANNOUNCE, KEEP, REFUSE, WITHDRAW
from tests.distributed.devices import on_cluster, uuid_here

UUIDS = [f"GPU-b33ebc8{n}-95a3-9648-c914-5259efe7a11e" for n in range(2)]
SEEN = [{"device_id": n, "uuid": uuid} for n, uuid in enumerate(UUIDS)]


KEPT: dict[str, Any] = {"unannotated": "assign", "place": 1.0, "left": {}, "keys": []}
MALFORMED: list[tuple[str, dict[str, Any]]] = [
    (ANNOUNCE, {}),
    (ANNOUNCE, {"seen": SEEN}),
    (ANNOUNCE, {"seen": None, "used": []}),
    (ANNOUNCE, {"seen": [1], "used": []}),
    (ANNOUNCE, {"seen": [{"device_id": 0, "uuid": 7}], "used": []}),
    (ANNOUNCE, {"seen": [{"device_id": True, "uuid": UUIDS[0]}], "used": []}),
    (ANNOUNCE, {"seen": [SEEN[1]], "used": []}),
    (ANNOUNCE, {"seen": [{**SEEN[0], "pci_bus_id": 1}], "used": []}),
    (ANNOUNCE, {"seen": [SEEN[0], {**SEEN[0], "device_id": 1}], "used": []}),
    (ANNOUNCE, {"seen": SEEN * 1000, "used": []}),
    (ANNOUNCE, {"seen": SEEN, "used": ["GPU-another"]}),
    (ANNOUNCE, {"seen": SEEN, "used": [[]]}),
    (KEEP, {}),
    (KEEP, {**KEPT, "unannotated": ["assign"]}),
    (KEEP, {**KEPT, "place": float("nan")}),
    (KEEP, {**KEPT, "left": [UUIDS[0]]}),
    (KEEP, {**KEPT, "left": {UUIDS[0]: 0.5}}),
    (KEEP, {**KEPT, "left": {UUIDS[0]: [0.0, -1]}}),
    (KEEP, {**KEPT, "keys": [{}]}),
    (REFUSE, {}),
    (REFUSE, {"kind": "KeyboardInterrupt", "arguments": []}),
    (REFUSE, {"kind": "DevicesInUseError", "arguments": ["many", 1, 2]}),
    (REFUSE, {"kind": "LockDirectoryError", "arguments": "ab"}),
]


@on_cluster(4, 4)
async def test_a_malformed_message_is_refused_and_harms_nobody(
    client: Client, scheduler: Scheduler, a: Worker
) -> None:
    await client.register_plugin(DevicePlugin(devices_per_worker=2))
    said = _log()
    async with rpc(scheduler.address) as there:
        for op, message in MALFORMED:
            said.clear()
            answer = await getattr(there, op)(address=a.address, **message)
            assert str(answer).startswith("refused: "), (op, message)
            assert said == [f"A message {op} was {answer}"]
        for address in (None, 7, "", "tcp://" + "x" * 1000, ["tcp://127.0.0.1:1"]):
            for op in (ANNOUNCE, WITHDRAW, REFUSE):
                answer = await getattr(there, op)(address=address, seen=SEEN, used=UUIDS)
                assert str(answer).startswith("refused: ")
        for op in (WITHDRAW, REFUSE):
            message = {"kind": "LockDirectoryError", "arguments": ["/tmp", "is none"]}
            answer = await getattr(there, op)(address="tcp://127.0.0.1:1", **message)
            assert "no worker of this cluster has the address" in str(answer)
    assert scheduler.plugins["devctx-routing"].refused == {}
    await _all_is_well(client)


async def _all_is_well(client: Client) -> None:
    for ordinal in range(4):
        for name in (ordinal, Device(ordinal).uuid):
            with dask.annotate(device=name):
                assert await client.submit(uuid_here, pure=False) == Device(ordinal).uuid
    with dask.annotate(device=UUIDS[0]), pytest.raises(DeviceNotFoundError):
        await client.submit(uuid_here, pure=False)


def _log() -> list[str]:
    """Collect what the routing says; pytest's own fixture does not reach gen_cluster's tests."""
    lines: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger(routing.__name__).addHandler(Collecting())
    return lines


@on_cluster(4)
async def test_a_worker_may_announce_before_it_joins(
    client: Client, scheduler: Scheduler, a: Worker
) -> None:
    await client.register_plugin(DevicePlugin(devices=[0, 1]))
    await client.unregister_worker_plugin("devctx")
    await a.plugin_add(DevicePlugin(devices=[0, 1]))
    async with Worker(scheduler.address, plugins=[DevicePlugin(devices=[3])]) as late:
        with dask.annotate(device=Device(3).uuid):
            future = client.submit(uuid_here, pure=False)
            assert await future == Device(3).uuid
        assert next(iter(scheduler.tasks[future.key].who_has)).address == late.address


@on_cluster(8)
async def test_a_scheduler_that_was_not_reached_is_told_again(
    client: Client, scheduler: Scheduler
) -> None:
    register, failed = scheduler.handlers["register_scheduler_plugin"], []

    async def fail_once(**given: Any) -> Any:
        if not failed:
            failed.append(True)
            raise OSError("Timed out trying to connect")
        return await register(**given)

    scheduler.handlers["register_scheduler_plugin"] = fail_once
    with captured_logger("dask_devctx") as log:
        await client.register_plugin(DevicePlugin())
        assert failed
        await async_poll_for(lambda: routing.DeviceRouting.name in scheduler.plugins, timeout=10)
    assert "Tasks that name a device" not in log.getvalue()
    with dask.annotate(device=Device(2).uuid):
        assert await client.submit(uuid_here) == Device(2).uuid
