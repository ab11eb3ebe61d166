"""A task that breaks its device after it returned errs in its second run. No other task errs."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from cuda.bindings.driver import CUresult
from distributed import Client, Future, Reschedule, get_worker, secede, wait, worker_client
from distributed.utils_test import gen_cluster

from dask_devctx import (
    Device,
    DeviceFailedError,
    DevicePlugin,
    LocalDeviceCluster,
    devices,
    driver,
    report,
)
from dask_devctx.annotations.runs import REFUSED, WATCHED
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.scheduler.suspects import SuspectTasks
from dask_devctx.worker.failures.monitor import Monitor
from dask_devctx.worker.failures.quarantine import Quarantine
from dask_devctx.worker.failures.suspects import Suspect, Suspects
from tests.failures.conftest import Monitored, as_task

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


def count_and_leave_a_bad_kernel(directory: str, after_s: float) -> str:
    (Path(directory) / str(time.monotonic_ns())).touch()
    return leave_a_bad_kernel_running(after_s)


def count_slowly(directory: str, name: str, seconds: float) -> None:
    """Leave a file; it must not be there yet."""
    (Path(directory) / name).touch(exist_ok=False)
    time.sleep(seconds)


def secede_and_break(mine: str, others: str, breaks: bool = True) -> None:
    """Break the device while both run."""
    secede()
    Path(mine).touch()
    while not os.path.exists(others):
        time.sleep(0.01)
    time.sleep(0.3)
    Path(mine).unlink()
    if breaks:
        poison(0)
    time.sleep(0.3)


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    plugin = DevicePlugin(**getattr(request, "param", {}))
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 2}),
        LocalDeviceCluster(
            n_workers=1, dashboard_address=":0", silence_logs=False, plugin=plugin
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


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


def check_found(bad: Future, *, ended: bool = True) -> None:
    error = error_in_the_end(bad)
    (suspect,) = error.suspects
    assert suspect.startswith(f"{bad.key} on cuda:")
    assert error.watched
    assert "It was watched" in str(error)
    if ended:
        assert f"This task calls {bad.key.rpartition('-')[0]}" in error.__notes__[0]


@each_kind
def test_the_task_errs_whose_kernel_broke_after_it_returned_and_no_other(
    client: Client, leave: Callable[..., Any]
) -> None:
    with dask.annotate(device=0):
        bad = client.submit(leave, 0.15)
    others = client.map(where_slowly, range(100), seconds=0.005)
    check_found(bad)
    assert [number for number, _ in client.gather(others)] == [*range(100)]


@pytest.mark.long
def test_a_task_that_does_not_end_is_reported_all_the_same(client: Client, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    with dask.annotate(device=0):
        bad = client.submit(leave_a_bad_kernel_running_and_stay, 0.2, str(ran))
    with dask.annotate(device=1):
        others = client.map(where_slowly, range(40))
    check_found(bad, ended=False)
    assert [number for number, _ in client.gather(others)] == [*range(40)]


@pytest.mark.long
def test_with_retries_it_is_run_so_often_and_nobody_else_errs(
    client: Client, tmp_path: Path
) -> None:
    with dask.annotate(device=0, retries=1):
        bad = client.submit(count_and_leave_a_bad_kernel, str(tmp_path), 0.1)
    others = client.map(where_slowly, range(60))
    check_found(bad)
    assert len(list(tmp_path.iterdir())) == 3  # once unwatched, then watched, then its retry
    assert [number for number, _ in client.gather(others)] == [*range(60)]


def test_one_whose_result_nobody_needs_is_named_in_the_log_and_not_run_again(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = client.submit(count_and_leave_a_bad_kernel, str(tmp_path), 0.3)
    key = bad.key
    bad.result(timeout=30)
    del bad
    others = client.map(where_slowly, range(60))
    assert [number for number, _ in client.gather(others)] == [*range(60)]
    assert len(list(tmp_path.iterdir())) == 1
    (log,) = [text for text in caplog.messages if "as nobody needs their results: " in text]
    assert key in log.rpartition("nobody needs their results: ")[2]
    assert "none" not in log


def test_a_task_that_must_not_run_twice_errs_and_names_all_suspects(
    client: Client, tmp_path: Path
) -> None:
    with dask.annotate(device=1, rerun=False):
        done = client.submit(count_slowly, str(tmp_path), "done", 0.0)
        wait(done, timeout=30)
        running = client.submit(count_slowly, str(tmp_path), "running", 1.5)
    with dask.annotate(device=0):
        bad = client.submit(leave_a_bad_kernel_running, 0.5)
    for future in (running, done):
        error = error_in_the_end(future)
        assert {suspect.partition(" on ")[0] for suspect in error.suspects} == {
            running.key,
            bad.key,
        }
        assert "rerun=False" in str(error)
    check_found(bad)


def send_messages_each(seconds: float) -> None:
    get_worker().batched_stream.interval = seconds


def test_a_task_that_must_not_run_twice_may_end_just_before_its_worker_leaves(
    client: Client, tmp_path: Path
) -> None:
    """The scheduler hears of its end after it hears of the failure."""
    assert client.submit(send_messages_each, 1.5).result(timeout=30) is None
    with dask.annotate(device=1, priority=1):
        client.submit(str, 1).result(timeout=30)  # the next message goes much later
        with dask.annotate(rerun=False):
            done = client.submit(count_slowly, str(tmp_path), "done", 0.1)
    with dask.annotate(device=1):
        bad = client.submit(leave_a_bad_kernel_running, 0.1)
    error = error_in_the_end(done)
    assert "its result was lost, and it says rerun=False" in str(error)
    assert error_in_the_end(bad).suspects[0].startswith(bad.key)
    found = report(client)
    assert [one.uuid for one in found.failures] == [Device(1).uuid] * len(found.failures)
    assert found.failures[-1].suspects == error_in_the_end(bad).suspects
    said = "".join(str(found).split())  # the lines are wrapped
    assert f"CUDA_ERROR_ILLEGAL_ADDRESS;suspects:{bad.key}oncuda:1" in said


def test_rerun_takes_true_and_false_only(client: Client) -> None:
    with dask.annotate(rerun="no"), pytest.raises(TypeError, match="'rerun' is True or False"):
        client.submit(str, 1).result(timeout=30)
    with dask.annotate(rerun=True):
        assert client.submit(str, 2).result(timeout=30) == "2"


@pytest.mark.long
@pytest.mark.parametrize("client", [{"devices": [0, 1]}], indirect=True)
def test_tasks_that_cannot_be_told_apart_err_after_their_last_run(
    client: Client, tmp_path: Path
) -> None:
    """Both secede, so that nobody waits for them, and both run whenever the device fails."""
    flags = [str(tmp_path / name) for name in ("first", "second")]
    with dask.annotate(device=0):
        bad = client.submit(secede_and_break, *flags)
    with dask.annotate(device=1):
        beside = client.submit(secede_and_break, *reversed(flags), False)
    for future in (bad, beside):
        error = error_in_the_end(future, 100)
        assert {suspect.partition(" on ")[0] for suspect in error.suspects} == {
            bad.key,
            beside.key,
        }
        assert "a device failed in each of its 3 runs" in str(error)
    assert client.submit(str, 1).result(timeout=30) == "1"


@pytest.mark.long
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
    watched: int = 0,
) -> Any:
    return as_task(monitor, fn, *args, key=key, device=device, watched=watched)()


def run_watched(monitor: Monitor, key: Hashable, device: int, fn: Any, *args: object) -> Any:
    return run(monitor, key, device, fn, *args, watched=1)


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
    assert not monitor.quarantine.taken


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


def test_a_task_that_seceded_just_before_its_end_is_waited_for_in_its_next_run(
    monitored: Monitored,
) -> None:
    monitor, _ = monitored
    began, ended = threading.Event(), threading.Event()
    run(monitor, "again", 0, str)
    monitor.seceded("again")  # the worker learns it on its event loop
    with ThreadPoolExecutor(2) as pool:
        pool.submit(run, monitor, "again", 0, partial(stay, began, ended))
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


@pytest.mark.parametrize("code", [214, 220, 226])
def test_a_failure_of_the_hardware_is_the_fault_of_nobody(monitored: Monitored, code: int) -> None:
    monitor, failures = monitored
    machine = driver.backend().machine
    assert machine is not None

    def fail() -> None:
        machine.faults.poison(CUresult(code))

    with pytest.raises(Reschedule):
        run_watched(monitor, "there", 0, fail)
    (failure,) = failures
    assert not failure.errors
    assert not failure.suspects
    assert failure.bystanders == ("there",)


def test_a_device_that_is_gone_is_the_fault_of_no_task(monitored: Monitored) -> None:
    monitor, failures = monitored
    machine = driver.backend().machine
    assert machine is not None

    def lose() -> None:
        machine.gpus[1].lost = True

    with pytest.raises(Reschedule):
        run(monitor, "there", 1, lose)
    (failure,) = failures
    assert failure.error.lost
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


def test_a_failure_of_the_hardware_is_nobodys_fault_without_such_a_scheduler(
    machine: SimulatedMachine, unmarked: Monitor
) -> None:
    with pytest.raises(Reschedule):
        run(unmarked, "there", 0, machine.faults.poison, CUresult.CUDA_ERROR_ECC_UNCORRECTABLE)


def test_watched_tasks_run_one_at_a_time(monitored: Monitored) -> None:
    monitor, _ = monitored
    at_once: list[int] = []
    running: list[int] = []

    def count(number: int, seconds: float) -> None:
        running.append(number)
        at_once.append(len(running))
        time.sleep(seconds)
        running.remove(number)

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(run_watched, monitor, str(n), n, count, n, 0.05) for n in range(4)]
        for call in calls:
            call.result(10)
    assert at_once == [1, 1, 1, 1]


def test_nobody_waits_without_end_for_a_watched_task() -> None:
    suspects, running = Suspects(), Suspect("running", Device(0))
    quarantine = Quarantine(suspects, patience_s=0.2)

    def turn(key: str, run: int = 1) -> float:
        began = time.monotonic()
        for _ in quarantine.turn(key, run, lambda: None):
            time.sleep(0.005)
        return time.monotonic() - began

    suspects.started(running)
    assert 0.19 <= turn("waits for a running one") < 2
    suspects.ended(running)
    assert 0.19 <= turn("inner of one that kept its thread", 0) < 2
    quarantine.ended("waits for a running one")
    assert turn("outer", 2) < 0.1
    quarantine.seceded("outer")
    assert turn("inner of one that seceded") < 0.1
    quarantine.ended("inner of one that seceded")
    assert turn("in its second run", 2) < 0.1
    assert turn("waits ten times longer", 0) >= 1.5
    quarantine.close()
    assert turn("after the plugin has gone") < 0.1


def wait_for_others(numbers: list[int]) -> int:
    with worker_client() as client:
        return sum(client.gather(client.map(double, numbers)))


def double(number: int) -> int:
    return 2 * number


def test_a_watched_task_can_wait_for_watched_ones_in_a_cluster(client: Client) -> None:
    with dask.annotate(**{WATCHED: [1, 3]}):
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
        with dask.annotate(device=0, **{WATCHED: [1, 3]}):
            cancelled = client.submit(secede_once_cancelled, "cancelled", key="cancelled")
        while worker.state.executing_count == 0:
            await asyncio.sleep(0.01)
        await cancelled.cancel()
        with dask.annotate(device=1, **{WATCHED: [1, 3]}):
            assert await asyncio.wait_for(client.submit(double, 1).result(), 10) == 2
    finally:
        _go_on.set()


async def double_later(number: int) -> int:
    return 2 * number


def wait_to_go_on() -> None:
    _go_on.wait(30)


@pytest.mark.parametrize("function", [double, double_later], ids=["function", "coroutine"])
@gen_cluster(client=True, nthreads=[("127.0.0.1", 4)], timeout=60)
async def test_nobody_waits_for_a_watched_task_that_was_cancelled_before_its_turn(
    client: Any, scheduler: Any, worker: Any, function: Callable[[int], Any]
) -> None:
    _go_on.clear()
    await client.register_plugin(DevicePlugin())
    quarantine = worker.plugins["devctx"].extension.monitor.quarantine
    try:
        with dask.annotate(device=0):
            long = client.submit(wait_to_go_on)
        while worker.state.executing_count == 0:
            await asyncio.sleep(0.01)
        with dask.annotate(device=1, **{WATCHED: [1, 3]}):
            cancelled = client.submit(function, 2, key="cancelled")
        while not quarantine.taken:
            await asyncio.sleep(0.01)
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
    quarantine = worker.plugins["devctx"].extension.monitor.quarantine
    assert not list(quarantine.turn("watched", 1, lambda: None))
    waiting = [client.submit(double_later, 1)]
    while worker.state.executing_count == 0:
        await asyncio.sleep(0.01)
    await asyncio.wait_for(worker.close(), 20)  # dask waits half a minute for its coroutines
    assert waiting[0].status != "error"


WORKER = "tcp://w"
FIELDS = ["cuda:0", "GPU-1", "CUDA_ERROR_ASSERT", 710, ["x on cuda:0"], False, False, False, ""]


class _Scheduler:
    """The part of a scheduler that is used: its tasks and workers."""

    allowed_failures = 2

    def __init__(self, *keys: Hashable, **annotations: Any) -> None:
        self.tasks = {
            key: SimpleNamespace(key=key, annotations=dict(annotations) or None, who_has={WORKER})
            for key in keys
        }
        self.workers = {WORKER: SimpleNamespace(has_what=[])}


def event(*suspects: Hashable, **others: Any) -> dict[str, Any]:
    named = {"suspects": [*suspects], "bystanders": [], "erred": []}
    return {"action": "device-failed", "fields": FIELDS, "worker": WORKER, **named, **others}


def test_only_tasks_that_are_there_are_marked_and_nothing_else_of_theirs_is_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = _Scheduler("x", ("x", 0), "y")
    shared = scheduler.tasks["x"].annotations = {"device": 1}
    marks = SuspectTasks(scheduler)  # type: ignore[arg-type]
    marks.read_event("another topic", event("y"))
    marks.read_event("devctx", {"level": "warning", "message": "…"})
    marks.read_event("devctx", "no event of ours")
    for wrong in (
        event("y", worker="tcp://another"),
        event("y", worker=["tcp://w"]),
        event("y", []),
        event(suspects="y"),
        event(suspects={"y": 1}),
        event("y", bystanders=None),
        event("y", fields=FIELDS[:3]),
        event("y", fields=[*FIELDS[:3], "710", *FIELDS[4:]]),
        event("y", fields=[*FIELDS[:4], [1], *FIELDS[5:]]),
        {"action": "device-failed"},
    ):
        caplog.clear()
        marks.read_event("devctx", wrong)
        assert "device-failed was refused" in caplog.text
    assert scheduler.tasks["y"].annotations is None
    marks.read_event("devctx", event("x", ("x", 0), "gone"))
    assert scheduler.tasks["x"].annotations == {"device": 1, WATCHED: [1, 2]}
    assert shared == {"device": 1}
    assert scheduler.tasks["x", 0].annotations == {WATCHED: [1, 2]}
    assert scheduler.tasks["y"].annotations is None
    assert "as nobody needs their results: gone" in caplog.text
    caplog.clear()
    marks.worker_left(WORKER)
    marks.failed(
        WORKER, event("a function of client.run (1)", erred=["a function of client.run (1)"])
    )
    assert caplog.messages[0].endswith("Tasks that err: a function of client.run (1)")


def test_a_task_is_watched_so_often_as_failures_are_allowed_and_then_refused() -> None:
    scheduler = _Scheduler("x", "beside", "erred")
    marks = SuspectTasks(scheduler)  # type: ignore[arg-type]
    told = event("x", "erred", bystanders=["beside"], erred=["erred"])
    for run in (1, 2):
        for _ in range(2):  # the event and the message say the same
            marks.failed(WORKER, told)
        for key in ("x", "beside"):
            assert scheduler.tasks[key].annotations == {WATCHED: [run, 2]}
        assert scheduler.tasks["erred"].annotations == {WATCHED: [1, 2]}
        marks.worker_left(WORKER)
    marks.failed(WORKER, told)
    for key in ("x", "beside"):
        *fields, why = scheduler.tasks[key].annotations[REFUSED]
        assert DeviceFailedError(*fields, why).suspects == ("x on cuda:0",)
        assert "in each of its 3 runs" in why
        marks.moved(key, "erred")  # if a client asks for it again, it runs
        assert scheduler.tasks[key].annotations == {WATCHED: [2, 2]}


def test_tasks_that_must_not_run_twice_are_refused_if_they_ran_or_their_result_is_lost() -> None:
    scheduler = _Scheduler("suspect", "waited", "lost", "elsewhere", "here too", rerun=False)
    had = [scheduler.tasks[key] for key in ("lost", "here too")]
    scheduler.workers[WORKER].has_what = had
    scheduler.tasks["here too"].who_has = {WORKER, "tcp://v"}
    marks = SuspectTasks(scheduler)  # type: ignore[arg-type]
    marks.failed(WORKER, event("suspect", bystanders=["waited"]))
    refused = [key for key, ts in scheduler.tasks.items() if REFUSED in ts.annotations]
    assert refused == ["suspect", "lost"]
    assert WATCHED in scheduler.tasks["waited"].annotations


def test_one_that_must_not_run_twice_is_refused_if_its_worker_failed_before_its_end_was_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = _Scheduler("late", "elsewhere", "later", rerun=False)
    marks = SuspectTasks(scheduler)  # type: ignore[arg-type]
    marks.failed(WORKER, event("guilty"))
    marks.moved("late", "memory", WORKER)
    marks.moved("elsewhere", "memory", "tcp://v")
    marks.worker_left(WORKER)
    marks.moved("later", "memory", WORKER)  # another worker has its address
    assert [key for key, ts in scheduler.tasks.items() if REFUSED in ts.annotations] == ["late"]
    assert "err if they are needed: late" in caplog.text
