"""The plugin is set up on a worker as a whole, or not at all; closed, it leaves nothing behind."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import dask
import pytest
from distributed import Event, Worker, get_worker
from distributed.utils_test import async_poll_for

from dask_devctx import DevicePlugin, devices
from dask_devctx.worker import extension
from dask_devctx.worker.leases.lease import acquire
from tests.distributed.changes import changes_of
from tests.distributed.devices import current_context, here, on_cluster

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


def blocks() -> None:
    Event("go-on").wait()


async def threads_ended(changes: Callable[[], dict[str, Any]]) -> None:
    await async_poll_for(lambda: "threads" not in changes(), timeout=10)


async def assert_nothing_is_held(worker: Worker, step: str) -> None:
    acquire(devices(), 4, holder="this test").release()
    loop = asyncio.get_running_loop()
    for name, executor in worker.executors.items():
        assert await loop.run_in_executor(executor, current_context) == 0, (step, name)


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.long)])
@on_cluster(4)
async def test_each_step_that_fails_undoes_all(client: Any, worker: Any, when: str) -> None:
    held, running = client.submit(here), client.submit(blocks)
    await held
    await async_poll_for(lambda: worker.state.executing_count == 1, timeout=10)
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
        await threads_ended(changes)
        assert changes() == {}, step
        assert plugin.worker_devices == ()
        await assert_nothing_is_held(worker, step)
        failed += 1
    assert failed == len(steps.taken) > 12
    assert {"handlers", "executors", "metrics", "actors", "data"} <= changes().keys()
    assert len(plugin.worker_devices) == 2
    await plugin.teardown(worker)
    await threads_ended(changes)
    assert changes() == {}
    await assert_nothing_is_held(worker, "closing")
    await Event("go-on", client).set()
    await running


@on_cluster(4)
async def test_registered_and_taken_away(client: Any, worker: Any) -> None:
    changes = changes_of(worker)
    await client.register_plugin(DevicePlugin(**PLUGIN))
    with dask.annotate(device=2):
        assert await client.submit(here, pure=False) == 2
    assert changes().keys() >= {"handlers", "executors", "metrics", "plugins", "threads"}
    await client.unregister_worker_plugin("devctx")
    await async_poll_for(lambda: not changes().keys() - {"tasks"}, timeout=10)
    await assert_nothing_is_held(worker, "unregistering")


# -- a task's threads


def where() -> tuple[int | None, str]:
    return here(), threading.current_thread().name.partition("-")[0]


@on_cluster(4)
async def test_a_task_reaches_its_devices_threads_without_an_annotation(
    client: Any, scheduler: Any, worker: Any
) -> None:
    await client.register_plugin(DevicePlugin())
    with dask.annotate(device=2, mark="mine"):
        task = client.submit(where)
    assert await task == (2, "devctx")
    annotations = dict(worker.state.tasks[task.key].annotations)
    annotations.pop("span", None)
    assert annotations == {"device": 2, "mark": "mine"}
    assert "executor" not in scheduler.tasks[task.key].annotations


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
    with dask.annotate(device=None):
        assert await client.submit(where, pure=False) == (None, here_and_there[1])


@on_cluster()
async def test_a_worker_whose_own_executor_is_of_processes(client: Any, scheduler: Any) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        async with Worker(scheduler.address, nthreads=2, executor=processes):
            await client.register_plugin(DevicePlugin())
            with dask.annotate(device=2):
                assert await client.submit(where) == (2, "devctx")
            with dask.annotate(device=None):
                assert await client.submit(os.getpid, pure=False) != os.getpid()
            await client.unregister_worker_plugin("devctx")
            assert await client.submit(os.getpid, pure=False) != os.getpid()
