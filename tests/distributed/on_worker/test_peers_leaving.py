"""Where a plugin, a worker, a device or room is gone mid-transfer, values are right all the same.

Memory goes back, and a worker's or a device's end costs that worker alone.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import dask
import pytest
from distributed import Client, Worker, wait

from dask_devctx import DevicePlugin, driver
from tests.distributed import peers
from tests.distributed.devices import on_cluster, submit_on

ARRIVED = (1.0, True)


@pytest.fixture(autouse=True)
def three_devices(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(driver.SIMULATED_DEVICES_VARIABLE, "3")
    with dask.config.set({"distributed.comm.timeouts.connect": "5s"}):
        yield


async def remove_plugin(dask_worker: Worker) -> None:
    await dask_worker.plugin_remove("devctx")


def opened() -> int:
    calls = peers.faults().calls
    return int(calls["cuIpcOpenMemHandle"] - calls["cuIpcCloseMemHandle"])


def used_memory(dask_worker: Worker) -> int:
    gc.collect()
    staged = peers.staging_nbytes(dask_worker) if "devctx" in dask_worker.plugins else 0
    return sum(gpu.used_memory for gpu in driver.backend().machine.gpus) - staged


def test_who_has_no_plugin_any_more_is_sent_what_it_can_read() -> None:
    with peers.cluster(2) as (client, workers):
        assert peers.send(client, partial(peers.array, 10**6), peers.last, workers) == ARRIVED
        assert peers.send(client, peers.array, peers.last, workers[::-1]) == ARRIVED
        client.run(remove_plugin, workers=workers[1:])
        assert peers.send(client, peers.array, peers.last_on_the_host, workers) == 1.0
        sender = workers[:1]
        client.run(remove_plugin, workers=sender)
        assert peers.until(lambda: not client.run(used_memory, workers=sender)[workers[0]], 10)


@pytest.mark.parametrize("where", [0, 1], ids=["sender", "receiver"])
def test_the_plugin_of_one_side_goes_in_the_middle(where: int) -> None:
    with peers.cluster(2) as (client, workers):
        assert peers.send(client, peers.array, peers.last, workers) == ARRIVED
        made = client.submit(peers.array, 10**6, workers=workers[:1], pure=False)
        wait(made, timeout=30)
        client.run(peers.hold, "cuMemcpyAsync", workers=[workers[1 - where]])
        use = client.submit(peers.last_on_the_host, made, workers=workers[1:], pure=False)
        peers.when_paused(client, workers[1 - where])
        client.run(remove_plugin, workers=[workers[where]])
        client.run(peers.go_on, workers=[workers[1 - where]])
        assert use.result(timeout=30) == 1.0
        if where == 1:
            receiver = workers[1:]
            assert peers.until(lambda: not client.run(opened, workers=receiver)[workers[1]], 5)


@pytest.mark.parametrize(
    "killed",
    [pytest.param(False, marks=pytest.mark.long, id="retired"), pytest.param(True, id="killed")],
)
def test_a_worker_that_left_is_forgotten_and_staging_memory_goes_back(killed: bool) -> None:
    with peers.cluster(2) as (client, workers):
        here = workers[:1]
        assert peers.send(client, peers.array, peers.last, workers) == ARRIVED
        assert peers.send(client, peers.array, peers.last, workers[::-1]) == ARRIVED
        assert client.run(opened, workers=here)[workers[0]]
        if killed:
            os.kill(client.run(os.getpid)[workers[1]], signal.SIGKILL)
        else:
            client.retire_workers(workers[1:])
        assert peers.until(lambda: not client.run(opened, workers=here)[workers[0]], 30)
        assert peers.until(lambda: not any(client.run(peers.given_back, workers=here).values()), 20)


def reserved(dask_worker: Worker) -> int:
    """The bytes that are reserved on a worker's devices."""
    memory: Any = dask_worker.data.spill  # type: ignore[attr-defined]
    return sum(account.reserved for account in memory.accounts.values())


def test_no_room_stays_reserved_for_a_value_that_is_cancelled_on_its_way() -> None:
    with peers.cluster(2) as (client, workers):
        receiver, address = workers[1:], workers[1]
        assert peers.send(client, peers.array, peers.last, workers) == ARRIVED
        made = client.submit(peers.array, 10**6, workers=workers[:1], pure=False)
        wait(made, timeout=30)
        client.run(peers.hold, "cuMemcpyAsync", workers=receiver)
        use = client.submit(peers.last, made, workers=receiver, pure=False)
        peers.when_paused(client, address)
        assert client.run(reserved, workers=receiver)[address] > 0
        use.cancel()
        made.cancel()
        client.run(peers.go_on, workers=receiver)
        known = lambda dask_worker, key=made.key: key in dask_worker.state.tasks  # noqa: E731
        assert peers.until(lambda: not client.run(known, workers=receiver)[address], 20)
        assert peers.until(lambda: client.run(reserved, workers=receiver)[address] == 0, 10)


class Unreadable:
    """Pickled well, and raises where it is read."""

    def __init__(self, error: type[Exception], beside: Any = None) -> None:
        self.error = error
        self.beside = beside

    def __reduce__(self) -> Any:
        return _raise, (self.error, self.beside)


def _raise(error: type[Exception], beside: Any) -> Any:
    raise error("no such thing here")


@pytest.mark.parametrize("error", [ValueError, EOFError, FileNotFoundError])
@on_cluster(8, 8, 8)
async def test_its_tasks_fail_with_the_reason_and_what_comes_with_it_arrives(
    client: Any, a: Any, b: Any, c: Any, error: type[Exception]
) -> None:
    await client.register_plugin(DevicePlugin())
    good = client.map(lambda n: n, range(10), workers=[a.address], pure=False)
    bad = client.submit(Unreadable, error, workers=[a.address], pure=False)
    await wait([*good, bad])
    started = time.monotonic()
    with_bad = client.submit(lambda *values: len(values), *good, bad, workers=[b.address])
    without = client.submit(lambda *values: sum(values), *good, workers=[b.address])
    assert await without.result(timeout=20) == 45
    on_host = submit_on(client, "none", len, bad, workers=[c.address])
    for use in (with_bad, on_host, client.submit(len, bad, workers=[b.address])):
        with pytest.raises(error, match="no such thing here") as failed:
            await use.result(timeout=20)
        assert "could not be read when it arrived" in str(failed.value.__notes__)
    assert time.monotonic() - started < 10
    use = client.submit(lambda value: value.error, bad, workers=[a.address], pure=False)
    assert await use.result(timeout=20) is error


def test_a_value_on_a_device_that_cannot_be_read() -> None:
    with peers.cluster(2) as (client, workers):
        for error in (ValueError, EOFError, OSError):
            with pytest.raises(error, match="no such thing here"):
                peers.send(client, lambda e=error: [peers.array(10), Unreadable(e)], len, workers)
            assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        assert peers.nothing_staged(client)
        assert "host" not in peers.ways(client)


# -- a worker's end, or its device's


def _total(*values: Any) -> float:
    return float(sum(value.sum().item() for value in values))


# Where the transfer is made long, and in whose process: 0 sends and 1 receives.
_ENDS = [pytest.param(0, id="sender", marks=pytest.mark.long), pytest.param(1, id="receiver")]
_STEPS = [
    pytest.param(0, "cuMemAlloc", id="staging memory is allocated", marks=pytest.mark.long),
    pytest.param(0, "cuMemcpyAsync", id="the value is staged"),
    pytest.param(0, "cuStreamSynchronize", id="it is waited for", marks=pytest.mark.long),
    pytest.param(1, "cuIpcOpenMemHandle", id="it is opened", marks=pytest.mark.long),
    pytest.param(1, "cuMemcpyAsync", id="it is read"),
    pytest.param(1, "cuStreamSynchronize", id="it is waited for there", marks=pytest.mark.long),
]


@pytest.mark.parametrize("hit", _ENDS)
@pytest.mark.parametrize(("where", "function"), _STEPS)
@pytest.mark.parametrize("how", ["is killed", "has a device that fails"])
def test_a_worker_in_the_middle(where: int, function: str, hit: int, how: str) -> None:
    with peers.cluster(3) as (client, workers):
        pids = client.run(os.getpid)
        # Both know each other, and a larger buffer is to come.
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        there = {"allow_other_workers": True, "pure": False}
        made = client.submit(peers.array, 500_000, 2.0, workers=workers[:1], **there)
        wait(made, timeout=30)
        client.run(peers.hold, function, 2.0, workers=[workers[where]])
        use = client.submit(_total, made, workers=workers[1:2], **there)
        peers.when_paused(client, workers[where])
        if how == "is killed":
            os.kill(pids[workers[hit]], signal.SIGKILL)
        else:
            client.run(peers.poison, workers=[workers[hit]], on_error="ignore")
        assert use.result(timeout=60) == 1_000_000.0
        _all_is_well(client, workers[1 - hit], workers[2])


def test_a_device_fails_while_a_value_arrives_through_the_host() -> None:
    """Nobody's fault: the task that needs the value runs on another worker."""
    with peers.configured(ipc=False), peers.cluster(2) as (client, workers):
        there = {"allow_other_workers": True, "pure": False}
        made = client.submit(peers.array, 500_000, 2.0, workers=workers[:1], **there)
        wait(made, timeout=30)
        client.run(peers.fail_for_good, "cuMemAlloc", 700, workers=workers[1:])
        use = client.submit(_total, made, workers=workers[1:], **there)
        assert use.result(timeout=60) == 1_000_000.0
        assert workers[0] in client.run(os.getpid, on_error="ignore")
        assert workers[1] not in client.run(os.getpid, on_error="ignore")


def test_a_device_fails_while_a_value_comes_back_for_a_task_without_a_device() -> None:
    with peers.cluster(2, device_memory_limit="1 MiB") as (client, workers):
        there = {"workers": workers[:1], "allow_other_workers": True, "pure": False}
        made = client.map(peers.array, [500_000] * 2, [1.0, 2.0], **there)
        wait(made, timeout=30)
        here, key = workers[:1], made[0].key
        assert peers.until(lambda: client.run(peers.is_away, key, workers=here)[here[0]], 20)
        client.run(peers.fail_for_good, "cuMemAlloc", 700, workers=workers[:1])
        use = submit_on(client, "none", peers.last_on_the_host, made[0], **there)
        assert use.result(timeout=60) == 1.0
        assert workers[0] not in client.run(os.getpid, on_error="ignore")
        assert workers[1] in client.run(os.getpid, on_error="ignore")


def _all_is_well(client: Client, survivor: str, other: str) -> None:
    """Assert that those who were not to fail are there, send, and hold no staging memory."""
    assert {survivor, other} <= set(client.run(os.getpid, on_error="ignore"))
    assert peers.send(client, peers.array, peers.last, [survivor, other]) == (1.0, True)
    assert peers.send(client, peers.array, peers.last, [other, survivor]) == (1.0, True)
    assert peers.nothing_staged(client)
