"""Values that leave a device, come back and end at the same time, and copies that fail."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from cuda.bindings.driver import CUresult
from distributed import Client, Future, get_worker, wait
from distributed.utils_test import poll_for
from distributed.worker_state_machine import ExecuteSuccessEvent

from dask_devctx import Device, SimulatedArray, driver
from dask_devctx.driver.relaxed import LEGACY_STREAM
from dask_devctx.errors import DeviceMemoryError
from dask_devctx.worker.values.value import Value
from tests.distributed.devices import submit_on
from tests.distributed.memory.test_spilling import MIB, full, threads, totals


def worker_of(client: Client) -> Any:
    cluster: Any = client.cluster
    (worker,) = cluster.workers.values()
    return worker


def memory_of(client: Client) -> Any:
    return worker_of(client).data.spill


@contextmanager
def one_value(**how: Any) -> Iterator[tuple[Client, Future, Any, Any, Value]]:
    with threads(2 * MIB, 1, **how) as client:
        made = client.submit(full, 1, pure=False)
        wait(made)
        worker = worker_of(client)
        yield client, made, worker.data.spill, worker, *worker.data.values_of([made.key])


def used(memory: Any) -> Any:
    return memory.counts(Device(0))["held"]


def total(value: Any) -> int:
    return int(value.sum())


@pytest.mark.parametrize("status", ["OUT_OF_MEMORY", "NOT_PERMITTED"])
def test_values_leave_although_the_copy_of_one_failed(status: str) -> None:
    with threads(2 * MIB, 1) as client:
        futures = client.map(full, range(8), pure=False)
        wait(futures)
        memory = memory_of(client)
        faults = driver.backend().machine.faults
        faults.inject("cuMemcpyDtoHAsync", getattr(CUresult, f"CUDA_ERROR_{status}"))
        memory.clear(Device(0))
        memory.clear(Device(0))
        assert used(memory) == 0
        assert totals(client, futures) == [n * 16384 for n in range(8)]


def test_a_value_that_a_task_needs_while_it_is_copied_to_the_host_stays() -> None:
    with one_value() as (client, made, memory, _, kept):
        found: list[Any] = []

        def pin(*_: object) -> bool:
            found.append(memory.pin(kept, None))
            return False

        faults = driver.backend().machine.faults
        faults.inject("cuMemcpyDtoHAsync", None, when=pin)
        nbytes = used(memory)
        assert memory.clear(Device(0)) == 0
        assert len(found) == 1
        assert used(memory) == nbytes
        assert memory.counts(Device(0))["spills"] == 0
        faults.clear()
        found.clear()
        memory.unpin([kept])
        assert memory.clear(Device(0)) == nbytes
        assert client.submit(total, made, pure=False).result() == 16384


def test_a_result_stays_on_its_device_until_dask_stores_it() -> None:
    with threads(2 * MIB, 1) as client:
        worker, memory, found = worker_of(client), memory_of(client), []
        handle = worker.handle_stimulus

        def spill_before(*events: Any) -> None:
            if any(isinstance(one, ExecuteSuccessEvent) for one in events):
                found.append((used(memory), memory.clear(Device(0)), used(memory)))
            handle(*events)

        worker.handle_stimulus = spill_before
        made = client.submit(full, 1)
        wait(made)
        assert found == [(131072, 0, 131072)]
        assert memory.clear(Device(0)) == 131072
        assert client.submit(total, made, pure=False).result() == 16384


loop_waits, loop_goes_on = threading.Event(), threading.Event()


def full_while_the_loop_waits() -> Any:
    get_worker().loop.add_callback(lambda: loop_waits.set() or loop_goes_on.wait(10))
    assert loop_waits.wait(10)
    return full(1)


def test_a_result_has_its_room_before_the_event_loop_knows_of_it() -> None:
    with threads(2 * MIB, 1) as client:
        account = memory_of(client).accounts[Device(0)]
        made = client.submit(full_while_the_loop_waits)
        poll_for(lambda: account.used == 131072, timeout=10)
        assert account.counts.held == 0, "the loop has counted it"
        loop_goes_on.set()
        wait(made)
        assert (account.used, account.counts.held) == (131072, 131072)


def test_a_value_that_was_released_comes_back_under_a_key_that_has_another_value() -> None:
    """A task that was cancelled while it waited for the value still runs with it."""
    with threads(2 * MIB, 2) as client:
        first = submit_on(client, 0, full, 1, key="k")
        wait(first)
        worker = worker_of(client)
        memory_of(client).clear(Device(0))
        (kept,) = worker.data.values_of(["k"])
        poll_for(lambda: kept.is_away, timeout=10)
        first.release()
        poll_for(lambda: "k" not in worker.data, timeout=10)
        second = submit_on(client, 1, full, 2, key="k")
        wait(second)
        memory = memory_of(client)
        assert int(memory.pin(kept, None).get().sum()) == 16384
        memory.unpin([kept])
        assert submit_on(client, 0, total, second, pure=False).result() == 2 * 16384


steps: list[object] = []


def read_it(value: SimulatedArray) -> int:
    steps.append("read")
    return int(value.sum())


async def read_it_later(value: SimulatedArray) -> int:
    return read_it(value)


def noting_steps() -> Any:
    """Let no work of a device be done, and note the copies to devices and what waits for them."""

    def note(name: str, *args: Any) -> bool:
        steps.append((name, int(args[0])) if name == "wait" else name)
        return False

    steps.clear()
    faults = driver.backend().machine.faults
    faults.inject("cuMemcpyHtoDAsync", None, when=partial(note, "copy"))
    faults.inject("cuStreamWaitEvent", None, times=10**6, when=partial(note, "wait"))
    faults.inject("cuEventQuery", CUresult.CUDA_ERROR_NOT_READY, times=10**6)
    return faults


@pytest.mark.parametrize("task", [read_it, read_it_later])
@pytest.mark.parametrize("device", [0, None])
@pytest.mark.parametrize("moved", [True, False], ids=["moved", "left where they are"])
def test_a_task_reads_after_the_copy_that_brings_its_input(
    task: Callable[[Any], Any], device: int | None, moved: bool
) -> None:
    with one_value(move_inputs=moved) as (client, made, memory, _, _):
        memory.clear(Device(0))
        faults = noting_steps()
        assert submit_on(client, device, task, made, pure=False).result() == 16384
        faults.clear()
        assert ("wait", LEGACY_STREAM) in steps[steps.index("copy") : steps.index("read")]


class Moody:
    """A value on a device that cannot be pickled as long as ``error`` is set."""

    error: type[Exception] | None = None

    def __init__(self, array: SimulatedArray | None = None) -> None:
        self.array = full(1) if array is None else array

    def sum(self) -> int:
        return int(self.array.sum())

    def __reduce__(self) -> Any:
        if Moody.error is not None:
            raise Moody.error("not now")
        return Moody, (self.array,)


@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_others_leave_in_the_place_of_a_value_that_cannot(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with threads(1 * MIB, 1) as client, caplog.at_level(logging.WARNING):
        moody = client.submit(Moody, pure=False)
        wait(moody)
        memory = memory_of(client)
        nbytes = used(memory)
        monkeypatch.setattr(Moody, "error", error)
        futures = client.map(full, range(16), pure=False)  # more than the device has
        assert totals(client, futures) == [n * 16384 for n in range(16)]
        memory.clear(Device(0))
        assert used(memory) == nbytes
        for _ in range(3):
            memory.clear(Device(0))
        assert sum("cannot leave cuda:0 now" in record.message for record in caplog.records) == 1
        monkeypatch.setattr(Moody, "error", None)
        memory.clear(Device(0))
        assert used(memory) == 0
        assert client.submit(total, moody, pure=False).result() == 16384


@pytest.mark.parametrize("error", ["NOT_PERMITTED", "OUT_OF_MEMORY"])
def test_values_that_cannot_be_restored_for_another_worker_stay_no_longer(error: str) -> None:
    """Within a process they are sent as they are on their device."""
    with threads(2 * MIB, 2, n_workers=2) as client:
        one, other = client.cluster.workers.values()  # type: ignore[union-attr]
        made = client.map(full, range(2), pure=False, workers=[one.address])
        wait(made)
        memory = one.data.spill
        (device,) = memory.accounts
        memory.clear(device)
        copies = itertools.count()
        code = getattr(CUresult, f"CUDA_ERROR_{error}")
        times = 1 if error == "NOT_PERMITTED" else 1000
        driver.backend().machine.faults.inject(
            "cuMemcpyHtoDAsync", code, times=times, when=lambda *_: next(copies) > 0
        )
        used = client.submit(len, made, workers=[other.address])
        if error == "NOT_PERMITTED":  # it passes: dask asks again
            assert used.result(timeout=30) == 2
        else:
            with pytest.raises(DeviceMemoryError):
                used.result(timeout=30)
        poll_for(lambda: not any(v.pins for v in one.data.values_of(m.key for m in made)), 10)
