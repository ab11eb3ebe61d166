"""The plugin comes and goes: on live clusters, on workers that join, while tasks run."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar

import dask
import pytest
from dask._task_spec import Task
from distributed import Event, Nanny, Worker, get_worker, worker_client
from distributed.utils_test import async_poll_for
from distributed.worker_state_machine import ComputeTaskEvent

from dask_devctx import (
    DeviceNotFoundError,
    DevicePlugin,
    DriverUnavailableError,
    SimulatedArray,
    devices,
    driver,
    report,
)
from dask_devctx.scheduler.messages import TOPIC
from dask_devctx.worker import extension
from dask_devctx.worker.run import DeviceRun as DeviceTask
from tests.conftest import no_gpus
from tests.distributed.changes import changes_of
from tests.distributed.devices import (
    acquire,
    blocks,
    current_context,
    here,
    on_cluster,
    plugin_threads,
    started,
    submit_on,
    with_plugin,
)
from tests.distributed.peers import configured


def state_of(worker: Worker) -> Any:
    return (
        dict(worker.executors),
        dict(worker.handlers),
        type(worker.state.actors),
        {key: (type(ts.run_spec), ts.annotations) for key, ts in worker.state.tasks.items()},
    )


def blocks_in_a_client(name: str) -> tuple[int | None, str, int | None]:
    with worker_client():
        Event(f"{name}-started").set()
        Event("go-on").wait()
    return here(), threading.current_thread().name, here()


async def blocks_in_a_coroutine(name: str) -> int | None:
    await Event(f"{name}-started").set()
    await Event("go-on").wait()
    return here()


class Slow:
    def where(self) -> int | None:
        return here()

    def blocks(self, name: str) -> int | None:
        return blocks(name)


def test_a_scheduler_without_dasks_extensions() -> None:
    with started(scheduler_kwargs={"extensions": {}}, devices=[1]) as client:
        assert client.submit(here).result() == 1


@on_cluster(8)
async def test_unregistering_while_tasks_run(client: Any, worker: Any) -> None:
    before = state_of(worker)
    await client.register_plugin(DevicePlugin())
    actor = await submit_on(client, 1, Slow, actor=True)
    call = actor.blocks("actor")
    plain = submit_on(client, 1, blocks, "plain")
    queued = submit_on(client, 1, here, "queued")  # behind it on its device's only thread
    inside = submit_on(client, 2, blocks_in_a_client, "inside")
    coroutine = submit_on(client, 2, blocks_in_a_coroutine, "coroutine")
    for name in ("plain", "inside", "coroutine", "actor"):
        await Event(f"{name}-started", client).wait()
    await client.unregister_worker_plugin("devctx")

    executors, handlers, actors, tasks = state_of(worker)
    assert (executors, handlers, actors) == before[:3]
    assert all(kind is not DeviceTask for kind, _ in tasks.values())
    assert all("executor" not in (annotations or {}) for _, annotations in tasks.values())
    assert await client.submit(here, "after") is None
    assert await actor.where(separate_thread=False) is None

    await Event("go-on", client).set()
    assert (await plain, await queued, await coroutine, await call) == (1, 1, 2, 1)
    device, thread, after = await inside
    assert (device, after) == (2, 2)
    assert thread.startswith("devctx")
    await async_poll_for(lambda: not plugin_threads(), timeout=10)
    assert current_context() == 0
    assert await client.submit(here, "much later") is None


permits = threading.Semaphore(0)


def permitted(number: int) -> bool:
    return permits.acquire(timeout=20)


# dask sends all, for they may run nowhere else. 8 run, so 3 or 4 wait: half of 8, or fewer.
@pytest.mark.parametrize("case", [(11, 60, 0), (12, 60, 0), (12, 0.01, 0), (12, 60, 1)])
@with_plugin(8, devices=[0])
async def test_outcomes_are_gathered_while_many_tasks_wait(
    client: Any, worker: Any, case: tuple[int, float, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    count, batch_s, priority = case
    monkeypatch.setattr("dask_devctx.dask_internals.tasks._BATCH_S", batch_s)
    first, *others = client.map(permitted, range(count), workers=worker.address, priority=priority)
    await async_poll_for(lambda: len(worker.state.tasks) == count, timeout=10)
    permits.release()
    await first  # this begins a batch
    gathered = case == (12, 60, 0)
    for one in others[:2]:
        permits.release()
        await asyncio.wait([asyncio.ensure_future(one.result())], timeout=0.2 if gathered else 10)
        assert one.done() is not gathered
    permits.release(count - 3)
    assert all(await asyncio.wait_for(client.gather(others), 10))


@on_cluster(8)
async def test_registering_while_tasks_run(client: Any) -> None:
    running = client.submit(blocks, "early")
    await Event("early-started", client).wait()
    with dask.annotate(device=3):
        await client.register_plugin(DevicePlugin())
        assert await client.submit(here) == 3
    await Event("go-on", client).set()
    assert await running is None  # it had no device when it began


@with_plugin(8)
async def test_registering_anew(client: Any, worker: Any) -> None:
    actor = await client.submit(Slow, actor=True)
    lives_on = await actor.where()
    assert lives_on in range(4)
    executors = set(worker.executors)
    running = submit_on(client, 1, blocks, "early")
    await Event("early-started", client).wait()
    await client.register_plugin(DevicePlugin(devices=[2]))
    assert running.key in dict(worker.plugins["devctx"].extension.monitor.calls.suspects())
    await Event("go-on", client).set()
    assert await running == 1
    assert {name for name in worker.executors if "devctx" in name} == {"devctx:cuda:2"}
    assert await client.gather(client.map(here, range(8))) == [2] * 8
    assert await actor.where() == lives_on
    error = await submit_on(client, 1, here, "elsewhere").exception()
    assert "Available: cuda:2 (" in str(error)
    assert "which this worker does not use" in str(error)
    await client.register_plugin(DevicePlugin(tasks_per_device=3))
    assert set(worker.executors) == executors
    assert await client.gather([client.submit(here, i, pure=False) for i in range(4)])


@on_cluster(1, Worker=Nanny, config={"distributed.worker.preload": ["dask_devctx"]})
async def test_restarts(client: Any, scheduler: Any) -> None:
    future = client.submit(here, 1)
    assert await future is not None
    before = set(scheduler.workers)
    await client.restart()
    assert future.cancelled()
    assert len(scheduler.workers) == 1
    assert not before & set(scheduler.workers)
    assert await client.submit(here, 2) is not None


@on_cluster(8)
async def test_a_worker_that_closes_ends_its_devices_threads_and_keeps_no_locals_of_coroutines(
    client: Any, scheduler: Any, worker: Any
) -> None:
    async def closing() -> None:
        futures = client.map(here, range(8))
        await client.gather(futures)
        assert len(plugin_threads()) == 9  # tasks and memory of each device, and copies
        await worker.close()
        assert plugin_threads() == []
        del futures
        await async_poll_for(lambda: not scheduler.tasks, timeout=5)

    await client.register_plugin(DevicePlugin())
    await asyncio.create_task(closing())


@on_cluster(2, 2)
async def test_a_worker_that_closes_has_its_values_to_the_end(client: Any, *workers: Any) -> None:
    """dask checks the state of closed workers, too: a value of the state was not in the data."""
    await client.register_plugin(DevicePlugin(devices_per_worker=2))
    future = client.submit(lambda: SimulatedArray((3,)))
    await future
    (owner,) = (worker for worker in workers if future.key in worker.data)
    await owner.close()
    assert future.key in owner.data
    assert (await future).get().tolist() == [0, 0, 0]  # made again by the other worker


@pytest.mark.parametrize(
    ("options", "where", "error", "said"),
    [
        ({"devices": [7]}, nullcontext, DeviceNotFoundError, "no device 7"),
        ({}, lambda: driver.use(no_gpus()), DriverUnavailableError, r"libcuda\.so\.1 not found"),
        # The worker's own configuration is wrong, and the client's right.
        ({}, lambda: configured(history="all"), ValueError, "got 'all'.*devctx.history"),
    ],
)
@on_cluster(4)
async def test_where_the_set_up_fails_tasks_that_ask_for_a_device_fail_with_the_reason(
    client: Any, worker: Any, options: Any, where: Any, error: Any, said: str, caplog: Any
) -> None:
    """Others run without one, and the plugin is undone as any other."""
    before, plugin = state_of(worker), DevicePlugin(**options)
    with where():
        with pytest.raises(error, match=said) as caught:
            await client.register_plugin(plugin)
        (note,) = caught.value.__notes__
        assert 'client.unregister_worker_plugin("devctx")' in note
        for wanted in (7, 1, "auto"):
            failed = await submit_on(client, wanted, here, wanted).exception()
            assert isinstance(failed, error)
            assert failed.__notes__ == [note]
        assert await client.submit(here, "unannotated") is None
        assert not await client.get_events(TOPIC), "no warning that the plugin is missing"
        assert "was not counted" not in caplog.text
        await client.unregister_worker_plugin("devctx")
    assert state_of(worker)[:3] == before[:3]
    assert await client.submit(here) is None


@on_cluster(4)
async def test_a_worker_that_loses_its_devices_runs_no_task_on_the_first_gpu(client: Any) -> None:
    await client.register_plugin(DevicePlugin())
    for _ in range(2):
        with pytest.raises(DeviceNotFoundError, match="no device 7") as caught:
            await client.register_plugin(DevicePlugin(devices=[0, 7]))
        (note,) = caught.value.__notes__
        assert "all others but those with device=None" in note
        assert (await client.submit(here, pure=False).exception()).__notes__ == [note]
        assert await submit_on(client, None, here, pure=False) is None
    await client.register_plugin(DevicePlugin())
    assert await client.submit(here, pure=False) in range(4)


@on_cluster(4)
async def test_a_second_plugin_by_another_name_is_refused(client: Any, worker: Any) -> None:
    await client.register_plugin(DevicePlugin(), name="own")
    with pytest.raises(ValueError, match="has a DevicePlugin already, by the name 'own'"):
        await client.register_plugin(DevicePlugin(devices=[1]), name="another")
    await client.unregister_worker_plugin("another")
    assert [device.device_id for device in (await report(client)).devices] == [0, 1, 2, 3]
    assert await submit_on(client, 2, here) == 2  # the first one does as before
    await client.unregister_worker_plugin("own")
    assert await client.submit(here, pure=False) is None
    assert (DevicePlugin().worker_devices, DevicePlugin().report()) == ((), None)


@pytest.mark.parametrize(("nthreads", "told"), [(4, True), (8, False)])
def test_too_few_threads_are_told_once(nthreads: int, told: bool) -> None:
    @on_cluster(nthreads)
    async def check(client: Any, scheduler: Any, worker: Any) -> None:
        handlers = list(logging.getLogger("dask_devctx").handlers)
        await client.register_plugin(DevicePlugin())
        for i in range(3):
            await client.submit(here, i)
        advice = "--nthreads, to 32,"
        logs = await client.get_worker_logs()
        assert sum(advice in line for _, line in logs[worker.address]) == told
        # Users read the events of their own topics, and of dask's.
        assert "devctx" not in scheduler.get_events()
        await client.unregister_worker_plugin("devctx")
        assert logging.getLogger("dask_devctx").handlers == handlers

    check()


ran: list[int | None] = []


def compute(key: str, device: int) -> ComputeTaskEvent:
    """What a worker is sent for one task, which appends to ``ran``."""
    event = ComputeTaskEvent.dummy(key, annotations={"device": device}, stimulus_id=key)
    event.run_spec = Task(key, lambda: ran.append(here()))
    return event


@with_plugin()
async def test_tasks_that_begin_while_the_plugin_is_replaced_get_a_device(
    client: Any, worker: Any
) -> None:
    """Those that come while the scheduler is told, and those that were about to begin."""
    ran.clear()
    worker.periodic_callbacks["heartbeat"].stop()  # dask's spans fail with tasks that have none
    replacing = asyncio.create_task(worker.plugin_add(DevicePlugin()))
    await asyncio.sleep(0)
    assert not replacing.done()
    worker.handle_stimulus(compute("comes then", 3))
    await replacing
    await async_poll_for(lambda: ran, timeout=10)
    worker.handle_stimulus(compute("about to begin", 2))
    await worker.plugin_add(DevicePlugin())
    await async_poll_for(lambda: len(ran) == 2, timeout=10)
    assert ran == [3, 2]
    record = worker.plugins["devctx"].extension.record
    await async_poll_for(lambda: record.metrics(worker)[3]["running"] == 0, timeout=10)


@on_cluster(8)
async def test_two_clients_that_register_at_once(client: Any, scheduler: Any, worker: Any) -> None:
    before = state_of(worker)
    await client.register_plugin(DevicePlugin())
    for _ in range(3):
        await asyncio.gather(
            client.register_plugin(DevicePlugin(devices=[1], devices_per_worker=1)),
            client.register_plugin(DevicePlugin(devices=[1, 2], devices_per_worker=2)),
        )
        devices = worker.plugins["devctx"].worker_devices
        assert set(await client.gather(client.map(here, range(4), pure=False))) <= {
            device.device_id for device in devices
        }
        (told,) = scheduler.plugins["devctx-routing"].devices.values()
        assert told == {device.uuid for device in devices}
    await client.unregister_worker_plugin("devctx")
    assert state_of(worker)[:3] == before[:3]
    await async_poll_for(lambda: not plugin_threads(), timeout=10)


@on_cluster(8)
async def test_the_scheduler_knows_the_devices_while_the_plugin_is_replaced(
    client: Any, scheduler: Any, worker: Any
) -> None:
    """Else what names them then is sent to another worker, and fails there."""
    await client.register_plugin(DevicePlugin())
    routing = scheduler.plugins["devctx-routing"]
    replacing = asyncio.create_task(worker.plugin_add(DevicePlugin()))
    while not replacing.done():
        assert worker.address in routing.devices
        await asyncio.sleep(0)
    await client.unregister_worker_plugin("devctx")
    await async_poll_for(lambda: not routing.devices, timeout=10)


# -- set up as a whole, or not at all


T = TypeVar("T")
# Not the first: then the worker's threads that unpack data are given a device, too.
PLUGIN = {"devices": [1, 2, 3], "devices_per_worker": 2, "tasks_per_device": 1}


class StepFailed(BaseException):
    """Nothing that a device may raise, so that nobody goes on without the devices."""


class Steps:
    """The steps of the set-up, one of which fails."""

    def __init__(self, fails: int, when: str) -> None:
        self.taken: list[str] = []
        steps = self

        class CountingStack(ExitStack):
            def enter_context(self, step: AbstractContextManager[T]) -> T:
                number = len(steps.taken)
                steps.taken.append(repr(getattr(step, "func", step)))
                if number == fails and when == "before":
                    raise StepFailed(steps.taken[-1])
                entered = super().enter_context(step)
                if number == fails:
                    raise StepFailed(steps.taken[-1])
                return entered

        self.stack = CountingStack


async def assert_nothing_is_held(worker: Worker, step: str) -> None:
    acquire(devices(), 4, holder="this test").close()
    loop = asyncio.get_running_loop()
    for name, executor in worker.executors.items():
        assert await loop.run_in_executor(executor, current_context) == 0, (step, name)


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.long)])
@on_cluster(4)
async def test_each_step_that_fails_undoes_all(client: Any, worker: Any, when: str) -> None:
    held, running = client.submit(here), client.submit(blocks, "running")
    await held
    await Event("running-started", client).wait()
    await assert_nothing_is_held(worker, "none")
    failed = 0
    while True:
        plugin, steps = DevicePlugin(**PLUGIN), Steps(failed, when)
        changes = changes_of(worker)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(extension, "ExitStack", steps.stack)
            try:
                await plugin.setup(worker)
            except StepFailed as error:
                step = str(error)
            else:
                break
        await async_poll_for(lambda: not plugin_threads(), timeout=10)
        assert changes() == {}, step
        assert plugin.worker_devices == ()
        await assert_nothing_is_held(worker, step)
        failed += 1
    assert failed == len(steps.taken) > 12
    assert {"handlers", "executors", "metrics", "actors", "data"} <= changes().keys()
    assert len(plugin.worker_devices) == 2
    await plugin.teardown(worker)
    await async_poll_for(lambda: not plugin_threads(), timeout=10)
    assert changes() == {}
    await assert_nothing_is_held(worker, "closing")
    await Event("go-on", client).set()
    await running


# -- a task's threads


def where() -> tuple[int | None, str]:
    return here(), threading.current_thread().name.partition("-")[0]


@on_cluster(4)
async def test_only_the_task_itself_is_sent_to_its_devices_threads(client: Any) -> None:
    def inside(dask_worker: Any) -> tuple[str, str]:
        return where()[1], dask_worker.executor.submit(where).result()[1]

    async def in_a_coroutine(dask_worker: Any) -> str:
        loop = asyncio.get_running_loop()
        return (await loop.run_in_executor(dask_worker.executor, where))[1]

    await client.register_plugin(DevicePlugin())
    here_and_there = await client.submit(lambda: inside(get_worker()))
    assert here_and_there[0] == "devctx" != here_and_there[1]

    async def awaits() -> str:
        return await in_a_coroutine(get_worker())

    assert await client.submit(awaits) != "devctx"
    with dask.annotate(executor="default"):
        assert (await client.submit(where, pure=False))[1] != "devctx"
    assert await submit_on(client, None, where, pure=False) == (None, here_and_there[1])


@on_cluster()
async def test_a_worker_whose_own_executor_is_of_processes(client: Any, scheduler: Any) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        async with Worker(scheduler.address, nthreads=2, executor=processes):
            await client.register_plugin(DevicePlugin())
            assert await submit_on(client, 2, where) == (2, "devctx")
            assert await submit_on(client, None, os.getpid, pure=False) != os.getpid()
            await client.unregister_worker_plugin("devctx")
            assert await client.submit(os.getpid, pure=False) != os.getpid()
