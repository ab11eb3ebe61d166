"""One monitored call: how it ends, for functions, coroutine functions and actors' methods alike."""

from __future__ import annotations

import asyncio
import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from cuda.bindings.driver import CUresult
from distributed import Reschedule

from dask_devctx import Device, DeviceFailedError, DeviceOutOfMemoryError, driver
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.worker.actors import DeviceMethod
from dask_devctx.worker.failures.monitor import Monitor
from tests.failures.conftest import Monitored, as_task


def poison() -> None:
    machine = driver.backend().machine
    assert machine is not None
    machine.faults.poison(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, after_s=0)


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
    assert machine is not None
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
        return {f"{one.key} on {one.device}" for one in monitor.suspects.named()}

    method = DeviceMethod(monitor, "it", (Device(1), Device(2)), suspects, moves=False, made=[])
    assert method() == {"it on cuda:1", "it on cuda:2"}
