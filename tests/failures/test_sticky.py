"""A device fails under a cluster: who is blamed, what is lost, and that the worker comes back."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, Future, Nanny, Scheduler, Status, Worker, get_worker, secede, wait
from distributed.scheduler import KilledWorker
from distributed.utils_test import async_poll_for, poll_for

from dask_devctx import Device, DeviceFailedError, DeviceNotFoundError, DevicePlugin, report
from dask_devctx.cuda.scope import open_scopes
from tests.distributed.devices import here, started, submit_on
from tests.distributed.peers import poison
from tests.failures.conftest import failures, leave_a_bad_kernel_running, where_slowly
from tests.python import python


def write_to_an_illegal_address(*inputs: Any) -> None:
    """As a library does it that waits for its kernel: its own exception, and a sticky error."""
    poison()
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def break_soon() -> None:
    time.sleep(0.5)
    poison()


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


def worker_pid(client: Client) -> int:
    (pid,) = client.run(os.getpid).values()
    return int(pid)


def test_the_task_is_blamed_the_others_complete_and_the_worker_comes_back(apart: Client) -> None:
    before = worker_pid(apart)
    done = apart.map(where_slowly, range(20))
    wait(done)
    bad = apart.submit(write_to_an_illegal_address)
    others = apart.map(where_slowly, range(20, 60))

    with pytest.raises(DeviceFailedError) as caught:
        bad.result(timeout=30)

    error = caught.value
    assert error.status == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert error.code == 700
    assert error.uuid in {device.uuid for device in map(Device, range(4))}
    assert error.suspects[0].startswith(bad.key)
    assert isinstance(error.__cause__, RuntimeError)
    assert "illegal memory access" in str(error.__cause__)

    results = apart.gather(done + others)
    assert [number for number, _ in results] == list(range(60))
    # What the failed process held was made again: nothing of it was handed on.
    assert before not in {pid for _, pid in results}
    assert worker_pid(apart) != before
    said = " ".join(str(report(apart)).split())
    where = f"the last: {error.device} ({error.uuid}) failed with {error.status} (700) on tcp://"
    assert where in said


@pytest.mark.parametrize("apart", [{"devices": [0], "synchronize": True}], indirect=True)
def test_a_kernel_that_fails_later_is_blamed_exactly_when_devices_are_waited_for(
    apart: Client,
) -> None:
    first = apart.map(where_slowly, range(5))
    wait(first)
    bad = apart.submit(leave_a_bad_kernel_running, 0.3)
    after = apart.map(where_slowly, range(5, 10))
    with pytest.raises(DeviceFailedError) as caught:
        bad.result(timeout=30)
    assert caught.value.suspects == (f"{bad.key} on cuda:0",)
    assert [number for number, _ in apart.gather(first + after)] == list(range(10))


def suspected(error: DeviceFailedError) -> set[str]:
    return {suspect.partition(" on ")[0] for suspect in error.suspects}


class Model:
    """An actor whose methods break its device."""

    def well(self) -> int | None:
        return here()

    def breaks(self) -> None:
        write_to_an_illegal_address()

    async def breaks_later(self) -> str:
        await asyncio.sleep(0.01)
        return leave_a_bad_kernel_running(0)

    @property
    def breaks_when_read(self) -> None:
        write_to_an_illegal_address()

    def count(self, directory: str, seconds: float) -> None:
        (Path(directory) / str(time.monotonic_ns())).touch()
        time.sleep(seconds)


@pytest.mark.parametrize("method", ["breaks", "breaks_later", "breaks_when_read"])
def test_an_actor_whose_method_breaks_the_device_is_named(apart: Client, method: str) -> None:
    before = worker_pid(apart)
    done = apart.map(where_slowly, range(10))
    wait(done)
    future = submit_on(apart, 1, Model, actor=True)
    actor = future.result(timeout=30)
    assert actor.well().result(timeout=30) == 1
    with pytest.raises(DeviceFailedError) as caught:
        getattr(actor, method)().result(timeout=30)  # a property breaks it when it is read
    assert caught.value.suspects[0] == f"{future.key} on cuda:1"
    assert [number for number, _ in apart.gather(done)] == list(range(10))
    assert worker_pid(apart) != before


def test_a_method_beside_a_task_that_breaks_the_device_is_not_run_again(
    apart: Client, tmp_path: Path
) -> None:
    actor = submit_on(apart, 1, Model, actor=True).result(timeout=30)
    under_way = actor.count(str(tmp_path), 1.0)
    poll_for(lambda: any(tmp_path.iterdir()), timeout=30)
    bad = submit_on(apart, 0, write_to_an_illegal_address)
    with pytest.raises(DeviceFailedError) as caught:
        under_way.result(timeout=30)
    assert suspected(caught.value) == {actor.key, bad.key}
    assert "this actor's state is lost" in str(caught.value)
    error = bad.exception(timeout=60)
    assert isinstance(error, DeviceFailedError)
    assert error.suspects == (f"{bad.key} on cuda:0",)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_traceback_is_that_of_the_task(apart: Client) -> None:
    bad = apart.submit(write_to_an_illegal_address)
    assert isinstance(bad.exception(timeout=30), DeviceFailedError)
    names = [frame.name for frame in traceback.extract_tb(bad.traceback())]
    assert names[0] == "write_to_an_illegal_address"
    refused = submit_on(apart, 99, where_slowly, 1)
    assert isinstance(refused.exception(timeout=30), DeviceNotFoundError)
    assert not traceback.extract_tb(refused.traceback()), "no code of the task is part of it"


@asynccontextmanager
async def without_a_nanny(
    before: Callable[[Worker], object] = lambda worker: None,
) -> AsyncIterator[tuple[Scheduler, Worker, Client]]:
    """A worker that has the plugin and no nanny."""
    async with (
        Scheduler(dashboard_address=":0", port=0) as scheduler,
        Worker(scheduler.address) as worker,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        before(worker)
        await client.register_plugin(DevicePlugin())
        yield scheduler, worker, client


@in_a_loop
async def test_without_a_nanny_the_worker_closes_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with without_a_nanny() as (scheduler, worker, client):
        bad = client.submit(write_to_an_illegal_address)
        error = await bad.exception()
        assert isinstance(error, DeviceFailedError)
        await asyncio.wait_for(worker.finished(), 20)
        assert not scheduler.workers
    assert "has no nanny" in caplog.text
    assert not open_scopes()


@in_a_loop
async def test_a_device_that_fails_while_its_worker_closes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The worker closes once, and the suspect runs isolated on the next one."""
    async with without_a_nanny() as (_, worker, client):
        bad = client.submit(break_soon, key="bad")
        await async_poll_for(lambda: worker.state.executing_count, timeout=30)
        await asyncio.wait_for(worker.close(), 20)
        await asyncio.sleep(1)
        assert worker.status is Status.closed
        assert bad.status == "pending"
    assert [one for one in caplog.records if "Task exception" in one.getMessage()] == []
    assert "has no nanny" not in caplog.text


@in_a_loop
async def test_who_called_an_actor_is_told_before_its_worker_leaves() -> None:
    def answer_slowly(worker: Worker) -> None:
        execute = worker.handlers["actor_execute"]

        async def execute_slowly(**kwargs: Any) -> Any:
            answer = await execute(**kwargs)
            await asyncio.sleep(1.0)  # as on a machine that is busy
            return answer

        worker.handlers["actor_execute"] = execute_slowly

    async with without_a_nanny(answer_slowly) as (_, worker, client):
        model = await client.submit(Model, actor=True)
        with pytest.raises(DeviceFailedError, match="ILLEGAL_ADDRESS"):
            await model.breaks()
        await asyncio.wait_for(worker.finished(), 20)


@in_a_loop
async def test_the_scheduler_goes_while_tasks_run() -> None:
    async with (
        Scheduler(dashboard_address=":0", port=0) as scheduler,
        Nanny(scheduler.address, nthreads=8) as nanny,
    ):
        async with Client(scheduler.address, asynchronous=True) as client:
            await client.register_plugin(DevicePlugin())
            client.map(where_slowly, range(8), seconds=0.3)
            await asyncio.sleep(0.2)
            process = nanny.process.process
            await scheduler.close()
        await asyncio.wait_for(nanny.finished(), 30)
        assert not process.is_alive()


def test_the_cluster_closes_while_tasks_run() -> None:
    with started(n_workers=1, processes=True) as client:
        pid = worker_pid(client)
        client.map(where_slowly, range(100), seconds=0.2)
        time.sleep(0.3)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# -- a task that breaks its device after it returned errs in its second run. No other task errs


def count_and_leave_a_bad_kernel(directory: str, after_s: float) -> str:
    (Path(directory) / str(time.monotonic_ns())).touch()
    return leave_a_bad_kernel_running(after_s)


async def count_and_leave_a_bad_kernel_later(directory: str, after_s: float) -> str:
    await asyncio.sleep(0.01)
    return count_and_leave_a_bad_kernel(directory, after_s)


def count_and_stay(directory: str, after_s: float) -> str:
    """The second time, go on in Python for longer than anybody waits for it."""
    count_and_leave_a_bad_kernel(directory, after_s)
    if len(list(Path(directory).iterdir())) > 1:
        time.sleep(60)
    return "looks good"


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


def error_in_the_end(future: Future, timeout: float = 60) -> DeviceFailedError:
    """Return the error of a future that may count as finished for a while yet."""
    poll_for(lambda: future.status == "error", timeout)
    error = future.exception()
    assert isinstance(error, DeviceFailedError)
    return error


def check_found(bad: Future) -> None:
    error = error_in_the_end(bad)
    (suspect,) = error.suspects
    assert suspect.startswith(f"{bad.key} on cuda:")
    assert error.watched
    assert "It was watched" in str(error)


@pytest.mark.parametrize(
    ("function", "retries", "runs"),
    [
        (count_and_leave_a_bad_kernel, 0, 2),
        (count_and_leave_a_bad_kernel_later, 0, 2),
        pytest.param(count_and_stay, 0, 2, marks=pytest.mark.long),
        # once, then isolated, then its retry
        pytest.param(count_and_leave_a_bad_kernel, 1, 3, marks=pytest.mark.long),
    ],
)
def test_the_task_errs_whose_kernel_broke_after_it_returned_and_no_other(
    apart: Client, tmp_path: Path, function: Callable[..., Any], retries: int, runs: int
) -> None:
    with dask.annotate(device=0, retries=retries):
        bad = apart.submit(function, str(tmp_path), 0.15)
    others = apart.map(where_slowly, range(60))
    check_found(bad)
    assert len(list(tmp_path.iterdir())) == runs
    assert [number for number, _ in apart.gather(others)] == [*range(60)]


def test_one_whose_result_nobody_needs_is_named_in_the_log_and_not_run_again(
    apart: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = apart.submit(count_and_leave_a_bad_kernel, str(tmp_path), 0.3)
    key = bad.key
    bad.result(timeout=30)
    del bad
    others = apart.map(where_slowly, range(60))
    assert [number for number, _ in apart.gather(others)] == [*range(60)]
    assert len(list(tmp_path.iterdir())) == 1
    (log,) = [text for text in caplog.messages if "as nobody needs their results: " in text]
    assert key in log.rpartition("nobody needs their results: ")[2]
    assert "none" not in log


def test_a_task_that_must_not_run_twice_errs_and_names_all_suspects(
    apart: Client, tmp_path: Path
) -> None:
    with dask.annotate(device=1, rerun=False):
        done = apart.submit(count_slowly, str(tmp_path), "done", 0.0)
        wait(done, timeout=30)
        running = apart.submit(count_slowly, str(tmp_path), "running", 1.5)
    bad = submit_on(apart, 0, leave_a_bad_kernel_running, 0.5)
    for future in (running, done):
        error = error_in_the_end(future)
        assert suspected(error) == {running.key, bad.key}
        assert "rerun=False" in str(error)
    check_found(bad)


def test_one_that_is_killed_with_its_worker_does_not_run_again(
    apart: Client, tmp_path: Path
) -> None:
    with dask.annotate(rerun=False):
        killed = apart.submit(lambda: (tmp_path / "ran").touch(exist_ok=False) or os.abort())
    assert isinstance(killed.exception(timeout=30), KilledWorker)


def test_a_task_that_must_not_run_twice_may_end_just_before_its_worker_leaves(
    apart: Client, tmp_path: Path
) -> None:
    """The scheduler hears of its end after it hears of the failure."""
    with dask.annotate(device=1, priority=1):
        late = apart.submit(lambda: setattr(get_worker().batched_stream, "interval", 1.5))
        assert late.result(timeout=30) is None
        apart.submit(str, 1).result(timeout=30)  # the next message goes much later
        with dask.annotate(rerun=False):
            done = apart.submit(count_slowly, str(tmp_path), "done", 0.1, key="done")
    poll_for(lambda: any(apart.run(lambda dask_worker: "done" in dask_worker.data).values()), 30)
    bad = submit_on(apart, 1, leave_a_bad_kernel_running, 0.1)
    error = error_in_the_end(done)
    assert "its result was lost, and it says rerun=False" in str(error)
    assert error.not_again.startswith("its result was lost")
    assert error_in_the_end(bad).suspects[0].startswith(bad.key)
    assert {one.uuid for one in failures(apart)} == {Device(1).uuid}


@pytest.mark.long
@pytest.mark.parametrize("apart", [{"devices": [0, 1]}], indirect=True)
def test_tasks_that_cannot_be_told_apart_err_after_their_last_run(
    apart: Client, tmp_path: Path
) -> None:
    """Both secede, so that nobody waits for them, and both run whenever the device fails."""
    flags = [str(tmp_path / name) for name in ("first", "second")]
    bad = submit_on(apart, 0, secede_and_break, *flags)
    beside = submit_on(apart, 1, secede_and_break, *reversed(flags), False)
    for future in (bad, beside):
        error = error_in_the_end(future, 100)
        assert suspected(error) == {bad.key, beside.key}
        assert "a device failed in each of its 3 runs" in str(error)
    assert apart.submit(str, 1).result(timeout=30) == "1"


@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", "2", "4"])
def test_make_soak_at_a_small_size(workers: str) -> None:
    few = ("--tasks", "100", "--batch", "50", "--seed", "199", "--guilty", "1", "--faults", "10")
    done = python("-m", "tests.soak", *few, "--workers", workers)
    assert re.search(r"seed 199: 10\d tasks", done.stdout)
    assert re.search(r"  guilty +\d found\n", done.stdout)
    assert "every result right, nothing lost" in done.stdout
