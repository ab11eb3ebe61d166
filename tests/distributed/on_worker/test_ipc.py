"""Values on a device go from worker to worker without the host, and arrive as they were."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, Worker, get_worker, wait
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.worker import get_data_from_worker

from dask_devctx import Device, DevicePlugin, SimulatedArray, driver, report
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.transfer.ipc import parcel
from dask_devctx.worker.peers import pairs, send
from tests.distributed import peers

Pair = tuple[Client, list[str]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two workers with a device each, for all tests of this module that leave them well."""
    locks: Path = tmp_path_factory.mktemp("locks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(driver.SIMULATED_DEVICES_VARIABLE, "2")
        patch.setenv("DASK_DEVCTX__LOCK_DIRECTORY", str(locks))
        with (
            driver.use(SimulatedMachine(2).backend()),
            dask.config.set({"devctx.lock-directory": str(locks)}),
            peers.cluster(2) as started,
        ):
            yield started


@dataclasses.dataclass(frozen=True)
class Model:
    weights: Any
    same: Any
    name: str = "m"


def _layouts() -> list[Any]:
    base = SimulatedArray.asarray(np.arange(12.0).reshape(3, 4))
    return [base, base.T, base[::2, 1:], base[:0], base.astype("f2"), base.sum()]


def _values_of(arrays: list[Any]) -> Any:
    return [(a.get().tolist(), str(a.dtype), a.device is Device.current()) for a in arrays]


def _tied() -> Any:
    weights = peers.array(100, 3.0)
    return {"model": Model(weights, weights), "optimizer": [weights], "host": np.arange(5.0)}


def _is_tied(value: Any) -> Any:
    model = value["model"]
    return (
        model.weights is model.same is value["optimizer"][0],
        float(model.weights.sum().item()),
        value["host"].tolist(),
        value["host"].flags.writeable,
        model.name,
    )


def test_arrays_of_every_layout_arrive_on_the_tasks_device(pair: Pair) -> None:
    before = peers.ways(pair[0]).get("ipc", 0)
    expected = [
        (values, dtype, True)
        for values, dtype in [
            ([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]], "float64"),
            ([[0.0, 4.0, 8.0], [1.0, 5.0, 9.0], [2.0, 6.0, 10.0], [3.0, 7.0, 11.0]], "float64"),
            ([[1.0, 2.0, 3.0], [9.0, 10.0, 11.0]], "float64"),
            ([], "float64"),
            ([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]], "float16"),
            (66.0, "float64"),
        ]
    ]
    assert peers.send(pair[0], _layouts, _values_of, pair[1]) == expected
    assert peers.ways(pair[0])["ipc"] == before + 1


def test_what_a_value_shares_it_shares_afterwards(pair: Pair) -> None:
    found = peers.send(pair[0], _tied, _is_tied, pair[1])
    assert found == (True, 300.0, [0.0, 1.0, 2.0, 3.0, 4.0], True, "m")


def test_host_data_goes_as_dask_sends_it(pair: Pair) -> None:
    before = peers.ways(pair[0])
    assert peers.send(pair[0], lambda: [1, "x", np.arange(3)], len, pair[1]) == 3
    assert peers.ways(pair[0]) == before


def test_values_for_the_client_go_as_dask_sends_them(pair: Pair) -> None:
    before = peers.ways(pair[0])
    there = pair[0].submit(peers.array, 5, 2.0, workers=pair[1][:1]).result(timeout=30)
    assert there.get().tolist() == [2.0] * 5
    assert peers.ways(pair[0]) == before


def test_replicas_go_without_the_host(pair: Pair) -> None:
    client, workers = pair
    before = peers.ways(client).get("ipc", 0)
    made = client.submit(peers.array, 1000, 7.0, workers=workers[:1], pure=False)
    wait(made, timeout=30)
    client.replicate(made, n=2)
    assert peers.ways(client)["ipc"] == before + 1
    assert client.submit(peers.last, made, workers=workers[1:]).result(timeout=30) == (7.0, True)


def test_many_keys_of_one_message(pair: Pair) -> None:
    client, workers = pair
    made = client.map(peers.array, range(1, 41), range(1, 41), workers=workers[:1], pure=False)
    wait(made, timeout=30)
    use = client.submit(
        lambda *arrays: [int(a.sum().item()) for a in arrays], *made, workers=workers[1:]
    )
    assert use.result(timeout=30) == [n * n for n in range(1, 41)]


def test_a_report_has_a_row_for_each_pair_and_way(pair: Pair) -> None:
    assert peers.send(pair[0], peers.array, peers.last, pair[1]) == (1.0, True)
    seen = report(pair[0])
    rows = seen.transfers
    by_worker = {device.worker: device.uuid for device in seen.devices}
    uuids = [by_worker[worker] for worker in pair[1]]
    found = [row for row in rows if [row.source, row.destination, row.way] == [*uuids, "ipc"]]
    assert len(found) == 1
    assert found[0].worker == pair[1][1]
    assert found[0].copies > 0
    assert found[0].nbytes >= 8000
    assert "ipc" in str(report(pair[0]))


class Frame:
    """A third party's type: memory that it took from the driver itself."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.device = Device.current()
        self.pointer = driver.backend().calls.work.allocate(nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.pointer, False), "shape": (self.nbytes,), "typestr": "|u1"}


class Table:
    """A third party's type that others know by distributed's registries alone."""

    def __init__(self, frame: Any, names: list[str]) -> None:
        self.frame = frame
        self.names = names


def _serialize(table: Table) -> Any:
    return {"names": table.names}, [table.frame]


def _deserialize(header: Any, frames: list[Any]) -> Table:
    return Table(frames[0], header["names"])


def register_table() -> None:
    from dask_devctx.transfer.ipc import frames

    cuda_serialize.register(Table, _serialize)
    cuda_deserialize.register(Table, _deserialize)
    frames.allocators["numba"] = _allocate  # of a type that takes any memory


def _allocate(nbytes: int, detail: Any, device: Device) -> Any:
    frame = Frame(nbytes)
    return frame, frame.pointer


def _table() -> Table:
    frame = Frame(6)
    driver.backend().calls.work.copy_from_host(frame.pointer, b"abcdef")
    return Table(frame, ["x", "y"])


def _told(table: Table) -> Any:
    frame = table.frame
    content = driver.backend().calls.work.copy_to_host(frame.pointer, frame.nbytes)
    return table.names, content, frame.device is Device.current()


def test_a_type_of_somebody_goes_by_the_frames_that_distributed_knows(pair: Pair) -> None:
    client, workers = pair
    client.run(register_table)
    before = peers.ways(client).get("ipc", 0)
    assert peers.send(client, _table, _told, workers) == (["x", "y"], b"abcdef", True)
    assert peers.ways(client)["ipc"] == before + 1


_packed_by: list[bool] = []  # whether it was the event loop


def _note_packing() -> None:
    def noting(*args: Any) -> Any:
        _packed_by.append(threading.current_thread() is threading.main_thread())
        return parcel.pack(*args)

    send.pack = noting


def _packing() -> list[bool]:
    send.pack = parcel.pack
    found = list(_packed_by)
    _packed_by.clear()
    return found


@pytest.mark.parametrize(
    ("value", "by_loop"),
    [
        (lambda: peers.array(), True),
        (lambda: {"total": peers.array(), "n": 7, "mean": np.float32(0.5)}, True),
        (lambda: (peers.array(), None, np.arange(4)), True),
        (lambda: {"total": peers.array(), "ok": True, 3: 1j}, True),
        (lambda: {"total": peers.array(), "history": "x"}, False),
        (lambda: {"total": peers.array(), ("a", "key"): 1}, False),
        (lambda: {"total": peers.array(), "kind": np.dtype("f4")}, False),
        (lambda: [peers.array(), np.array([None])], False),
        (lambda: [peers.array(), np.zeros(2**16), np.zeros(2**17)], False),
        (lambda: [peers.array(), *range(16)], False),
        (lambda: [[peers.array()]], False),
    ],
    ids=[
        *("array", "dict", "tuple", "bool", "text", "other key", "not a number", "objects"),
        *("large host arrays", "many", "nested"),
    ],
)
def test_what_is_packed_in_microseconds_changes_no_thread(
    pair: Pair, value: Any, by_loop: bool
) -> None:
    """A change of threads takes a transfer longer than the rest where others compute in Python."""
    client, workers = pair
    assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
    client.run(_note_packing, workers=workers[:1])
    peers.send(client, value, type, workers)
    assert client.run(_packing, workers=workers[:1])[workers[0]] == [by_loop]


def test_many_small_values_in_one_answer_are_packed_on_a_thread(pair: Pair) -> None:
    client, workers = pair
    assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
    made = client.map(_partial_result, range(20), workers=workers[:1], pure=False)
    wait(made, timeout=30)
    client.run(_note_packing, workers=workers[:1])
    use = client.submit(_count, made, workers=workers[1:], pure=False)
    assert use.result(timeout=30) == 20
    packing = client.run(_packing, workers=workers[:1])[workers[0]]
    assert len(packing) == 20
    assert packing.count(False) > 10, "dask asks for many values at once"


def _partial_result(n: int) -> dict[str, Any]:
    return {"total": peers.array(8), "n": n}


def _count(values: list[dict[str, Any]]) -> int:
    return sum(one["total"].device is Device.current() for one in values)


def test_the_event_loop_runs_on_while_a_copy_is_waited_for(pair: Pair) -> None:
    client, workers = pair
    for function in ("cuMemcpyAsync", "cuStreamSynchronize"):
        for worker in workers:
            client.run(peers.watch_event_loop, workers=[worker])
            client.run(peers.pause, function, 0.5, workers=[worker])
            started = time.monotonic()
            assert peers.send(client, _of_3_mb, peers.last, workers) == (1.0, True)
            assert time.monotonic() - started > 0.5
            assert client.run(peers.longest_gap, workers=[worker])[worker] < 0.3
    client.run(_forget_faults)


@pytest.mark.parametrize(
    "where",
    [pytest.param(0, marks=pytest.mark.long, id="a new one"), pytest.param(1, id="opens one")],
)
def test_small_values_go_on_while_a_buffer_is_waited_for(where: int) -> None:
    with peers.cluster(2) as (client, workers):
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        large = client.submit(_of_3_mb, workers=workers[:1], pure=False)
        small = client.map(peers.array, [1000] * 5, workers=workers[:1], pure=False)
        wait([large, *small], timeout=30)
        slow = ["cuMemAlloc", "cuIpcOpenMemHandle"][where]
        client.run(peers.watch_event_loop, workers=[workers[where]])
        client.run(peers.pause, slow, 1.0, 1, 2**22 * (1 - where), workers=[workers[where]])
        used = [client.submit(peers.last, large, workers=workers[1:], pure=False)]
        peers.when_paused(client, workers[where])
        for one in small:
            (name,) = client.run(_replicated, one.key, workers[0], workers=workers[1:]).values()
            assert name == "SimulatedArray"
        assert client.gather(used) == [(1.0, True)]
        assert client.run(peers.longest_gap, workers=[workers[where]])[workers[where]] < 0.5


def _no_memory_for(nbytes: int) -> None:
    """Let two allocations of so many bytes fail, and values leave the device slowly."""
    from cuda.bindings.driver import CUresult

    peers.pause("cuMemcpyDtoHAsync", 1.0)
    faults, status = peers.faults(), CUresult.CUDA_ERROR_OUT_OF_MEMORY
    faults.inject("cuMemAlloc", status, times=2, when=lambda *args: nbytes in args)


def test_the_event_loop_runs_on_while_values_make_room_for_a_small_one() -> None:
    with peers.cluster(2) as (client, workers):
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        there = client.submit(peers.array, 5000, workers=workers[1:], pure=False)
        made = client.submit(peers.array, 3000, workers=workers[:1], pure=False)
        wait([there, made], timeout=30)
        client.run(_no_memory_for, 24_000, workers=workers[1:])
        client.run(peers.watch_event_loop, workers=workers[1:])
        use = client.submit(peers.last, made, workers=workers[1:], pure=False)
        assert use.result(timeout=30) == (1.0, True)
        assert client.run(peers.paused, workers=workers[1:])[workers[1]] == "cuMemcpyDtoHAsync"
        assert client.run(peers.longest_gap, workers=workers[1:])[workers[1]] < 0.5


async def _replicated(key: str, source: str, dask_worker: Worker) -> str:
    """Let a worker ask another one for a value; the name of its type."""
    answer = await get_data_from_worker(
        dask_worker.rpc, keys=[key], worker=source, who=dask_worker.address
    )
    return type(answer["data"][key]).__name__


def _of_3_mb() -> SimulatedArray:
    return peers.array(400_000)


def _forget_faults() -> None:
    peers.faults()._planned.clear()


def test_several_transfers_at_once(pair: Pair) -> None:
    client, workers = pair
    made = [
        client.submit(peers.array, 300_000, float(n), workers=workers[:1], pure=False)
        for n in range(4)
    ]
    wait(made, timeout=30)
    client.run(peers.pause, "cuStreamSynchronize", 1.0, 8, workers=workers[1:])
    started = time.monotonic()
    used = [client.submit(peers.last, one, workers=workers[1:], pure=False) for one in made]
    assert client.gather(used) == [(float(n), True) for n in range(4)]
    took = time.monotonic() - started
    client.run(_forget_faults)
    assert took < 3.5


def test_the_plugin_may_go_and_come_back(pair: Pair) -> None:
    client, workers = pair
    client.unregister_worker_plugin("devctx")
    try:
        assert client.run(_handlers) == {worker: [] for worker in workers}
        found = peers.send(client, _host_side, _host_told, workers)
        assert found == [1.0, 2.0]
    finally:
        client.register_plugin(DevicePlugin(devices_per_worker=1))
    again = sorted(workers, key=client.run(peers.first_device).__getitem__)
    assert peers.send(client, peers.array, peers.last, again) == (1.0, True)
    assert client.run(peers.transfers)[again[1]] == {"ipc": 1}


def _handlers(dask_worker: Worker) -> list[str]:
    return [op for op in dask_worker.handlers if op.startswith("devctx_ipc")]


def _host_side() -> Any:
    return SimulatedArray.asarray([1.0, 2.0])


def _host_told(value: Any) -> Any:
    return value.get().tolist()


# -- clusters of their own


def test_what_is_larger_than_the_staging_memory_passes_in_pieces() -> None:
    with peers.configured(ipc_staging="2 MiB"), peers.cluster(2) as (client, workers):
        assert peers.send(client, _large, _checked, workers, 60) == (True, True)
        assert peers.ways(client) == {"ipc": 1}
        many = [client.submit(_large, workers=workers[:1], pure=False) for _ in range(4)]
        used = [client.submit(_checked, one, workers=workers[1:], pure=False) for one in many]
        assert client.gather(used) == [(True, True)] * 4  # they wait for each other's pieces
        assert peers.nothing_staged(client)
        held = client.run(_memory_used)
        assert max(held.values()) < 80 * 2**20


def test_staging_memory_is_a_part_of_the_limit_and_is_reported() -> None:
    with peers.cluster(2, device_memory_limit="60 MB") as (client, workers):
        assert peers.send(client, _large, _checked, workers, 60) == (True, True)
        found = {device.worker: device.memory_staging for device in report(client).devices}
        assert 0 < found[workers[0]] <= 60e6 / 4


def _large() -> Any:
    values = np.arange(1_000_000.0)
    return [SimulatedArray.asarray(values), SimulatedArray.asarray(values[::-1].copy())]


def _checked(arrays: Any) -> Any:
    expected = np.arange(1_000_000.0)
    return (
        bool((arrays[0].get() == expected).all()),
        bool((arrays[1].get() == expected[::-1]).all()),
    )


def _memory_used() -> int:
    return max(gpu.used_memory for gpu in driver.backend().machine.gpus)


@pytest.mark.parametrize(
    ("where", "function", "reason"),
    [
        (0, "cuIpcGetMemHandle", "its device cannot show its memory"),
        (1, "cuIpcOpenMemHandle", "its memory cannot be opened"),
    ],
)
def test_where_the_driver_refuses_values_go_as_dask_sends_them(
    where: int, function: str, reason: str
) -> None:
    with peers.cluster(2) as (client, workers):
        client.run(peers.fail, function, 801, 10**6, workers=[workers[where]])
        client.run(peers.keep_log)
        for _ in range(3):
            assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        assert peers.ways(client) == {"host": 3}
        for log in client.run(peers.kept_log).values():
            assert len([line for line in log if reason in line]) <= 1  # said once
        (row,) = report(client).transfers
        assert (row.way, row.destination, row.copies) == ("host", workers[1], 3)
        assert reason in row.reason


def test_memory_that_can_be_opened_no_more_is_asked_for_no_more() -> None:
    with peers.cluster(2) as (client, workers):
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        client.run(peers.fail, "cuIpcOpenMemHandle", 205, 10**6, workers=workers[1:])
        assert peers.send(client, _of_3_mb, peers.last, workers) == (1.0, True)
        assert peers.send(client, _of_3_mb, peers.last, workers) == (1.0, True)
        assert peers.ways(client) == {"ipc": 1, "host": 2}
        failed = client.run(lambda: peers.faults().calls["cuIpcOpenMemHandle"])[workers[1]]
        assert failed == 2  # once well, and once not


def _impatient(timeout_s: float) -> None:
    pairs._TIMEOUT_S, pairs._AGAIN_S = timeout_s, 0.2  # type: ignore[misc]


@pytest.mark.parametrize("reason", ["does not answer", "cannot show", "cannot be opened"])
def test_a_worker_that_refused_for_a_passing_reason_is_asked_again(reason: str) -> None:
    with peers.cluster(2) as (client, workers):
        client.run(_impatient, 0.5 if reason == "does not answer" else 10.0)
        if reason == "does not answer":  # it gave up waiting for the answer
            client.run(peers.pause, "cuIpcGetMemHandle", 1.0, workers=workers[:1])
        elif reason == "cannot show":
            client.run(peers.fail, "cuIpcGetMemHandle", 2, 1, workers=workers[:1])
        else:
            client.run(peers.fail, "cuIpcOpenMemHandle", 2, 1, workers=workers[1:])
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        assert peers.ways(client) == {"host": 1}
        (row,) = report(client).transfers
        assert reason in row.reason
        until = time.monotonic() + 20
        while "ipc" not in peers.ways(client):
            assert time.monotonic() < until
            assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        before = peers.ways(client)
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        assert peers.ways(client) == {**before, "ipc": before["ipc"] + 1}


def test_it_can_be_switched_off() -> None:
    with peers.configured(ipc=False), peers.cluster(2) as (client, workers):
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        assert client.run(_handlers) == {worker: [] for worker in workers}
        (row,) = report(client).transfers
        assert (row.way, row.destination, row.nbytes) == ("host", workers[1], 8000)
        assert row.reason == "the option ipc is False"
        assert "moved by host" in str(report(client))


def test_a_worker_of_several_devices_receives_on_the_devices_it_has() -> None:
    with peers.cluster(2, devices_per_worker=2) as (client, workers):
        with dask.annotate(device=1):
            made = client.submit(peers.array, 1000, 5.0, workers=workers[:1], pure=False)
        wait(made, timeout=30)
        with dask.annotate(device=3):
            use = client.submit(peers.last, made, workers=workers[1:], pure=False)
        assert use.result(timeout=30) == (5.0, True)
        assert peers.ways(client) == {"ipc": 1}


def test_without_room_on_the_receiver_the_task_fails_with_that() -> None:
    with peers.cluster(2) as (client, workers):
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        made = client.submit(peers.array, 2_000_000, workers=workers[:1], pure=False)
        wait(made, timeout=30)
        client.run(_fill, workers=workers[1:])
        use = client.submit(peers.last, made, workers=workers[1:], pure=False)
        with pytest.raises(MemoryError):
            use.result(timeout=30)
        client.run(_empty, workers=workers[1:])
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)


_held: list[int] = []


def _fill(dask_worker: Worker) -> None:
    (device,) = dask_worker.plugins["devctx"].worker_devices
    with device:
        free = device.memory_info.free
        _held.append(driver.backend().calls.work.allocate(free - 4 * 2**20))


def _empty(dask_worker: Worker) -> None:
    (device,) = dask_worker.plugins["devctx"].worker_devices
    with device:
        driver.backend().calls.work.free(_held.pop())


def test_staging_memory_goes_back_when_no_other_worker_has_it_open() -> None:
    with peers.cluster(2) as (client, workers):
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        assert client.run(_given_back, workers=workers[:1])[workers[0]] == (True, 0)
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)


@pytest.mark.parametrize(
    ("limit", "most"), [("1 GiB", 2**28), ("8 GiB", int(0.04 * 16 * 2**30)), (0, int(0.64 * 2**30))]
)
def test_staging_memory_is_at_most_a_quarter_of_a_low_limit(limit: Any, most: int) -> None:
    with peers.cluster(2, device_memory_limit=limit) as (client, _):
        assert set(client.run(_most_staging).values()) == {most}


def _most_staging(dask_worker: Worker) -> int:
    (staging,) = dask_worker.plugins["devctx"].extension.peers.stagings.values()
    return int(staging.limit)


def test_staging_memory_makes_room_for_a_task() -> None:
    with peers.cluster(2) as (client, workers):
        assert peers.send(client, _of_3_mb, peers.last, workers) == (1.0, True)
        client.run(_fill, workers=workers[:1])
        assert client.submit(_of_5_mb, workers=workers[:1]).result(timeout=30).nbytes == 5_000_000
        client.run(_empty, workers=workers[:1])
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)


def _of_5_mb() -> SimulatedArray:
    return peers.array(625_000)


async def _given_back(dask_worker: Worker) -> Any:
    transfers = dask_worker.plugins["devctx"].extension.peers
    before = sum(each.nbytes for each in transfers.stagings.values())
    await transfers.give_back()
    return before > 0, sum(each.nbytes for each in transfers.stagings.values())


def test_the_work_that_makes_a_value_is_waited_for() -> None:
    with peers.cluster(2) as (client, workers):
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        made = client.submit(peers.array, 10, 4.0, workers=workers[:1], pure=False)
        wait(made, timeout=30)
        waits = client.run(_waits, workers=workers[:1])[workers[0]]
        # It still runs, for whoever asks first.
        client.run(peers.fail, "cuEventQuery", 600, 6, workers=workers[:1])
        use = client.submit(peers.last, made, workers=workers[1:], pure=False)
        assert use.result(timeout=30) == (4.0, True)
        assert client.run(_waits, workers=workers[:1])[workers[0]] > waits


def _waits() -> int:
    return int(peers.faults().calls["cuStreamWaitEvent"])


def _asks_for() -> Any:
    return get_worker().state.transfer_message_bytes_limit


def test_workers_that_read_by_ipc_ask_for_more_at_once(pair: Pair) -> None:
    assert pair[0].submit(_asks_for, pure=False).result() > 100_000_000
