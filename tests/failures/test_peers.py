"""One worker's end, or its device's, in the middle of a transfer costs that worker alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, wait

from dask_devctx import driver
from dask_devctx.driver.simulated import SimulatedMachine
from tests.distributed import peers


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv(driver.SIMULATED_DEVICES_VARIABLE, "3")
    monkeypatch.setenv("DASK_DEVCTX__LOCK_DIRECTORY", str(tmp_path / "locks"))
    setting = {
        "devctx.lock-directory": str(tmp_path / "locks"),
        "distributed.comm.timeouts.connect": "5s",
    }
    with driver.use(SimulatedMachine(3).backend()), dask.config.set(setting):
        yield


def _four_mb(mark: float) -> Any:
    return peers.array(500_000, mark)


def _total(*values: Any) -> float:
    return float(sum(value.sum().item() for value in values))


# Where the transfer is made long, and in whose process: 0 sends and 1 receives.
_ENDS = [
    pytest.param(0, id="sender", marks=pytest.mark.long),
    pytest.param(1, id="receiver"),
]
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
        made = client.submit(_four_mb, 2.0, workers=workers[:1], **there)
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
        made = client.submit(_four_mb, 2.0, workers=workers[:1], **there)
        wait(made, timeout=30)
        client.run(peers.fail_for_good, "cuMemAlloc", 700, workers=workers[1:])
        use = client.submit(_total, made, workers=workers[1:], **there)
        assert use.result(timeout=60) == 1_000_000.0
        assert workers[0] in client.run(os.getpid, on_error="ignore")
        assert workers[1] not in client.run(os.getpid, on_error="ignore")


def test_a_device_fails_while_a_value_comes_back_for_a_task_without_a_device() -> None:
    with peers.cluster(2, device_memory_limit="1 MiB") as (client, workers):
        there = {"workers": workers[:1], "allow_other_workers": True, "pure": False}
        made = client.map(_four_mb, [1.0, 2.0], **there)
        wait(made, timeout=30)
        here, key = workers[:1], made[0].key
        assert peers.until(lambda: client.run(peers.is_away, key, workers=here)[here[0]], 20)
        client.run(peers.fail_for_good, "cuMemAlloc", 700, workers=workers[:1])
        with dask.annotate(device="none"):
            use = client.submit(peers.last_on_the_host, made[0], **there)
        assert use.result(timeout=60) == 1.0
        assert workers[0] not in client.run(os.getpid, on_error="ignore")
        assert workers[1] in client.run(os.getpid, on_error="ignore")


def _all_is_well(client: Client, survivor: str, other: str) -> None:
    """Assert that those who were not to fail are there, send, and hold no staging memory."""
    assert {survivor, other} <= set(client.run(os.getpid, on_error="ignore"))
    assert peers.send(client, peers.array, peers.last, [survivor, other]) == (1.0, True)
    assert peers.send(client, peers.array, peers.last, [other, survivor]) == (1.0, True)
    assert peers.nothing_staged(client)
