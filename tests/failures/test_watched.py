"""Guarded calls in this process: how each ends, and what is done about watched tasks."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import dask
import pytest
from cuda.bindings.driver import CUresult
from distributed import Reschedule, get_worker, secede
from distributed.utils_test import async_poll_for, gen_cluster

from dask_devctx import (
    Device,
    DeviceFailedError,
    DeviceOutOfMemoryError,
    DevicePlugin,
    devices,
    driver,
)
from dask_devctx.annotations import WATCHED
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.worker.actors import DeviceMethod
from dask_devctx.worker.failures.calls import Call
from dask_devctx.worker.failures.monitor import Monitor
from tests.failures.conftest import (
    Monitored,
    as_task,
    poison,
)


def break_the_device() -> None:
    poison()
    raise ValueError("of a library, which says nothing of devices")


async def break_the_device_later() -> None:
    await asyncio.sleep(0)
    break_the_device()


class Held:
    """Something that a task holds when it fails."""


held: list[weakref.ref[Held]] = []


def run_out_of_memory() -> None:
    something = Held()
    held[:] = [weakref.ref(something)]
    raise MemoryError("std::bad_alloc: out_of_memory: CUDA error at: device_memory.hpp:106")


async def run_out_of_memory_later() -> None:
    await asyncio.sleep(0)
    run_out_of_memory()


def as_method(monitor: Monitor, fn: Callable[[], Any]) -> Callable[[], Any]:
    return DeviceMethod(monitor, "it", (Device(0),), fn, moves=False, made=[])


def call(made: Callable[[], Any]) -> Any:
    result = made()
    return asyncio.run(result) if inspect.iscoroutine(result) else result


each_way = pytest.mark.parametrize("as_call", [as_task, as_method])


@each_way
@pytest.mark.parametrize("fn", [break_the_device, break_the_device_later])
def test_a_call_that_breaks_its_device_errs_with_that_whatever_it_raised(
    monitored: Monitored, as_call: Any, fn: Callable[[], Any]
) -> None:
    monitor, failures = monitored
    with pytest.raises(DeviceFailedError) as caught:
        call(as_call(monitor, fn))
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__context__ is None
    assert set(failures[0].errors) == {"it"}


@pytest.mark.parametrize("fn", [run_out_of_memory, run_out_of_memory_later])
def test_memory_that_ran_out_is_told_with_its_cause_and_nothing_is_held(
    monitored: Monitored, fn: Callable[[], Any]
) -> None:
    monitor, _ = monitored
    gc.disable()
    try:
        with pytest.raises(DeviceOutOfMemoryError) as caught:
            call(as_task(monitor, fn))
        assert isinstance(caught.value.__cause__, MemoryError)
        assert caught.value.__context__ is None
        del caught
        assert held[0]() is None, "the error and its traceback hold each other"
    finally:
        gc.enable()


@each_way
def test_what_begins_after_a_failure(monitored: Monitored, as_call: Any) -> None:
    monitor, _ = monitored
    with pytest.raises(DeviceFailedError):
        call(as_task(monitor, break_the_device))
    # A task runs again in another process. A method cannot, and errs with what ended this one.
    with pytest.raises(Reschedule if as_call is as_task else DeviceFailedError):
        call(as_call(monitor, lambda: None))


# -- of several devices


def lose_the_other() -> None:
    machine = driver.backend().machine
    machine.gpus[2].lost = True


@pytest.mark.parametrize("fn", [lose_the_other, break_the_device])
def test_a_failure_of_another_of_its_devices_is_blamed_on_the_call(
    monitored: Monitored, machine: SimulatedMachine, fn: Callable[[], Any]
) -> None:
    monitor, failures = monitored
    try:
        with pytest.raises(DeviceFailedError) as caught:
            DeviceMethod(monitor, "it", (Device(0), Device(2)), fn, moves=False, made=[])()
    finally:
        machine.gpus[2].lost = False
    assert set(failures[0].errors) == {"it"}
    assert caught.value.device == ("cuda:2" if fn is lose_the_other else "cuda:0")


def test_a_call_on_several_devices_is_a_suspect_on_each(monitored: Monitored) -> None:
    monitor, _ = monitored

    def suspects() -> set[str]:
        return {f"{key} on {device}" for key, device in monitor.calls.suspects()}

    method = DeviceMethod(monitor, "it", (Device(1), Device(2)), suspects, moves=False, made=[])
    assert method() == {"it on cuda:1", "it on cuda:2"}


# -- a task that breaks its device after it returned errs in its second run. No other task errs


async def double_later(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def run(
    monitor: Monitor,
    key: Hashable,
    device: int,
    fn: Callable[..., Any],
    *args: object,
    watched: int = 0,
) -> Any:
    return as_task(monitor, fn, *args, key=key, device=device, watched=watched)()


def run_watched(monitor: Monitor, key: Hashable, device: int, fn: Any, *args: object) -> Any:
    return run(monitor, key, device, fn, *args, watched=1)


def test_a_watched_task_that_is_well_is_waited_for_and_returns(
    monitored: Monitored, machine: SimulatedMachine
) -> None:
    monitor, failures = monitored
    assert run_watched(monitor, "one", 0, str, 1) == "1"
    assert machine.faults.calls["cuCtxSynchronize"] == 2  # before it and after it
    assert asyncio.run(run_watched(monitor, ("two", 0), 0, double_later, 2)) == 4
    assert machine.faults.calls["cuCtxSynchronize"] == 4
    assert not failures
    assert not monitor.calls.turns


def test_tasks_that_begin_wait_for_a_watched_one_and_run_again_if_it_breaks_the_device(
    monitored: Monitored,
) -> None:
    monitor, failures = monitored
    broken, other_began = threading.Event(), threading.Event()

    def break_it(data: object) -> None:
        poison(0)
        broken.set()
        assert not other_began.wait(0.3)

    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(run_watched, monitor, "bad", 0, break_it, None)
        assert broken.wait(10)
        other = pool.submit(run, monitor, "other", 1, other_began.set)
        assert isinstance(other.exception(10), Reschedule)
        error = running.exception(10)
    assert isinstance(error, DeviceFailedError)
    assert error.suspects == ("bad on cuda:0",)
    (failure,) = failures
    assert set(failure.errors) == set(failure.suspects) == {"bad"}
    assert not failure.bystanders


def stay(began: threading.Event, ended: threading.Event) -> None:
    began.set()
    time.sleep(0.3)
    ended.set()


def test_a_watched_task_waits_for_the_running_ones(monitored: Monitored) -> None:
    monitor, _ = monitored
    began, ended = threading.Event(), threading.Event()

    async def stay_in_a_coroutine() -> None:
        began.set()
        await asyncio.sleep(0.3)
        ended.set()

    with ThreadPoolExecutor(2) as pool:
        pool.submit(run, monitor, "running", 0, partial(stay, began, ended))
        assert began.wait(10)
        assert pool.submit(run_watched, monitor, "watched", 1, ended.is_set).result(10)
        began.clear(), ended.clear()
        pool.submit(asyncio.run, run(monitor, "running", 0, stay_in_a_coroutine))
        assert began.wait(10)
        assert pool.submit(run_watched, monitor, "watched", 1, ended.is_set).result(10)


@pytest.mark.parametrize("left_on", [0, 1])
def test_work_that_was_left_running_before_a_watched_task_is_not_its_fault(
    monitored: Monitored, left_on: int
) -> None:
    monitor, failures = monitored
    run(monitor, "left", left_on, poison, 0.1)
    with pytest.raises(Reschedule):
        run_watched(monitor, "innocent", 0, str, 1)
    (failure,) = failures
    assert not failure.errors, "the other one runs again, watched"
    assert failure.suspects == ("left",)
    assert failure.bystanders == ("innocent",)


@pytest.mark.parametrize("watched", [0, 1])
def test_a_device_that_fails_with_nobody_there_is_the_fault_of_nobody(
    monitored: Monitored, watched: int
) -> None:
    monitor, failures = monitored
    assert run(monitor, "before", 0, str, 1, watched=1) == "1"
    poison(0)
    with pytest.raises(Reschedule):
        run(monitor, "innocent", 0, str, 1, watched=watched)
    (failure,) = failures
    assert not failure.errors
    assert not failure.suspects
    assert failure.bystanders == ("innocent",)
    assert "No task is suspected" in str(failure.error)


@pytest.mark.parametrize("code", [214, 220, 226, None])
def test_a_failure_of_the_hardware_is_the_fault_of_nobody(
    monitored: Monitored, machine: SimulatedMachine, code: int | None
) -> None:
    monitor, failures = monitored

    def fail() -> None:
        if code is None:
            machine.gpus[0].lost = True
        else:
            machine.faults.poison(CUresult(code))

    with pytest.raises(Reschedule):
        run_watched(monitor, "there", 0, fail)
    (failure,) = failures
    assert failure.error.lost == (code is None)
    assert not failure.errors
    assert not failure.suspects
    assert failure.bystanders == ("there",)


@pytest.fixture
def unmarked(machine: SimulatedMachine) -> Iterator[Monitor]:
    """The monitor of a worker whose scheduler lacks this package, and so marks no suspects."""

    async def monitor_on_a_loop() -> Monitor:
        told: dict[str, Any] = {"synchronize": False, "oom_retries": 0}
        return Monitor(devices(), on_failure=lambda failure: None, marks=lambda: False, **told)

    with asyncio.Runner() as runner:
        monitor = runner.run(monitor_on_a_loop())
        yield monitor
        monitor.close()


def test_without_a_scheduler_that_counts_runs_the_task_that_notices_errs(unmarked: Monitor) -> None:
    run(unmarked, "left", 1, poison, 0.1)
    with pytest.raises(DeviceFailedError, match="the scheduler lacks dask-devctx") as caught:
        run(unmarked, "noticed", 0, time.sleep, 0.2)
    assert caught.value.suspects == ("noticed on cuda:0", "left on cuda:1")


def double(number: int) -> int:
    return 2 * number


_go_on = threading.Event()


def secede_once_cancelled(key: str) -> None:
    ts = get_worker().state.tasks[key]
    while ts.state != "cancelled":
        time.sleep(0.005)
    secede()
    _go_on.wait(30)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 4)], timeout=60)
async def test_a_watched_task_that_secedes_when_it_was_cancelled_is_not_waited_for(
    client: Any, scheduler: Any, worker: Any
) -> None:
    await client.register_plugin(DevicePlugin())
    try:
        with dask.annotate(device=0, **{WATCHED: [1, 3]}):
            cancelled = client.submit(secede_once_cancelled, "cancelled", key="cancelled")
        await async_poll_for(lambda: worker.state.executing_count, timeout=10)
        await cancelled.cancel()
        with dask.annotate(device=1, **{WATCHED: [1, 3]}):
            assert await asyncio.wait_for(client.submit(double, 1).result(), 10) == 2
    finally:
        _go_on.set()


def wait_to_go_on() -> None:
    _go_on.wait(30)


@pytest.mark.parametrize("function", [double, double_later], ids=["function", "coroutine"])
@gen_cluster(client=True, nthreads=[("127.0.0.1", 4)], timeout=60)
async def test_nobody_waits_for_a_watched_task_that_was_cancelled_before_its_turn(
    client: Any, scheduler: Any, worker: Any, function: Callable[[int], Any]
) -> None:
    _go_on.clear()
    await client.register_plugin(DevicePlugin())
    calls = worker.plugins["devctx"].extension.monitor.calls
    try:
        with dask.annotate(device=0):
            long = client.submit(wait_to_go_on)
        await async_poll_for(lambda: worker.state.executing_count, timeout=10)
        with dask.annotate(device=1, **{WATCHED: [1, 3]}):
            cancelled = client.submit(function, 2, key="cancelled")
        await async_poll_for(lambda: calls.turns, timeout=10)
        await cancelled.cancel()
        with dask.annotate(device=2):
            assert await asyncio.wait_for(client.submit(double, 1).result(), 10) == 2
        assert not long.done()
    finally:
        _go_on.set()
    await long


@gen_cluster(client=True, nthreads=[("127.0.0.1", 4)], timeout=60)
async def test_a_worker_closes_at_once_although_a_coroutine_waits_for_a_watched_task(
    client: Any, scheduler: Any, worker: Any
) -> None:
    await client.register_plugin(DevicePlugin())
    calls = worker.plugins["devctx"].extension.monitor.calls
    assert not list(calls.turn(Call("watched", (Device(0),)), 1, lambda: None))
    waiting = [client.submit(double_later, 1)]
    await async_poll_for(lambda: worker.state.executing_count, timeout=10)
    await asyncio.wait_for(worker.close(), 20)  # dask waits half a minute for its coroutines
    assert waiting[0].status != "error"
