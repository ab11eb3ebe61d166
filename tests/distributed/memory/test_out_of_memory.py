"""Memory that runs out inside a task: all that can leave leaves, and the task runs alone."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from cuda.bindings.driver import CUresult
from distributed import wait, worker_client

from dask_devctx import DeviceOutOfMemoryError, SimulatedArray, driver, report
from tests.distributed import peers
from tests.distributed.memory.test_spilling import (
    MIB,
    array,
    counts,
    full,
    on_the_host,
    read,
    threads,
)

KIB = 2**10


def blocks_of(x: da.Array) -> Any:
    """Return an array that is larger than a device, block by block."""
    rows, columns = x.numblocks
    return np.block([[read(x.blocks[i, j].compute()) for j in range(columns)] for i in range(rows)])


EIGHTH = 128  # rows and columns of a block of 128 KiB
# By default, dask makes larger blocks in between, and joins four at a time.
SMALL = {"block_size_limit": 128 * KIB}
METHODS = {"rechunk": "tasks", "p2p": "p2p"}


@pytest.mark.timeout(300)  # a busy machine takes minutes for the long ones
@pytest.mark.parametrize("tasks_per_device", [1, 2])
@pytest.mark.parametrize(
    "job",
    ["sum", *(pytest.param(job, marks=pytest.mark.long) for job in ("transpose", *METHODS, "dot"))],
)
def test_blocks_of_an_eighth_of_a_device(job: str, tasks_per_device: int) -> None:
    """More than four times the limit in all, and no task fails that could have run."""
    n = 8 * EIGHTH
    expected = on_the_host(n, EIGHTH)
    with (
        dask.config.set(split_every=2),
        threads(1 * MIB, 2, tasks_per_device=tasks_per_device) as client,
    ):
        x = array(n, EIGHTH).persist()
        wait(x)
        if job == "sum":
            assert read(x.sum().compute()) == expected.sum()
        elif job == "transpose":
            assert (blocks_of((x + x.T).persist()) == expected + expected.T).all()
        elif job == "dot":
            assert (blocks_of(x.dot(x).persist()) == expected.dot(expected)).all()
        else:
            rows = x.rechunk((EIGHTH // 8, n), method=METHODS[job], **SMALL).persist()
            assert (blocks_of(rows) == expected).all()
        assert counts(client)["spills"] > 40


running: list[str] = []
seen: list[list[str]] = []
first: list[int] = []
begun, waited = threading.Event(), threading.Event()


def large() -> int:
    """Run out of memory the first time, beside a task that holds the device."""
    first.append(1)
    if len(first) == 1:
        begun.set()
        assert waited.wait(20)
    seen.append(list(running))
    return int(SimulatedArray(7 * MIB // 64).sum())


def neighbour(n: int) -> int:
    running.append("neighbour")
    try:
        assert begun.wait(20)
        x = SimulatedArray(2 * MIB // 64)
        waited.set()
        time.sleep(0.2)
        return int(x.sum())
    finally:
        running.remove("neighbour")


def test_the_last_attempt_has_the_device_for_itself() -> None:
    seen.clear()
    first.clear()
    begun.clear()
    waited.clear()
    with threads(1 * MIB, 1, tasks_per_device=2) as client:
        made = client.submit(large, pure=False)
        assert begun.wait(20)
        others = client.map(neighbour, range(6), pure=False)
        assert made.result(timeout=60) == 0
        assert client.gather(others) == [0] * 6
    assert seen == [["neighbour"], []]


meet = threading.Barrier(2, timeout=20)
tried: list[int] = []


def half(n: int) -> int:
    tried.append(n)
    x = SimulatedArray(4 * MIB // 64 - 8)
    if tried.count(n) == 1:
        meet.wait()
    y = x + 1
    time.sleep(0.1)
    return int(y.sum()) // x.size


def test_two_tasks_that_run_out_of_memory_do_not_wait_for_each_other() -> None:
    """Each needs the whole device: one after the other can have it."""
    tried.clear()
    with threads(1 * MIB, 1, tasks_per_device=2) as client:
        futures = client.map(half, range(2), pure=False)
        assert client.gather(futures) == [1, 1]
        assert len(tried) > 2


def result(n: int) -> SimulatedArray:
    tried.append(n)
    assert begun.wait(20)
    return SimulatedArray(7 * MIB // 64)


def stop() -> None:
    """Let the event loop stand still, and then all threads, as for a collection of garbage."""
    begun.set()
    assert peers.until(lambda: len(tried) == 2, 20)
    time.sleep(0.2)
    ctypes.PyDLL(None).usleep(1_500_000)


def test_the_last_attempt_waits_for_results_that_the_event_loop_is_about_to_store() -> None:
    tried.clear()
    begun.clear()
    with threads(1 * MIB, 1) as client:
        (worker,) = client.cluster.workers.values()
        made = client.map(result, range(2), pure=False)
        assert peers.until(lambda: len(worker.state.executing) == 2, 20)
        worker.loop.add_callback(stop)
        assert client.gather(client.map(lambda x: x.size, made)) == [7 * MIB // 64] * 2
        assert len(tried) == 3


def test_the_error_has_the_numbers() -> None:
    def too_much(x: SimulatedArray) -> SimulatedArray:
        return SimulatedArray(MIB // 8)

    with threads(1 * MIB, 1) as client:
        x = client.submit(full, 1, pure=False)
        error = client.submit(too_much, x, pure=False).exception(timeout=30)
    assert isinstance(error, DeviceOutOfMemoryError)
    assert error.attempts == 2
    assert error.limit_nbytes == int(0.8 * MIB)
    assert error.stayed_nbytes == {"in use by running tasks": 128 * KIB}
    assert "the limit of values that dask keeps there is 819.2 KiB" in str(error)
    assert "tasks_per_device" not in str(error), "it had the device for itself"
    assert "to host memory when it failed: 128.0 KiB in use by running tasks" in str(error)


def alone(x: SimulatedArray) -> tuple[int, int]:
    assert x._memory is not None
    return int(x.sum()), x._memory.block.nbytes


@pytest.mark.parametrize("cut", [np.s_[:16], np.s_[:, 3:19], np.s_[::-1, 5::7]])
def test_a_piece_of_an_array_comes_back_without_the_rest(cut: Any) -> None:
    with threads(1 * MIB, 1) as client:
        pieces = client.map(lambda n: full(n).reshape(128, 128)[cut], range(8), pure=False)
        wait(pieces)
        fill = client.map(full, range(10), pure=False)
        wait(fill)
        n_elements = np.empty((128, 128))[cut].size
        spilled = [
            n for n, one in enumerate(pieces) if any(client.run(peers.is_away, one.key).values())
        ]
        assert spilled
        found = [client.submit(alone, pieces[n], pure=False).result() for n in spilled]
        assert [total for total, _ in found] == [n * n_elements for n in spilled]
        # A piece leaves with the rest where the device has no room to make it dense.
        assert {nbytes for _, nbytes in found} - {8 * 128 * 128} == {8 * n_elements}


@contextlib.contextmanager
def copies_noted(seconds: float = 0.0) -> Iterator[list[int]]:
    """Note the threads that copy between a device and the host; each copy takes so long."""
    found: list[int] = []

    def note(*_: object) -> bool:
        found.append(threading.get_ident())
        time.sleep(seconds)
        return False

    faults = driver.backend().machine.faults
    for name in ("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuStreamSynchronize"):
        faults.inject(name, CUresult.CUDA_ERROR_UNKNOWN, when=note)
    try:
        yield found
    finally:
        faults.clear()


async def larger_than_what_is_free() -> int:
    return int(SimulatedArray((7 * MIB // 64,)).sum())


async def each_is(n: int, *values: SimulatedArray) -> bool:
    return all((value.get() == n).all() for value in values)


@pytest.mark.parametrize("what", ["memory runs out", "inputs come back"])
def test_a_coroutine_does_not_stop_the_event_loop_for_copies(what: str) -> None:
    """Each copy takes long: where the event loop waited for them, it stalled for all of them."""
    with threads(1 * MIB, 1) as client:
        values = [client.submit(full, 1, pure=False) for _ in range(6)]
        wait(values)
        (loop,) = client.run(threading.get_ident).values()
        with copies_noted(0.05) as noted:
            if what == "memory runs out":
                assert client.submit(larger_than_what_is_free, pure=False).result(timeout=30) == 0
            else:
                fill = client.map(full, [2] * 6, pure=False)
                wait(fill)
                assert client.submit(each_is, 1, *values[:3], pure=False).result(timeout=30)
        assert noted
        assert loop not in noted


@pytest.mark.parametrize("fits", [True, False])
def test_only_a_task_that_can_fit_makes_others_leave(
    fits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def ask() -> int:
        return int(SimulatedArray((MIB - 1024 if fits else MIB + 1,), "u1").sum())

    with threads(1 * MIB, 1) as client:
        values = client.map(full, range(3), pure=False)  # less than half the limit
        wait(values)
        asked = client.submit(ask, pure=False)
        error = asked.exception(timeout=30)
        found = report(client)
    (row,) = found.devices
    assert (error is None) is fits
    assert f"ran out of memory: {1 if fits else 2} time" in str(found)
    assert fits or "asks for more than the device has" in str(error)
    assert fits or "ran 2 times" in str(error)
    assert row.spills == (3 if fits else 0)
    assert not [one for one in caplog.messages if "more than its limit" in one]


def submits_an_array(n: int) -> int:
    x = SimulatedArray((6 * MIB,), "u1")
    with worker_client() as client:
        future = client.submit(lambda x: int(x.sum()) + n, x, pure=False)
        del x
        return int(future.result())


def test_arguments_that_find_no_memory_on_arrival_do_not_end_the_worker() -> None:
    """They arrived on the event loop, where the error ended the scheduler's stream."""
    with (
        dask.config.set({"devctx.simulated-memory": "64 MiB"}),
        peers.cluster(1, memory_limit=0) as (client, workers),
    ):
        values = client.map(lambda n: SimulatedArray((8 * MIB,), "u1"), range(6), pure=False)
        wait(values)
        futures = client.map(submits_an_array, range(8), pure=False)
        wait(futures, timeout=60)
        assert client.gather(futures) == list(range(8))
        assert list(client.scheduler_info()["workers"]) == workers
