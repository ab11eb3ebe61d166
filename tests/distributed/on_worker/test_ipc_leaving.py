"""Values are right and memory goes back where a plugin, a worker or room is gone mid-transfer."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Worker, WorkerPlugin, rpc, wait
from distributed.utils_test import captured_logger, gen_cluster

from dask_devctx import Device, DevicePlugin, SimulatedArray, driver
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.worker.peers.local import Traffic
from tests.distributed import peers


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv(driver.SIMULATED_DEVICES_VARIABLE, "2")
    monkeypatch.setenv("DASK_DEVCTX__LOCK_DIRECTORY", str(tmp_path / "locks"))
    setting = {"devctx.lock-directory": str(tmp_path / "locks")}
    with driver.use(SimulatedMachine(2).backend()), dask.config.set(setting):
        yield


def _of_3_mb() -> SimulatedArray:
    return peers.array(400_000)


def _of_8_mb() -> SimulatedArray:
    return peers.array(1_000_000)


def _last_on_the_host(value: SimulatedArray) -> float:
    return float(value.get()[-1])


def _memory_used() -> int:
    return max(gpu.used_memory for gpu in driver.backend().machine.gpus)


async def _remove_plugin(dask_worker: Worker) -> None:
    await dask_worker.plugin_remove("devctx")


def _until(condition: Callable[[], bool], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _slow_hello(dask_worker: Worker) -> None:
    hello = dask_worker.handlers["devctx_ipc_hello"]

    async def slow(**kwargs: Any) -> Any:
        os.environ["PAUSED"] = "hello"
        await asyncio.sleep(2)
        return await hello(**kwargs)

    dask_worker.handlers["devctx_ipc_hello"] = slow


def test_staging_memory_goes_back_with_the_plugin() -> None:
    with peers.cluster(2) as (client, workers):
        before = client.run(_memory_used, workers=workers[:1])[workers[0]]
        assert peers.send(client, _of_3_mb, peers.last, workers) == (1.0, True)
        client.unregister_worker_plugin("devctx")
        assert _until(
            lambda: client.run(_memory_used, workers=workers[:1])[workers[0]] < before + 2**21, 10
        )


def test_the_plugin_goes_while_a_worker_is_asked_how_it_sends() -> None:
    with peers.cluster(2) as (client, workers):
        made = client.submit(peers.array, workers=workers[:1], pure=False)
        wait(made, timeout=30)
        client.run(_slow_hello, workers=workers[:1])
        use = client.submit(_last_on_the_host, made, workers=workers[1:], pure=False)
        peers.when_paused(client, workers[0])
        client.unregister_worker_plugin("devctx")
        assert use.result(timeout=20) == 1.0


def test_who_has_no_plugin_any_more_is_sent_what_it_can_read() -> None:
    with peers.cluster(2) as (client, workers):
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        client.run(_remove_plugin, workers=workers[1:])
        assert peers.send(client, peers.array, _last_on_the_host, workers) == 1.0


@pytest.mark.parametrize("where", [0, 1], ids=["sender", "receiver"])
@pytest.mark.parametrize("staging", ["64 MiB", "2 MiB"], ids=["at once", "in pieces"])
def test_the_plugin_of_one_side_goes_in_the_middle(where: int, staging: str) -> None:
    with peers.configured(ipc_staging=staging), peers.cluster(2) as (client, workers):
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        made = client.submit(_of_8_mb, workers=workers[:1], pure=False)
        wait(made, timeout=30)
        client.run(peers.pause, "cuMemcpyAsync", 1.0, 2, workers=workers[1:])
        use = client.submit(_last_on_the_host, made, workers=workers[1:], pure=False)
        peers.when_paused(client, workers[1])
        client.run(_remove_plugin, workers=[workers[where]])
        assert use.result(timeout=30) == 1.0


def _opened() -> int:
    calls = peers.faults().calls
    return int(calls["cuIpcOpenMemHandle"] - calls["cuIpcCloseMemHandle"])


def _reserved(dask_worker: Worker) -> tuple[int, int]:
    """The bytes that are reserved on a worker's devices, and how many values they wait for."""
    memory: Any = dask_worker.data.memory  # type: ignore[attr-defined]
    nbytes = sum(ledger.incoming for ledger in memory.books.ledgers.values())
    return nbytes, len(memory.reservations.handed)


def _is_known(key: str, dask_worker: Worker) -> bool:
    return key in dask_worker.state.tasks


def test_no_room_stays_reserved_for_a_value_that_is_cancelled_on_its_way() -> None:
    with peers.cluster(2) as (client, workers):
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        made = client.submit(_of_3_mb, workers=workers[:1], pure=False)
        wait(made, timeout=30)
        client.run(peers.pause, "cuMemcpyAsync", 1.0, 1, workers=workers[1:])
        use = client.submit(peers.last, made, workers=workers[1:], pure=False)
        peers.when_paused(client, workers[1])
        assert client.run(_reserved, workers=workers[1:])[workers[1]][0] > 0
        use.cancel()
        key = made.key
        made.cancel()
        assert _until(lambda: not client.run(_is_known, key, workers=workers[1:])[workers[1]], 20)
        assert _until(lambda: client.run(_reserved, workers=workers[1:])[workers[1]] == (0, 0), 10)


def test_nothing_stays_open_where_the_plugin_goes_in_the_middle() -> None:
    with peers.cluster(2) as (client, workers):
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        made = client.submit(_of_8_mb, workers=workers[:1], pure=False)
        wait(made, timeout=30)
        client.run(peers.pause, "cuMemcpyAsync", 1.0, 1, workers=workers[:1])
        use = client.submit(_last_on_the_host, made, workers=workers[1:], pure=False)
        peers.when_paused(client, workers[0])
        client.run(_remove_plugin, workers=workers[1:])
        assert use.result(timeout=30) == 1.0
        assert _until(lambda: client.run(_opened, workers=workers[1:])[workers[1]] == 0, 5)


def _hello_with_other_contents(dask_worker: Worker) -> None:
    hello = dask_worker.handlers["devctx_ipc_hello"]

    async def other(**kwargs: Any) -> Any:
        return (*(await hello(**kwargs))[:2], b"other")

    dask_worker.handlers["devctx_ipc_hello"] = other


def test_memory_that_is_not_read_does_not_stay_open() -> None:
    with peers.cluster(2) as (client, workers):
        client.run(_hello_with_other_contents, workers=workers[:1])
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        assert peers.ways(client) == {"host": 1}
        assert client.run(_opened, workers=workers[1:])[workers[1]] == 0


def _pid() -> int:
    return os.getpid()


def test_a_sender_that_fails_between_the_pieces_ends_nobody_else() -> None:
    with peers.configured(ipc_staging="2 MiB"), peers.cluster(2) as (client, workers):
        pids = client.run(_pid)
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        made = client.submit(_of_8_mb, workers=workers[:1], allow_other_workers=True, pure=False)
        wait(made, timeout=30)
        client.run(peers.pause, "cuMemcpyAsync", 0.3, 100, workers=workers[1:])
        use = client.submit(
            _last_on_the_host, made, workers=workers[1:], allow_other_workers=True, pure=False
        )
        peers.when_paused(client, workers[1])
        client.run(peers.poison, workers=workers[:1], on_error="ignore")
        assert use.result(timeout=60) == 1.0
        time.sleep(1)
        assert client.run(_pid, workers=workers[1:]) == {workers[1]: pids[workers[1]]}
        # dask's log keeps the error with its frames. The pieces that had arrived are no part of it.
        made.release()
        assert _until(lambda: client.run(_used, workers=workers[1:])[workers[1]] == 0, 10)


def _used(dask_worker: Worker) -> int:
    gc.collect()
    (staging,) = dask_worker.plugins["devctx"].extension.peers.stagings.values()
    return sum(gpu.used_memory for gpu in driver.backend().machine.gpus) - staging.nbytes


async def _given_back(dask_worker: Worker) -> int:
    transfers = dask_worker.plugins["devctx"].extension.peers
    await transfers.give_back()
    return sum(each.nbytes for each in transfers.stagings.values())


def test_staging_memory_goes_back_when_who_had_it_open_is_gone() -> None:
    with peers.cluster(2) as (client, workers):
        pids = client.run(_pid)
        assert peers.send(client, _of_3_mb, peers.last, workers) == (1.0, True)
        os.kill(pids[workers[1]], signal.SIGKILL)
        time.sleep(1)
        assert _until(lambda: client.run(_given_back, workers=workers[:1])[workers[0]] == 0, 20)


_pieces: list[Any] = []


def _take_room(left: int, dask_worker: Worker) -> None:
    """Leave room for so many pieces only."""
    (staging,) = dask_worker.plugins["devctx"].extension.peers.stagings.values()
    while (piece := staging.take(staging.piece)) is not None:
        _pieces.append(piece)
    staging.give([_pieces.pop() for _ in range(left)])


def test_one_piece_of_room_is_enough() -> None:
    with peers.configured(ipc_staging="2 MiB"), peers.cluster(2) as (client, workers):
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        client.run(_take_room, 1, workers=workers[:1])
        started = time.monotonic()
        assert peers.send(client, _of_8_mb, peers.last, workers) == (1.0, True)
        assert time.monotonic() - started < 8
        assert peers.ways(client) == {"ipc": 2}


def _staging_nbytes(dask_worker: Worker) -> int:
    return max(s.nbytes for s in dask_worker.plugins["devctx"].extension.peers.stagings.values())


def test_the_room_may_be_given_in_bytes_as_a_float() -> None:
    with peers.configured(ipc_staging=2.0 * 2**20), peers.cluster(2) as (client, workers):
        assert peers.send(client, _of_8_mb, peers.last, workers) == (1.0, True)
        assert client.run(_staging_nbytes, workers=workers[:1])[workers[0]] == 2 * 2**20


class _AsksAtTheEnd(WorkerPlugin):  # type: ignore[misc]
    """Asks its worker, which closes, as another worker does that does not know of it yet."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    async def teardown(self, worker: Worker) -> None:
        assert worker.plugins.get("devctx") is None
        async with rpc(worker.address) as there:
            self.answers.append(await there.devctx_ipc_close(said=("x", ())))
            self.answers.append(await there.devctx_share(uuids=[], version=1))


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], timeout=30)
async def test_a_worker_that_closes_answers_quietly(
    client: Any, scheduler: Any, worker: Worker
) -> None:
    last = _AsksAtTheEnd()
    await worker.plugin_add(DevicePlugin())
    await worker.plugin_add(last, name="last")
    with captured_logger("distributed.core") as said:
        await worker.close()
    assert last.answers == [None, None]
    assert "No handler" not in said.getvalue()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], timeout=30)
async def test_a_worker_that_closes_ends_its_heartbeat_first(
    client: Any, scheduler: Any, worker: Worker
) -> None:
    asked = asyncio.Event()

    async def slow_metric(worker: Worker) -> int:  # dask asks NVML on a thread
        asked.set()
        await asyncio.sleep(0.5)
        return 1

    await worker.plugin_add(DevicePlugin())
    worker.metrics["slow"] = slow_metric
    await asked.wait()
    with captured_logger("distributed.worker") as said:
        await worker.close()
        await asyncio.sleep(1)
    assert "heartbeat" not in said.getvalue()


def _known(dask_worker: Worker) -> set[str]:
    """All other workers' addresses that a worker keeps for its transfers, but for the report's."""
    pairs = dask_worker.plugins["devctx"].extension.peers._pairs
    return {*pairs.readers, *pairs.reasons, *pairs.memories, *pairs.again, *pairs._asking}


async def _look(dask_worker: Worker) -> None:
    await dask_worker.plugins["devctx"].extension.peers.look()


@pytest.mark.parametrize(
    "killed",
    [pytest.param(False, marks=pytest.mark.long, id="retired"), pytest.param(True, id="killed")],
)
def test_a_worker_that_left_is_forgotten(killed: bool) -> None:
    with peers.cluster(2) as (client, workers):
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        assert peers.send(client, peers.array, peers.last, workers[::-1]) == (1.0, True)
        assert client.run(_known, workers=workers[:1])[workers[0]] == {workers[1]}
        if killed:
            os.kill(client.run(_pid)[workers[1]], signal.SIGKILL)
        else:
            client.retire_workers(workers[1:])

        def is_forgotten() -> bool:
            client.run(_look, workers=workers[:1])
            return not client.run(_known, workers=workers[:1])[workers[0]]

        assert _until(is_forgotten, 20)


def _tell_that_it_left(address: str, dask_worker: Worker) -> None:
    dask_worker.stream_handlers["remove-worker"](worker=address, stimulus_id="test")


def test_a_final_refusal_does_not_stay_for_the_next_worker_at_the_address() -> None:
    with peers.cluster(2) as (client, workers):
        client.run(peers.fail, "cuIpcOpenMemHandle", 801, 1, workers=workers[1:])
        for _ in range(2):
            assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        assert peers.ways(client) == {"host": 2}
        client.run(_tell_that_it_left, workers[0], workers=workers[1:])
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        assert peers.ways(client) == {"host": 2, "ipc": 1}


def test_the_reasons_are_as_many_as_the_rows() -> None:
    traffic = Traffic()
    for n in range(1000):
        traffic.sent_by_dask({"key": {Device(0): 8}}, f"tcp://10.0.0.1:{n}", "why")
    rows = traffic.rows()
    assert {row["reason"] for row in rows} == {"why"}
    assert len(traffic.reasons) == len(rows) < 300
    assert sum(row["copies"] for row in rows) == 1000
