"""Every kind of task is on its device."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import traceback
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import dask
import pytest
from dask._task_spec import Task
from distributed import Event, Reschedule
from distributed.utils_test import async_poll_for, wait_for_state
from distributed.worker_state_machine import ComputeTaskEvent, FreeKeysEvent

from dask_devctx import Device, SimulatedArray, device_of, on_device, task_devices
from dask_devctx.driver.simulated import SimulatedMachine
from tests.distributed.devices import blocks, current_context, here, make, submit_on, with_plugin

seen: list[Any] = []


@pytest.fixture(autouse=True)
def forget() -> None:
    seen.clear()


@asynccontextmanager
async def watching_the_loop() -> AsyncIterator[None]:
    """Ask at each turn of the event loop whether somebody left a context on its thread."""
    left = []
    turns = 0

    async def watch() -> None:
        nonlocal turns
        while True:
            left.append(current_context())
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(watch())
    yield
    task.cancel()
    assert turns > 10
    assert set(left) == {0}


def third_time(error: type[Exception], x: SimulatedArray) -> float:
    """It is given by value, and has to be on the device each time."""
    seen.append(here())
    if len(seen) < 3:
        raise error
    return float(x.sum())


@pytest.mark.parametrize("error", [OSError, Reschedule])
@with_plugin(8, 8, shared=True)
async def test_a_task_that_runs_again_does_so_on_its_device(client: Any, error: Any) -> None:
    with Device(1):
        x = make()
    assert await submit_on(client, 2, third_time, error, x, retries=5) == 100.0
    assert seen == [2, 2, 2]


def divide(n: int) -> float:
    return 1 / n


async def divide_later(n: int) -> float:
    await asyncio.sleep(0)
    return 1 / n


@pytest.mark.parametrize(
    ("function", "device"),
    [
        *((function, device) for function in (divide, divide_later) for device in ("auto", None)),
        (on_device(2)(divide), "auto"),
    ],
)
@with_plugin()
async def test_the_traceback_of_a_failure_begins_with_the_tasks_own_frame(
    client: Any, function: Any, device: str | None
) -> None:
    failed = submit_on(client, device, function, submit_on(client, device, int))
    frames = traceback.extract_tb(await failed.traceback())
    assert frames[0].name == function.__name__
    with pytest.raises(ZeroDivisionError) as raised:
        await failed
    names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert names[-len(frames) :] == [frame.name for frame in frames]
    assert "__call__" not in names
    assert "_await" not in names


def _compute(key: str, device: int | str, stimulus_id: str) -> ComputeTaskEvent:
    event = ComputeTaskEvent.dummy(key, annotations={"device": device}, stimulus_id=stimulus_id)
    event.run_spec = Task(key, lambda: seen.append(here()))
    return event


@pytest.mark.parametrize("device", [3, "auto"])
@with_plugin()
async def test_cancelled_and_resumed_in_one_tick(
    client: Any, worker: Any, device: int | str
) -> None:
    # The second "compute" puts the task back to "executing" with no transition to it, before it
    # was run at all.
    worker.handle_stimulus(
        _compute("x", device, "one"),
        FreeKeysEvent(keys=["x"], stimulus_id="two"),
        _compute("x", device, "three"),
    )
    assert worker.state.tasks["x"].state == "executing"
    await async_poll_for(lambda: seen, timeout=10)
    assert seen == [3] if device == 3 else seen[0] in range(4)
    states = worker.plugins["devctx"].extension.admission.states.values()
    await async_poll_for(lambda: not any(state.tasks for state in states), timeout=10)


@with_plugin()
async def test_cancelled_while_it_runs(client: Any, worker: Any) -> None:
    with dask.annotate(device=1):
        future = client.submit(blocks, "slow", key="slow")
        await Event("slow-started", client).wait()
        await future.cancel()
        await wait_for_state("slow", "cancelled", worker)
        again = client.submit(blocks, "slow", key="slow")
        await wait_for_state("slow", "executing", worker)
    await Event("go-on", client).set()
    assert await again == 1


def append(name: str) -> None:
    seen.append(name)


@with_plugin()
async def test_cancelled_before_its_turn(client: Any, worker: Any) -> None:
    """dask believes that it runs; it waits for its device, and does not run when it has it."""
    with dask.annotate(device=1):
        running = client.submit(blocks, "first")
        await Event("first-started", client).wait()
        cancelled = client.map(append, [f"cancelled {n}" for n in range(5)])
        wanted = client.submit(append, "wanted")
        again = client.submit(append, "again", key="again")
        await async_poll_for(lambda: worker.state.executing_count == 8, timeout=10)
        await client.cancel([*cancelled, again])
        await wait_for_state("again", "cancelled", worker)
        again = client.submit(append, "again", key="again")
        await wait_for_state("again", "executing", worker)
    await Event("go-on", client).set()
    await client.gather([running, wanted, again])
    await async_poll_for(lambda: len(worker.state.tasks) == 3, timeout=10)
    assert sorted(set(seen)) == ["again", "wanted"]


@with_plugin()
async def test_coroutines(client: Any) -> None:
    async def resumed(x: int) -> list[int | None]:
        at = []
        for _ in range(5):
            at.append(here())
            await asyncio.sleep(0.01)
        return at

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError(str(here()))

    async with watching_the_loop():
        futures = []
        for device in (3, 1, 2, 1):
            futures.append(submit_on(client, device, resumed, len(futures)))
        assert await client.gather(futures) == [[d] * 5 for d in (3, 1, 2, 1)]
        error = await submit_on(client, 2, fails).exception()
        missing = await submit_on(client, 9, fails, pure=False).exception()
    assert str(error) == "2"
    assert type(missing).__name__ == "DeviceNotFoundError"


class Model:
    weight = 1

    def __init__(self) -> None:
        self.made = here()

    def method(self) -> tuple[int | None, int | None]:
        return self.made, here()

    async def coroutine(self) -> list[int | None]:
        first = here()
        await asyncio.sleep(0.02)
        return [self.made, first, here()]

    def fails(self) -> None:
        raise ValueError(str(here()))

    @property
    def where(self) -> int | None:
        return here()


@with_plugin()
async def test_actors(client: Any, worker: Any) -> None:
    actor = await submit_on(client, 3, Model, actor=True)
    free = await client.submit(Model, actor=True, pure=False)
    async with watching_the_loop():
        assert await actor.method() == (3, 3)
        assert await actor.method(separate_thread=False) == (3, 3)
        assert await actor.coroutine() == [3, 3, 3]
        with pytest.raises(ValueError, match="3"):
            await actor.fails()
        made, at = await free.method()
        assert made == at
        assert made in range(4)
        assert await actor.weight == 1
        assert await actor.where == 3
    assert type(worker.state.actors[actor.key]) is Model


@pytest.mark.filterwarnings("ignore:(Dask annotations|dask.dataframe drops)")
@with_plugin(8, 8, shared=True)
async def test_p2p_shuffle(client: Any, machine: SimulatedMachine) -> None:
    dd = pytest.importorskip("dask.dataframe")
    pd = pytest.importorskip("pandas")
    frame = dd.from_pandas(pd.DataFrame({"a": range(40), "b": 0}), npartitions=4)
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        shuffled = frame.shuffle("a", npartitions=3).map_partitions(
            lambda p: p.assign(b=here()), meta=frame
        )
        with dask.annotate(device=1):
            result = await client.compute(shuffled)
    assert sorted(result.a) == list(range(40))
    assert set(result.b) == {1}
    assert {gpu.index for gpu in machine.gpus if gpu.primary is not None} == {1}


class Pool(ThreadPoolExecutor):
    """One whose kind dask does not know by its name."""


@with_plugin()
async def test_the_users_own_executors(client: Any, worker: Any) -> None:
    def where() -> Any:
        assert task_devices() == (Device.current(),)
        return here(), threading.current_thread().name.partition("_")[0]

    with (
        ThreadPoolExecutor(1, thread_name_prefix="mine") as threads,
        Pool(1, thread_name_prefix="pool") as pool,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes,
    ):
        worker.executors.update(mine=threads, processes=processes, pool=pool)
        try:
            with Device(0):
                x = make()
            with dask.annotate(device=3, executor="mine"):
                assert await client.submit(where) == (3, "mine")
                assert await client.submit(SimulatedArray.sum, x) == 100.0
            with dask.annotate(device=3, executor="pool"):
                assert await client.submit(where, pure=False) == (3, "pool")
            with dask.annotate(device=2, executor="processes"):
                assert await client.submit(here) == 2
            with dask.annotate(executor="processes"):
                assert await client.submit(here, pure=False) in range(4)
            with dask.annotate(device=None, executor="processes"):
                assert await client.submit(here, 1, pure=False) is None
            with dask.annotate(executor="nobody's"):
                error = await client.submit(here, pure=False).exception()
            assert "Invalid executor" in str(error)
        finally:
            del worker.executors["mine"], worker.executors["processes"], worker.executors["pool"]


@with_plugin(unannotated="leave")
async def test_unannotated_tasks_are_left(client: Any) -> None:
    assert await client.gather(client.map(here, range(8))) == [None] * 8
    for wanted, expected in [(2, {2}), ("auto", {0, 1, 2, 3})]:
        assert await submit_on(client, wanted, here, wanted, pure=False) in expected


# -- tasks without a device


def leaves_one(*_: object) -> int | None:
    """Leave a device current, as CuPy does that was called with nothing current."""
    before = here()
    Device(0).set_current()
    return before


async def leaves_one_later(*_: object) -> int | None:
    before = here()
    Device(0).set_current()
    await asyncio.sleep(0.001)
    assert here() == before
    Device(0).set_current()
    return before


@pytest.mark.parametrize("device", [None, 1])
@pytest.mark.parametrize("function", [leaves_one, leaves_one_later])
@with_plugin(1, devices=[0, 1])
async def test_what_a_task_leaves_current_the_next_does_not_see(
    client: Any, function: Any, device: int | None
) -> None:
    x = client.submit(make)
    for inputs in ((), (x,), (), (x,)):
        assert await submit_on(client, device, function, *inputs, pure=False) == device
        assert here() is None, "it is current on the event loop"


@pytest.mark.parametrize("limit", ["auto", 0])
def test_where_the_first_device_is_not_the_workers_the_inputs_are_read_without_it(
    limit: str | int,
) -> None:
    """CuPy makes a context on the first device when it copies to the host with nothing current."""

    @with_plugin(2, devices=[2, 3], device_memory_limit=limit)
    async def body(client: Any) -> None:
        x = submit_on(client, 3, make)
        y = client.submit(list, range(10))
        assert await submit_on(client, None, here, x, pure=False) == 2
        assert await submit_on(client, None, ordinal, x, pure=False) == 3
        assert await submit_on(client, None, here_later, x, pure=False) == [2, 2]
        assert await submit_on(client, None, here, y, pure=False) is None
        assert await submit_on(client, None, leaves_one, x, pure=False) == 2
        for _ in range(3):
            assert await submit_on(client, None, here, pure=False) is None
        await client.unregister_worker_plugin("devctx")

    body()


def ordinal(array: SimulatedArray) -> int:
    found = device_of(array)
    return found.device_id


async def here_later(_: object) -> list[int | None]:
    before = here()
    await asyncio.sleep(0.001)
    return [before, here()]
