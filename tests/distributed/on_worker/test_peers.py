"""Values on a device go from worker to worker without the host, and arrive as they were."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, Worker, get_worker, wait
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize

from dask_devctx import Device, DevicePlugin, SimulatedArray, driver, report
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.errors import DeviceOutOfMemoryError
from dask_devctx.transfer import pieces
from dask_devctx.transfer.ipc.receiving import Receiving
from dask_devctx.transfer.ipc.sending import Sending
from dask_devctx.transfer.libraries import MODULES, Library
from dask_devctx.worker.peers import transfers, transport
from tests.device_memory import read, write
from tests.distributed import peers

Pair = tuple[Client, list[str]]
ARRIVED = (1.0, True)


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


LAYOUTS = np.arange(12.0).reshape(3, 4)


def views(base: Any) -> list[Any]:
    return [base, base.T, base[::2, 1:], base[:0], base.astype("f2"), base.sum()]


def seen_views(arrays: list[Any]) -> Any:
    here = Device.current()
    return [(a.get().tolist(), str(a.dtype)) for a in arrays], {a.device is here for a in arrays}


def tied() -> Any:
    weights = peers.array(100, 3.0)
    return {"model": Model(weights, weights), "optimizer": [weights], "host": np.arange(5.0)}


def is_tied(value: Any) -> Any:
    model = value["model"]
    is_one, host = model.weights is model.same is value["optimizer"][0], value["host"]
    total = float(model.weights.sum().item())
    return is_one, total, host.tolist(), host.flags.writeable, model.name


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


LIBRARY = Library(Frame, attrgetter("pointer"), lambda shape, dtype, device: Frame(shape[0]))


def register_table() -> None:
    cuda_serialize.register(Table, lambda table: ({"names": table.names}, [table.frame]))
    cuda_deserialize.register(Table, lambda header, frames: Table(frames[0], header["names"]))
    MODULES["numba"] = __name__  # of a type that takes any memory


def table() -> Table:
    frame = Frame(6)
    write(driver.backend().calls.work, frame.pointer, b"abcdef")
    return Table(frame, ["x", "y"])


def seen_table(table: Table) -> Any:
    frame = table.frame
    content = read(driver.backend().calls.work, frame.pointer, frame.nbytes)
    return table.names, content, frame.device is Device.current()


def host_data() -> Any:
    return [1, "x", np.arange(3)]


# Functions that make a value and that look at it, and what the second one returns.
KINDS = [
    (
        lambda: views(SimulatedArray.asarray(LAYOUTS)),
        seen_views,
        ([(np.asarray(a).tolist(), str(a.dtype)) for a in views(LAYOUTS)], {True}),
    ),
    (tied, is_tied, (True, 300.0, [0.0, 1.0, 2.0, 3.0, 4.0], True, "m")),
    (table, seen_table, (["x", "y"], b"abcdef", True)),
    (host_data, len, 3),
]


@pytest.mark.parametrize(
    ("value", "seen", "expected"),
    KINDS,
    ids=["layouts", "shared memory", "frames of a third party", "host data"],
)
def test_a_value_arrives_as_it_was(pair: Pair, value: Any, seen: Any, expected: Any) -> None:
    client, workers = pair
    client.run(register_table)
    before = peers.ways(client)
    assert peers.send(client, value, seen, workers) == expected
    after = peers.ways(client)
    assert after.get("ipc", 0) == before.get("ipc", 0) + (value is not host_data)
    assert after.get("host", 0) == before.get("host", 0)


def count(values: Any) -> int:
    return sum(int(one.sum().item()) for one in values if one.device is Device.current())


def test_replicas_and_many_values_of_one_message(pair: Pair) -> None:
    client, workers = pair
    before = peers.ways(client).get("ipc", 0)
    made = client.submit(peers.array, 1000, 7.0, workers=workers[:1], pure=False)
    wait(made, timeout=30)
    client.replicate(made, n=2)
    assert peers.ways(client)["ipc"] == before + 1
    assert client.submit(peers.last, made, workers=workers[1:]).result(timeout=30) == (7.0, True)
    many = client.map(peers.array, range(1, 41), range(1, 41), workers=workers[:1], pure=False)
    wait(many, timeout=30)
    used = client.submit(count, many, workers=workers[1:], pure=False)
    assert used.result(timeout=30) == sum(n * n for n in range(1, 41))
    limit = client.submit(lambda: get_worker().state.transfer_message_bytes_limit, pure=False)
    assert limit.result() > 100_000_000, "dask asks for 50 MB at a time"


def test_a_report_has_a_row_for_each_pair_and_transport(pair: Pair) -> None:
    client, workers = pair
    before = peers.ways(client)
    there = client.submit(peers.array, 5, 2.0, workers=workers[:1]).result(timeout=30)
    assert there.get().tolist() == [2.0] * 5
    assert peers.ways(client) == before, "values for the client go as dask sends them"
    assert peers.send(client, peers.array, peers.last, workers) == ARRIVED
    seen = report(client)
    uuids = {device.worker: device.uuid for device in seen.devices}
    ends = [uuids[worker] for worker in workers]
    (row,) = [
        row
        for row in seen.transfers
        if [row.source, row.destination] == ends and row.transport == "ipc"
    ]
    assert (row.worker, row.copies > 0, row.nbytes >= 8000) == (workers[1], True, True)
    assert "ipc" in str(seen)


# -- calls of the driver that wait


def of_3_mb() -> SimulatedArray:
    return peers.array(400_000)


@pytest.mark.parametrize("function", ["cuMemcpyAsync", "cuStreamSynchronize"])
@pytest.mark.parametrize("where", [0, 1], ids=["sender", "receiver"])
def test_the_event_loop_runs_on_while_a_copy_is_waited_for(
    pair: Pair, where: int, function: str
) -> None:
    client, workers = pair
    client.run(peers.hold, function, workers=[workers[where]])
    made = client.submit(of_3_mb, workers=workers[:1], pure=False)
    used = client.submit(peers.last, made, workers=workers[1:], pure=False)
    peers.when_paused(client, workers[where])
    assert client.run(peers.go_on, workers=[workers[where]])[workers[where]]
    assert used.result(timeout=30) == ARRIVED


def waits() -> int:
    return int(peers.faults().calls["cuStreamWaitEvent"])


def test_the_work_that_makes_a_value_is_waited_for(pair: Pair) -> None:
    client, workers = pair
    assert peers.send(client, peers.array, peers.last, workers) == ARRIVED
    made = client.submit(peers.array, 10, 4.0, workers=workers[:1], pure=False)
    wait(made, timeout=30)
    before = client.run(waits, workers=workers[:1])[workers[0]]
    # It still runs, for whoever asks first.
    client.run(peers.fail, "cuEventQuery", 600, 6, workers=workers[:1])
    used = client.submit(peers.last, made, workers=workers[1:], pure=False)
    assert used.result(timeout=30) == (4.0, True)
    assert client.run(waits, workers=workers[:1])[workers[0]] > before


# -- pairs that cannot, or not now


def handlers(dask_worker: Worker) -> list[str]:
    return [op for op in dask_worker.handlers if op.startswith("devctx_ipc")]


def hold_back(seconds: float, dask_worker: Any) -> None:
    """Let a worker or a scheduler hold messages back for so long after the one before."""
    own = [dask_worker.batched_stream] if isinstance(dask_worker, Worker) else []
    for stream in [*own, *dask_worker.stream_comms.values()]:
        stream.interval, stream.next_deadline = seconds, None
        stream.waker.set()


def test_a_workers_last_tasks_are_told_at_once_and_so_are_their_ends(pair: Pair) -> None:
    client, (first, second) = pair
    x = client.submit(SimulatedArray, (2,), workers=[first])
    wait(x)
    for run in (client.run, client.run_on_scheduler):
        run(hold_back, 60.0)
    try:  # the message before an end tells that the input has arrived
        for _ in range(2):
            wait(client.submit(read, x, workers=[second], pure=False), timeout=20)
        wait(client.map(read, [x] * 6, workers=[second], pure=False), timeout=20)  # end together
        many = client.map(str, range(80), pure=False)  # the scheduler sends some when others end
        assert peers.until(lambda: sum(one.done() for one in many) > 40, 20)
    finally:
        for run in (client.run, client.run_on_scheduler):
            run(hold_back, 0.002)


def test_the_plugin_may_go_and_come_back(pair: Pair) -> None:
    client, workers = pair
    client.unregister_worker_plugin("devctx")
    try:
        assert client.run(handlers) == {worker: [] for worker in workers}
        assert peers.send(client, peers.array, peers.last_on_the_host, workers) == 1.0
    finally:
        client.register_plugin(DevicePlugin(devices_per_worker=1))
    again = sorted(workers, key=client.run(peers.first_device).__getitem__)
    assert peers.send(client, peers.array, peers.last, again) == ARRIVED
    assert client.run(peers.transfers)[again[1]] == {"ipc": 1}


@pytest.mark.parametrize("value", [peers.array, of_3_mb], ids=["small", "large"])
def test_a_copy_that_fails_sends_a_value_through_the_host_once(pair: Pair, value: Any) -> None:
    client, workers = pair
    assert peers.send(client, value, peers.last, workers) == ARRIVED
    before = peers.ways(client)
    client.run(peers.fail, "cuMemcpyAsync", 1, workers=workers[:1])
    for _ in range(2):
        assert peers.send(client, value, peers.last, workers) == ARRIVED
    after = {"host": before.get("host", 0) + 1, "ipc": before["ipc"] + 1}
    assert peers.ways(client) == {**before, **after}
    assert peers.nothing_staged(client)


@pytest.mark.parametrize("lasts", [True, False])
@pytest.mark.parametrize(
    ("where", "function", "reason"),
    [
        (0, "cuIpcGetMemHandle", "its device cannot show its memory"),
        (1, "cuIpcOpenMemHandle", "its memory cannot be read"),
    ],
)
def test_where_the_driver_refuses_values_go_as_dask_sends_them(
    where: int, function: str, reason: str, lasts: bool
) -> None:
    """A worker that refused for a passing reason is asked again."""
    reason = transport.FULL if where == 1 and not lasts else reason
    with peers.cluster(2) as (client, workers):
        client.run(setattr, transport, "_AGAIN_S", 0.2)
        status, times = (801, 10**6) if lasts else (2, 1)  # not supported, or out of memory
        client.run(peers.fail, function, status, times, workers=[workers[where]])
        client.run(peers.keep_log)
        sent = 3 if lasts else 1
        for _ in range(sent):
            assert peers.send(client, peers.array, peers.last, workers) == ARRIVED
        assert peers.ways(client) == {"host": sent}
        for log in client.run(peers.kept_log).values():
            assert len([line for line in log if reason in line]) <= 1  # said once
        (row,) = report(client).transfers
        assert (row.transport, row.destination, row.copies) == ("host", workers[1], sent)
        assert reason in row.reason

        def by_ipc() -> bool:
            assert peers.send(client, peers.array, peers.last, workers) == ARRIVED
            return "ipc" in peers.ways(client)

        assert lasts or peers.until(by_ipc, 20)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda said: re.sub(r"^ipc:\d+", "ipc:999", said), "another version of dask-devctx"),
        (lambda said: re.sub(" .* ", " elsewhere ", said), "on another machine"),
        (lambda said: said, "in the same process"),
        (lambda said: "", "does not say that it can read them"),
        (lambda said: "out of memory", "out of memory"),
    ],
)
def test_who_cannot_read_memory_gets_values_through_the_host(
    change: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "distributed.worker.dask_devctx")
    one, off = transport.Transport(True, "host"), transport.Transport(False, "host")
    said = one.says("tcp://there")
    other = re.sub(r"\S+$", "another-process", said)
    assert one.why_not(other) == ""
    assert why in one.why_not(change(said if why == "in the same process" else other))
    assert (off.says("tcp://there"), off.why_not(other)) == ("", "the option ipc is False")
    assert ("protocol='ucxx'" in caplog.text) is (why == "on another machine")


def test_it_can_be_switched_off() -> None:
    with peers.configured(ipc=False), peers.cluster(2) as (client, workers):
        assert peers.send(client, peers.array, peers.last, workers) == ARRIVED
        assert client.run(handlers) == {worker: [] for worker in workers}
        (row,) = report(client).transfers
        assert (row.transport, row.destination, row.nbytes) == ("host", workers[1], 8000)
        assert row.reason == "the option ipc is False"
        assert "moved by host" in str(report(client))
        client.run(register_table)
        for value, seen, expected in KINDS:
            assert peers.send(client, value, seen, workers) == expected, "as by IPC"
        assert is_tied(client.submit(tied).result(timeout=30)) == KINDS[1][2], "at the client, too"
        before = peers.ways(client)
        assert peers.send(client, SimulatedArray((0,)).copy, len, workers) == 0
        assert peers.ways(client) == before, "no bytes of a device moved"


# -- staging memory


def large() -> Any:
    values = np.arange(1_000_000.0)
    return [SimulatedArray.asarray(values), SimulatedArray.asarray(values[::-1].copy())]


def is_right(arrays: Any) -> bool:
    found, back = (array.get() for array in arrays)
    return bool((found == np.arange(1_000_000.0)).all() and (found == back[::-1]).all())


def test_unused_staging_memory_makes_room_for_a_larger_value() -> None:
    with peers.configured(ipc_staging=2.0**23), peers.cluster(2) as (client, workers):
        for n in (200_000, 900_000):  # their blocks do not fit beside each other
            assert peers.send(client, partial(peers.array, n), peers.last, workers) == ARRIVED
        assert set(peers.ways(client)) == {"ipc"}


def test_what_is_larger_than_the_staging_memory_passes_alone(monkeypatch: Any) -> None:
    limit = 2.0 * 2**20  # bytes may be a float
    monkeypatch.setattr(pieces, "PIECE", 3_000_001)
    with peers.configured(ipc_staging=limit), peers.cluster(2) as (client, workers):
        many = [client.submit(large, workers=workers[:1], pure=False) for _ in range(3)]
        used = [client.submit(is_right, one, workers=workers[1:], pure=False) for one in many]
        assert client.gather(used) == [True] * 3  # they wait for each other
        assert peers.nothing_staged(client)
        assert set(peers.ways(client)) == {"ipc"}
        nbytes = client.run(peers.staging_nbytes, workers=workers[:1])[workers[0]]
        assert limit < nbytes <= limit + 3 * 16 * 10**6
        client.run(setattr, transfers, "_IDLE_S", 1.0)

        def is_small_again() -> bool:  # while small values are sent all the time
            assert peers.send(client, peers.array, peers.last, workers) == ARRIVED
            return client.run(peers.staging_nbytes, workers=workers[:1])[workers[0]] <= limit

        assert peers.until(is_small_again, 20)


def fail_once(kind: Any) -> None:
    """Let one later piece of a value fail."""
    failures, copy_piece = [OSError("it fails")], kind.copy_piece

    def failing(self: Any, begin: int) -> None:
        if begin and failures:
            raise failures.pop()
        copy_piece(self, begin)

    kind.copy_piece = failing


@pytest.mark.parametrize(("where", "kind"), [(0, Sending), (1, Receiving)])
def test_a_value_whose_next_piece_fails_is_sent_again(
    where: int, kind: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(pieces, "PIECE", 3_000_001)
    with peers.cluster(2) as (client, workers):
        client.run(fail_once, kind, workers=[workers[where]])
        assert peers.send(client, large, is_right, workers)
        assert peers.send(client, large, is_right, workers)
        assert peers.ways(client) == {"ipc": 2}
        assert peers.nothing_staged(client)


def fill(dask_worker: Worker) -> None:
    (device,) = dask_worker.plugins["devctx"].worker_devices
    with device:
        free = device.memory_info.free
        peers.kept.append(driver.backend().calls.work.allocate(free - 4 * 2**20))


def empty(dask_worker: Worker) -> None:
    (device,) = dask_worker.plugins["devctx"].worker_devices
    with device:
        driver.backend().calls.work.free(peers.kept.pop())


@pytest.mark.parametrize("piece", [pieces.PIECE, 2**20])
def test_without_room_there_a_value_arrives_in_host_memory(piece: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(pieces, "PIECE", piece)
    with peers.cluster(2) as (client, workers):
        assert peers.send(client, peers.array, peers.last, workers) == ARRIVED
        made = client.submit(peers.array, 2_000_000, workers=workers[:1], pure=False)
        wait(made, timeout=30)
        client.run(fill, workers=workers[1:])
        used = client.submit(peers.last, made, workers=workers[1:], pure=False)
        with pytest.raises(DeviceOutOfMemoryError):
            used.result(timeout=30)
        client.run(empty, workers=workers[1:])
        assert (
            client.submit(peers.last, made, workers=workers[1:], pure=False).result(30) == ARRIVED
        )
        assert peers.ways(client) == {"ipc": 1, "host": 1}


def test_a_copy_that_cannot_be_asked_about_leaves_nothing_staged(pair: Pair) -> None:
    client, (first, second) = pair
    assert peers.send(client, peers.array, peers.last, [first, second]) == ARRIVED
    made = client.submit(peers.array, workers=[first], pure=False)
    for worker in (first, second):  # the first knows then that the work is done
        assert client.submit(peers.last, made, workers=[worker]).result(timeout=30) == ARRIVED
        client.run(peers.fail, "cuEventQuery", 1, workers=[first])
    assert peers.nothing_staged(client)


def refuse_to_close(dask_worker: Worker) -> None:
    """Answer the next question to close staging memory with an error."""
    close = dask_worker.handlers["devctx_ipc_close"]

    async def refuse(**_: object) -> None:
        dask_worker.handlers["devctx_ipc_close"] = close
        raise ValueError("not today")

    dask_worker.handlers["devctx_ipc_close"] = refuse


def test_staging_memory_that_another_worker_does_not_close_is_used_on(pair: Pair) -> None:
    client, (first, second) = pair
    assert peers.send(client, of_3_mb, peers.last, [first, second]) == ARRIVED
    nbytes = client.run(peers.staging_nbytes, workers=[first])[first]
    client.run(refuse_to_close, workers=[second])
    assert client.run(peers.given_back, workers=[first])[first] == nbytes
    assert peers.send(client, of_3_mb, peers.last, [first, second]) == ARRIVED
    assert client.run(peers.staging_nbytes, workers=[first])[first] == nbytes
    assert client.run(peers.given_back, workers=[first])[first] == 0


def use_staging(seconds: float, dask_worker: Worker) -> None:
    """Use a worker's staging memory for a while, as a transfer that is under way."""
    (staging,) = dask_worker.plugins["devctx"].extension.peers.stagings.values()
    dask_worker.loop.call_later(seconds, staging.give, *staging.piece(1))


def test_staging_memory_makes_room_for_a_task_and_goes_back_unused() -> None:
    with peers.cluster(2) as (client, workers):
        assert peers.send(client, of_3_mb, peers.last, workers) == ARRIVED
        client.run(fill, workers=workers[:1])
        client.run(use_staging, 0.5, workers=workers[:1])
        assert client.submit(peers.array, 10**6, workers=workers[:1]).result(30).nbytes == 8 * 10**6
        client.run(empty, workers=workers[:1])
        assert peers.send(client, of_3_mb, peers.last, workers) == ARRIVED
        assert client.run(peers.given_back, unused_s=30, workers=workers[:1])[workers[0]] > 0
        assert client.run(peers.given_back, unused_s=30, workers=workers[:1])[workers[0]] == 0
        assert peers.send(client, of_3_mb, peers.last, workers) == ARRIVED
