"""A task that breaks its device after it returned errs in the end, and no second bystander does."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from cuda.bindings.driver import CUresult
from dask._task_spec import Task
from distributed import Client, Future, Reschedule, get_worker, secede, wait, worker_client
from distributed.utils_test import gen_cluster

from dask_devctx import (
    Device,
    DeviceFailedError,
    DevicePlugin,
    LocalDeviceCluster,
    driver,
)
from dask_devctx.annotations import WATCHED
from dask_devctx.scheduler import suspects
from dask_devctx.worker.failures.monitor import Monitor
from dask_devctx.worker.failures.quarantine import Watch
from dask_devctx.worker.task import DeviceTask
from tests.failures.conftest import Monitored

ILLEGAL_ADDRESS = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


def where_slowly(number: int, seconds: float = 0.02) -> tuple[int, int]:
    time.sleep(seconds)
    return number, os.getpid()


def poison(after_s: float) -> None:
    machine = driver.backend().machine
    assert machine is not None
    machine.faults.poison(ILLEGAL_ADDRESS, after_s=after_s)


def leave_a_bad_kernel_running(after_s: float) -> str:
    poison(after_s)
    return "looks good"


async def leave_a_bad_kernel_running_in_a_coroutine(after_s: float) -> str:
    await asyncio.sleep(0.01)
    poison(after_s)
    return "looks good"


def leave_a_bad_kernel_running_and_stay(after_s: float, flag: str) -> str:
    """The second time, go on in Python for longer than anybody waits for it."""
    poison(after_s)
    if os.path.exists(flag):
        time.sleep(60)
    Path(flag).touch()
    return "looks good"


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    plugin = DevicePlugin(**getattr(request, "param", {}))
    with (
        LocalDeviceCluster(
            n_workers=1, dashboard_address=":0", silence_logs=False, plugin=plugin
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


one_device = pytest.mark.parametrize("client", [{"devices": [0]}], indirect=True)
each_kind = pytest.mark.parametrize(
    "leave", [leave_a_bad_kernel_running, leave_a_bad_kernel_running_in_a_coroutine]
)


def error_in_the_end(future: Future, timeout: float = 60) -> DeviceFailedError:
    """Return the error of a future that may count as finished for a while yet."""
    deadline = time.monotonic() + timeout
    while future.status != "error":
        assert time.monotonic() < deadline, f"{future} did not err"
        time.sleep(0.02)
    error = future.exception()
    assert isinstance(error, DeviceFailedError)
    return error


def check_blamed_exactly(bad: Future, noticed_on: str = "") -> None:
    error = error_in_the_end(bad)
    assert error.suspects == (f"{bad.key} on cuda:0",)
    assert error.watched
    assert error.device == noticed_on or not noticed_on
    assert "watched" in str(error)
    assert "synchronize" not in str(error)


@each_kind
@one_device
def test_on_one_device_one_bystander_errs_and_then_the_task_itself(
    client: Client, leave: Callable[..., Any]
) -> None:
    first = client.map(where_slowly, range(20))
    wait(first)
    bad = client.submit(leave, 0.3)
    assert bad.result(timeout=30) == "looks good"
    noticed = client.submit(where_slowly, 20, 1.0)
    error = noticed.exception(timeout=30)
    assert isinstance(error, DeviceFailedError)
    assert not error.watched
    assert error.suspects == (f"{noticed.key} on cuda:0", f"{bad.key} on cuda:0")

    others = client.map(where_slowly, range(21, 60))
    results = client.gather(first + others)
    assert [number for number, _ in results] == [*range(20), *range(21, 60)]
    check_blamed_exactly(bad)


@each_kind
def test_among_tasks_on_other_devices_one_bystander_errs_and_then_the_task_itself(
    client: Client, leave: Callable[..., Any]
) -> None:
    first = client.map(where_slowly, range(20))
    wait(first)
    with dask.annotate(device=0):
        bad = client.submit(leave, 0.2)
    others = client.map(where_slowly, range(20, 400))
    check_blamed_exactly(bad)
    wait(others, timeout=60)
    erred = [future for future in others if future.status == "error"]
    assert len(erred) == 1, [str(future.exception()) for future in erred]
    good = [future for future in first + others if future not in erred]
    expected = [n for n, future in enumerate(first + others) if future not in erred]
    assert [number for number, _ in client.gather(good)] == expected


def test_a_task_that_does_not_end_is_reported_all_the_same(client: Client, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    with dask.annotate(device=0):
        bad = client.submit(leave_a_bad_kernel_running_and_stay, 0.2, str(ran))
        bad.result(timeout=30)
        noticed = client.submit(where_slowly, 0, 0.5)
    assert isinstance(noticed.exception(timeout=30), DeviceFailedError)
    # Whoever notices it on another device now is run again, until the worker is gone.
    with dask.annotate(device=1):
        others = client.map(where_slowly, range(1, 100))
    check_blamed_exactly(bad, noticed_on="cuda:1")
    assert [number for number, _ in client.gather(others)] == [*range(1, 100)]


def test_with_retries_it_is_run_so_often_and_nobody_else_errs(client: Client) -> None:
    with dask.annotate(device=0, retries=1):
        bad = client.submit(leave_a_bad_kernel_running, 0.1, key=("bad", 0))
    with dask.annotate(retries=1):  # of one that notices, too
        others = client.map(where_slowly, range(300))
    check_blamed_exactly(bad)
    assert [number for number, _ in client.gather(others)] == [*range(300)]


def test_one_that_is_released_while_it_is_watched_costs_nobody_anything(client: Client) -> None:
    bad = client.submit(leave_a_bad_kernel_running, 0.3)
    others = client.map(where_slowly, range(100))
    wait(others, timeout=30)
    del bad
    erred = [future for future in others if future.status == "error"]
    assert len(erred) == 1
    again = client.map(where_slowly, range(100, 150))
    assert [number for number, _ in client.gather(again)] == [*range(100, 150)]


def test_restart_forgets_who_was_watched(client: Client) -> None:
    bad = client.submit(leave_a_bad_kernel_running, 0.2)
    noticed = client.map(where_slowly, range(40))
    wait(noticed, timeout=30)
    client.restart(timeout=30)
    assert bad.status == "cancelled"
    again = client.map(where_slowly, range(40))
    assert [number for number, _ in client.gather(again)] == [*range(40)]


# -- in this process, where what happens when is known


def run(
    monitor: Monitor,
    key: Hashable,
    device: int,
    fn: Callable[..., Any],
    *args: object,
    watched: bool = False,
) -> Any:
    task = DeviceTask(
        Task(key, fn, *args), Device(device), asked_for=False, watched=watched, monitor=monitor
    )
    return task({})


def run_watched(monitor: Monitor, key: Hashable, device: int, fn: Any, *args: object) -> Any:
    return run(monitor, key, device, fn, *args, watched=True)


def test_a_watched_task_that_is_well_is_waited_for_and_returns(monitored: Monitored) -> None:
    monitor, failures = monitored
    machine = driver.backend().machine
    assert machine is not None
    assert run_watched(monitor, "one", 0, str, 1) == "1"
    assert machine.faults.calls["cuCtxSynchronize"] == 2  # before it and after it

    async def later(value: int) -> str:
        await asyncio.sleep(0)
        return str(value)

    assert asyncio.run(run_watched(monitor, ("two", 0), 0, later, 2)) == "2"
    assert machine.faults.calls["cuCtxSynchronize"] == 4
    assert not failures
    assert not monitor.watch.running()


def test_who_notices_while_a_watched_task_runs_is_run_again(monitored: Monitored) -> None:
    monitor, failures = monitored
    broken, noticed = threading.Event(), threading.Event()

    def break_it(data: object) -> None:
        poison(0)
        broken.set()
        assert noticed.wait(10)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_watched, monitor, "bad", 0, break_it, None)
        assert broken.wait(10)
        with pytest.raises(Reschedule):
            run(monitor, "other", 1, str, 1)
        noticed.set()
        error = running.exception(10)
    assert isinstance(error, DeviceFailedError)
    assert error.suspects == ("bad on cuda:0",)
    (failure,) = failures
    assert set(failure.errors) == {"bad"}
    assert set(failure.suspects) == {"bad", "other"}


def test_what_was_left_running_before_a_watched_task_is_not_its_fault(monitored: Monitored) -> None:
    monitor, failures = monitored
    run(monitor, "left", 0, poison, 0.1)
    with pytest.raises(Reschedule):
        run_watched(monitor, "innocent", 0, str, 1)
    (failure,) = failures
    assert not failure.errors, "the other one is a suspect now, and is found when it is run again"
    assert set(failure.suspects) == {"innocent", "left"}


def test_a_device_that_fails_with_nobody_there_costs_who_notices(monitored: Monitored) -> None:
    monitor, failures = monitored
    poison(0)
    with pytest.raises(DeviceFailedError):  # else it would be run again for ever
        run_watched(monitor, "innocent", 0, str, 1)
    assert set(failures[0].errors) == {"innocent"}


def test_a_device_that_is_gone_is_the_fault_of_no_watched_task_elsewhere(
    monitored: Monitored,
) -> None:
    monitor, failures = monitored
    machine = driver.backend().machine
    assert machine is not None

    def lose_another(data: object) -> str:
        def lose(data: object) -> None:
            machine.gpus[1].lost = True

        with pytest.raises(DeviceFailedError) as caught:
            run(monitor, "there", 1, lose, None)
        assert caught.value.lost
        return "well"

    assert run_watched(monitor, "innocent", 0, lose_another, None) == "well"
    assert set(failures[0].errors) == {"there"}


def test_watched_tasks_run_one_at_a_time(monitored: Monitored) -> None:
    monitor, _ = monitored
    at_once: list[int] = []

    def count(seconds: float) -> None:
        at_once.append(len(monitor.watch.running()))
        time.sleep(seconds)

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(run_watched, monitor, str(n), n, count, 0.05) for n in range(4)]
        for call in calls:
            call.result(10)
    assert at_once == [1, 1, 1, 1]


def test_a_watched_task_that_waits_for_another_is_not_waited_for_by_it() -> None:
    watch = Watch(turn_s=0.2)

    def turn(key: str) -> float:
        began = time.monotonic()
        for _ in watch.turns(key, lambda: None):
            time.sleep(0.005)
        return time.monotonic() - began

    assert turn("outer") < 0.1
    assert 0.2 <= turn("inner of one that kept its thread") < 2
    watch.ended("inner of one that kept its thread")
    watch.seceded("outer")
    assert turn("inner of one that seceded") < 0.1
    watch.close()
    assert turn("after the plugin has gone") < 0.1


def wait_for_others(numbers: list[int]) -> int:
    with worker_client() as client:
        return sum(client.gather(client.map(double, numbers)))


def double(number: int) -> int:
    return 2 * number


def test_a_watched_task_can_wait_for_watched_ones_in_a_cluster(client: Client) -> None:
    with dask.annotate(**{WATCHED: True}):
        inner = client.map(double, range(4), pure=False)
        outer = client.submit(wait_for_others, [1, 2, 3])
        more = client.map(where_slowly, range(4))
    assert outer.result(timeout=30) == 12
    assert client.gather(inner) == [0, 2, 4, 6]
    assert [number for number, _ in client.gather(more)] == [*range(4)]


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
        with dask.annotate(device=0, **{WATCHED: True}):
            cancelled = client.submit(secede_once_cancelled, "cancelled", key="cancelled")
        while worker.state.executing_count == 0:
            await asyncio.sleep(0.01)
        await cancelled.cancel()
        with dask.annotate(device=1, **{WATCHED: True}):
            assert await asyncio.wait_for(client.submit(double, 1).result(), 10) == 2
    finally:
        _go_on.set()


class _Scheduler:
    """The part of a scheduler that is used: its tasks and workers."""

    workers = frozenset({"tcp://w"})

    def __init__(self, *keys: Hashable) -> None:
        self.tasks = {key: SimpleNamespace(annotations=None) for key in keys}


def test_only_tasks_that_are_there_are_marked_and_nothing_else_of_theirs_is_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = _Scheduler("x", ("x", 0), "y")
    shared = scheduler.tasks["x"].annotations = {"device": 1}
    keys = ["x", ("x", 0), "gone"]
    event = {"action": "device-failed", "error": "…", "suspects": keys, "worker": "tcp://w"}
    suspects.mark(scheduler, "devctx", event)
    assert scheduler.tasks["x"].annotations == {"device": 1, WATCHED: True}
    assert shared == {"device": 1}
    assert scheduler.tasks["x", 0].annotations == {WATCHED: True}
    assert scheduler.tasks["y"].annotations is None
    suspects.mark(scheduler, "another topic", {**event, "suspects": ["y"]})
    suspects.mark(scheduler, "devctx", {"level": "warning", "message": "…"})
    suspects.mark(scheduler, "devctx", "no event of ours")
    for wrong in (
        {**event, "suspects": ["y"], "worker": "tcp://another"},
        {**event, "suspects": "y"},
        {**event, "suspects": ["y"], "worker": ["tcp://w"]},
        {**event, "suspects": {"y": 1}},
        {**event, "suspects": ["y", []]},
        {"action": "device-failed"},
    ):
        caplog.clear()
        suspects.mark(scheduler, "devctx", wrong)
        assert "device-failed was refused" in caplog.text
    assert scheduler.tasks["y"].annotations is None
