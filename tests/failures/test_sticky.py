"""A device fails under a cluster: who is blamed, what is lost, and that the worker comes back."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import dask
import pytest
from cuda.bindings.driver import CUresult
from distributed import Client, Nanny, Scheduler, Status, Worker, wait

from dask_devctx import (
    Device,
    DeviceFailedError,
    DeviceNotFoundError,
    DevicePlugin,
    LocalDeviceCluster,
    devices,
    driver,
    report,
)
from dask_devctx.cuda.scope import open_scopes
from dask_devctx.simulated_array import SimulatedArray

ILLEGAL_ADDRESS = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


def faults() -> Any:
    machine = driver.backend().machine
    assert machine is not None
    return machine.faults


def where_slowly(number: int, seconds: float = 0.02) -> tuple[int, int]:
    time.sleep(seconds)
    return number, os.getpid()


def write_to_an_illegal_address(*inputs: Any) -> None:
    """As a library does it that waits for its kernel: its own exception, and a sticky error."""
    faults().poison(ILLEGAL_ADDRESS)
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def leave_a_bad_kernel_running(after_s: float) -> str:
    faults().poison(ILLEGAL_ADDRESS, after_s=after_s)
    return "looks good"


def break_soon() -> None:
    time.sleep(0.5)
    faults().poison(ILLEGAL_ADDRESS)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalDeviceCluster]:
    options = getattr(request, "param", {})
    with LocalDeviceCluster(
        n_workers=1,
        dashboard_address=":0",
        silence_logs=False,
        plugin=DevicePlugin(**options),
    ) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalDeviceCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client


def worker_pid(client: Client) -> int:
    (pid,) = client.run(os.getpid).values()
    return int(pid)


def test_the_task_is_blamed_the_others_complete_and_the_worker_comes_back(client: Client) -> None:
    before = worker_pid(client)
    done = client.map(where_slowly, range(20))
    wait(done)
    bad = client.submit(write_to_an_illegal_address)
    others = client.map(where_slowly, range(20, 60))

    with pytest.raises(DeviceFailedError) as caught:
        bad.result(timeout=30)

    error = caught.value
    assert error.status == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert error.code == 700
    assert error.uuid in {device.uuid for device in map(Device, range(4))}
    assert error.suspects[0].startswith(bad.key)
    assert isinstance(error.__cause__, RuntimeError)
    assert "illegal memory access" in str(error.__cause__)

    results = client.gather(done + others)
    assert [number for number, _ in results] == list(range(60))
    # What the failed process held was made again: nothing of it was handed on.
    assert before not in {pid for _, pid in results}
    assert worker_pid(client) != before


@pytest.mark.parametrize("cluster", [{"devices": [0], "synchronize": True}], indirect=True)
def test_a_kernel_that_fails_later_is_blamed_exactly_when_devices_are_waited_for(
    client: Client,
) -> None:
    first = client.map(where_slowly, range(5))
    wait(first)
    bad = client.submit(leave_a_bad_kernel_running, 0.3)
    after = client.map(where_slowly, range(5, 10))
    with pytest.raises(DeviceFailedError) as caught:
        bad.result(timeout=30)
    assert caught.value.suspects == (f"{bad.key} on cuda:0",)
    assert caught.value.synchronized
    assert [number for number, _ in client.gather(first + after)] == list(range(10))


def test_tasks_that_are_long_done_are_no_suspects(client: Client) -> None:
    wait(client.map(where_slowly, range(8)))  # the last of each device, too
    time.sleep(3)
    with pytest.raises(DeviceFailedError) as caught:
        client.submit(write_to_an_illegal_address, key="bad").result(timeout=30)
    (suspect,) = caught.value.suspects
    assert suspect.startswith("bad on ")


def test_what_was_in_the_failed_process_is_computed_again_for_its_dependents(
    client: Client,
) -> None:
    source = client.submit(where_slowly, 1)
    wait(source)
    bad = client.submit(write_to_an_illegal_address, source)
    dependent = client.submit(lambda value: value, source)
    assert isinstance(bad.exception(timeout=30), DeviceFailedError)
    assert dependent.result(timeout=30)[0] == 1
    assert source.result(timeout=30)[1] == worker_pid(client)


def test_a_task_that_always_kills_ends_as_an_error(client: Client) -> None:
    bad = client.submit(write_to_an_illegal_address, retries=2)
    assert isinstance(bad.exception(timeout=60), DeviceFailedError)
    assert client.submit(where_slowly, 1).result(timeout=30)[0] == 1


class Model:
    """An actor whose methods break its device."""

    def well(self) -> int | None:
        current = Device.current()
        return None if current is None else current.device_id

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


@pytest.mark.parametrize("method", ["breaks", "breaks_later"])
def test_an_actor_whose_method_breaks_the_device_is_named(client: Client, method: str) -> None:
    before = worker_pid(client)
    done = client.map(where_slowly, range(10))
    wait(done)
    with dask.annotate(device=1):
        future = client.submit(Model, actor=True)
    actor = future.result(timeout=30)
    assert actor.well().result(timeout=30) == 1
    with pytest.raises(DeviceFailedError) as caught:
        getattr(actor, method)().result(timeout=30)
    assert caught.value.suspects[0] == f"{future.key} on cuda:1"
    assert [number for number, _ in client.gather(done)] == list(range(10))
    assert worker_pid(client) != before


def test_a_method_beside_a_task_that_breaks_the_device_is_not_run_again(
    client: Client, tmp_path: Path
) -> None:
    with dask.annotate(device=1):
        actor = client.submit(Model, actor=True).result(timeout=30)
    under_way = actor.count(str(tmp_path), 1.0)
    while not list(tmp_path.iterdir()):
        time.sleep(0.01)
    with dask.annotate(device=0):
        bad = client.submit(write_to_an_illegal_address)
    with pytest.raises(DeviceFailedError) as caught:
        under_way.result(timeout=30)
    assert {suspect.partition(" on ")[0] for suspect in caught.value.suspects} == {
        actor.key,
        bad.key,
    }
    assert "this actor's state is lost" in str(caught.value)
    error = bad.exception(timeout=60)
    assert isinstance(error, DeviceFailedError)
    assert error.suspects == (f"{bad.key} on cuda:0",)
    assert len(list(tmp_path.iterdir())) == 1


def test_who_reads_a_property_that_breaks_the_device_is_told(client: Client) -> None:
    with dask.annotate(device=1):
        future = client.submit(Model, actor=True)
    actor = future.result(timeout=30)
    with pytest.raises(DeviceFailedError) as caught:
        actor.breaks_when_read  # noqa: B018
    assert caught.value.suspects == (f"{future.key} on cuda:1",)


def test_who_breaks_the_device_with_client_run_is_told(client: Client) -> None:
    before = worker_pid(client)
    with dask.annotate(device=1):
        done = client.submit(where_slowly, 1)
        wait(done)
    time.sleep(1.5)  # its work is known to be done
    with pytest.raises(DeviceFailedError) as caught:
        client.run(write_to_an_illegal_address)
    (suspect,) = caught.value.suspects
    assert suspect.startswith("a function of client.run")
    assert done.result(timeout=30)[0] == 1
    assert worker_pid(client) != before


def test_the_traceback_is_that_of_the_task(client: Client) -> None:
    bad = client.submit(write_to_an_illegal_address)
    assert isinstance(bad.exception(timeout=30), DeviceFailedError)
    names = [frame.name for frame in traceback.extract_tb(bad.traceback())]
    assert names[0] == "write_to_an_illegal_address"
    with dask.annotate(device=99):
        refused = client.submit(where_slowly, 1)
    assert isinstance(refused.exception(timeout=30), DeviceNotFoundError)
    assert not traceback.extract_tb(refused.traceback()), "no code of the task is part of it"


def test_a_worker_that_is_killed_in_the_middle_of_a_task_comes_back(client: Client) -> None:
    before = worker_pid(client)
    running = client.map(where_slowly, range(12), seconds=0.5)
    time.sleep(0.3)
    os.kill(before, signal.SIGKILL)
    assert [number for number, _ in client.gather(running)] == list(range(12))
    assert worker_pid(client) != before
    assert client.submit(lambda: len(open_scopes())).result() == 1
    (lost,) = report(client).lost
    assert {*lost.uuids} == {device.uuid for device in devices()}
    assert lost.tasks + lost.results == 12
    assert f"worker {lost.worker} with cuda:0, cuda:1, cuda:2, cuda:3; " in str(report(client))


def test_restart_while_tasks_run(client: Client) -> None:
    before = worker_pid(client)
    abandoned = client.map(where_slowly, range(12), seconds=0.5)
    time.sleep(0.2)
    client.restart(timeout=30)
    assert {future.status for future in abandoned} == {"cancelled"}
    assert worker_pid(client) != before
    assert client.submit(lambda: Device.current().device_id).result() in range(4)


@asynccontextmanager
async def without_a_nanny() -> AsyncIterator[tuple[Scheduler, Worker, Client]]:
    """A worker that has the plugin and no nanny."""
    async with (
        Scheduler(dashboard_address=":0", port=0) as scheduler,
        Worker(scheduler.address) as worker,
        Client(scheduler.address, asynchronous=True) as client,
    ):
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
    """The worker closes once, and the suspect is watched on the next one."""
    async with without_a_nanny() as (_, worker, client):
        bad = client.submit(break_soon, key="bad")
        while not worker.state.executing_count:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(worker.close(), 20)
        await asyncio.sleep(1)
        assert worker.status is Status.closed
        assert bad.status == "pending"
    assert [one for one in caplog.records if "Task exception" in one.getMessage()] == []
    assert "has no nanny" not in caplog.text


@in_a_loop
async def test_who_called_an_actor_is_told_before_its_worker_leaves() -> None:
    async with (
        Scheduler(dashboard_address=":0", port=0) as scheduler,
        Worker(scheduler.address) as worker,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        execute = worker.handlers["actor_execute"]

        async def execute_slowly(**kwargs: Any) -> Any:
            answer = await execute(**kwargs)
            await asyncio.sleep(1.0)  # as on a machine that is busy
            return answer

        worker.handlers["actor_execute"] = execute_slowly
        await client.register_plugin(DevicePlugin())
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


def kill_the_worker_in_a_copy(flag: str) -> int:
    """End the process with scopes of two devices open and memory allocated on both, once."""
    with Device(0):
        source = SimulatedArray.asarray([1, 2, 3])
        target = Device(1)
        with target:
            copy = source.copy_to(target)
            if not os.path.exists(flag):
                open(flag, "x").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return int(copy.sum())


def open_scopes_and_memory() -> tuple[int, int]:
    machine = driver.backend().machine
    assert machine is not None
    return len(open_scopes()), sum(gpu.used_memory for gpu in machine.gpus)


def test_a_worker_that_is_killed_in_the_middle_of_a_copy_comes_back(
    client: Client, tmp_path: Path
) -> None:
    future = client.submit(kill_the_worker_in_a_copy, str(tmp_path / "killed"))
    assert future.result(timeout=60) == 6
    assert (tmp_path / "killed").exists()
    ((scopes, used),) = client.run(open_scopes_and_memory).values()
    assert (scopes, used) == (0, 0)


def test_the_cluster_closes_while_tasks_run() -> None:
    with (
        LocalDeviceCluster(n_workers=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        pid = worker_pid(client)
        client.map(where_slowly, range(100), seconds=0.2)
        time.sleep(0.3)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
