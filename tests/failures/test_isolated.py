"""Isolated runs: which tasks wait for which, and which did not cause a device's failure."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import dask
import pytest
from cuda.bindings.driver import CUresult
from distributed import Client, get_worker, secede
from distributed.utils_test import async_poll_for, poll_for

from dask_devctx import Device, DevicePlugin, driver
from dask_devctx.annotations import ISOLATED
from dask_devctx.worker.guard import Guard
from tests.distributed.devices import on_cluster, submit_on, with_plugin
from tests.failures.conftest import failures, leave_a_bad_kernel_running
from tests.failures.test_sticky import check_found, write_to_an_illegal_address

# A task's second run, as after a failure with several suspects.
isolated = {ISOLATED: [1, 3]}


@pytest.mark.parametrize("left_on", [0, 1])
def test_work_that_was_left_running_before_an_isolated_task_is_not_its_fault(
    apart: Client, left_on: int
) -> None:
    bad = submit_on(apart, left_on, leave_a_bad_kernel_running, 0.3)
    bad.result(timeout=30)
    with dask.annotate(device=0, **isolated):
        innocent = apart.submit(str, 1)
    check_found(bad)
    assert innocent.result(timeout=30) == "1"


def fail_soon(code: int | None) -> None:
    """Let the hardware fail, or a device with nobody on it."""
    machine = driver.backend().machine

    def fail() -> None:
        if code is None:
            machine.gpus[0].lost = True
        else:
            machine.faults.poison(CUresult(code))

    threading.Timer(0.3, fail).start()


@pytest.mark.parametrize(
    ("code", "busy"),
    [(700, False), *((code, True) for code in (None, 214, 220, 226, 805, 806))],
)
def test_a_failure_that_no_task_caused_is_the_fault_of_nobody(
    apart: Client, code: int | None, busy: bool
) -> None:
    with dask.annotate(device=0):
        apart.submit(str, 0).result(timeout=30)
        time.sleep(1.5)  # its work is known to be done
        apart.run(fail_soon, code)
        if busy:
            with dask.annotate(**isolated):
                innocent = apart.submit(time.sleep, 1.0)
        else:
            time.sleep(0.5)
            innocent = apart.submit(time.sleep, 0.0)
    assert innocent.result(timeout=30) is None
    poll_for(lambda: failures(apart), timeout=10)
    assert {failure.suspects for failure in failures(apart)} == {()}


def test_a_task_of_several_devices_is_a_suspect_on_all(apart: Client) -> None:
    with dask.annotate(devices=[1, 2]):
        bad = apart.submit(write_to_an_illegal_address)
    error = bad.exception(timeout=30)
    assert error.suspects == (f"{bad.key} on cuda:1 and cuda:2",)


steps: list[str] = []


def stay(name: str) -> None:
    steps.append(f"{name} begins")
    time.sleep(0.2)
    steps.append(f"{name} ends")


async def stay_in_a_coroutine(name: str) -> None:
    steps.append(f"{name} begins")
    await asyncio.sleep(0.2)
    steps.append(f"{name} ends")


@pytest.mark.parametrize("running", [stay, stay_in_a_coroutine])
@with_plugin(4)
async def test_an_isolated_task_waits_for_the_running_ones_and_others_for_it(
    client: Any, worker: Any, running: Callable[[str], Any]
) -> None:
    steps.clear()
    calls = worker.plugins["devctx"].extension.monitor.calls
    first = submit_on(client, 0, running, "first")
    await async_poll_for(lambda: steps, timeout=10)
    with dask.annotate(device=1, **isolated):
        alone = client.submit(stay, "alone")
    await async_poll_for(lambda: calls.turns, timeout=10)
    later = submit_on(client, 2, running, "later")
    await client.gather([first, alone, later])
    each = ("first", "alone", "later")
    assert steps == [f"{name} {what}" for name in each for what in ("begins", "ends")]


def double(number: int) -> int:
    return 2 * number


_go_on = threading.Event()


async def double_later(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def secede_once_cancelled(key: str) -> None:
    ts = get_worker().state.tasks[key]
    while ts.state != "cancelled":
        time.sleep(0.005)
    secede()
    _go_on.wait(30)


@with_plugin(4)
async def test_an_isolated_task_that_secedes_when_it_was_cancelled_is_not_waited_for(
    client: Any, worker: Any
) -> None:
    try:
        with dask.annotate(device=0, **isolated):
            cancelled = client.submit(secede_once_cancelled, "cancelled", key="cancelled")
        await async_poll_for(lambda: worker.state.executing_count, timeout=10)
        await cancelled.cancel()
        with dask.annotate(device=1, **isolated):
            assert await asyncio.wait_for(client.submit(double, 1).result(), 10) == 2
    finally:
        _go_on.set()


def wait_to_go_on() -> None:
    _go_on.wait(30)


@pytest.mark.parametrize("function", [double, double_later], ids=["function", "coroutine"])
@with_plugin(4)
async def test_nobody_waits_for_an_isolated_task_that_was_cancelled_before_its_turn(
    client: Any, worker: Any, function: Callable[[int], Any]
) -> None:
    _go_on.clear()
    calls = worker.plugins["devctx"].extension.monitor.calls
    try:
        long = submit_on(client, 0, wait_to_go_on)
        await async_poll_for(lambda: worker.state.executing_count, timeout=10)
        with dask.annotate(device=1, **isolated):
            cancelled = client.submit(function, 2, key="cancelled")
        await async_poll_for(lambda: calls.turns, timeout=10)
        await cancelled.cancel()
        assert await asyncio.wait_for(submit_on(client, 2, double, 1).result(), 10) == 2
        assert not long.done()
    finally:
        _go_on.set()
    await long


@on_cluster(4)
async def test_a_worker_closes_at_once_although_a_coroutine_waits_for_an_isolated_task(
    client: Any, worker: Any
) -> None:
    await client.register_plugin(DevicePlugin())
    monitor = worker.plugins["devctx"].extension.monitor
    isolated = Guard(monitor, "isolated", (Device(0),))
    isolated.alone = True
    assert monitor.calls.may_begin(isolated)
    waiting = [client.submit(double_later, 1)]
    await async_poll_for(lambda: worker.state.executing_count, timeout=10)
    await asyncio.wait_for(worker.close(), 20)  # dask waits half a minute for its coroutines
    assert waiting[0].status != "error"
