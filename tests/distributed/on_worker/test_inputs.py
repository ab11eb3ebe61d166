"""Inputs on another device are brought to the task's own: right, once, ahead, and dropped."""

from __future__ import annotations

import asyncio
import gc
import operator
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import dask
import numpy as np
import pytest
from cuda.bindings.driver import CUresult
from distributed import Client, Worker, get_worker, secede, wait
from distributed.utils_test import async_poll_for

from dask_devctx import Device, DevicePlugin, SimulatedArray, device_of
from dask_devctx.driver.relaxed import PER_THREAD_STREAM
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.errors import DevctxError
from dask_devctx.transfer import events
from tests.distributed.devices import make, on_cluster, started, submit_on, work_is_pending

da = pytest.importorskip("dask.array")


def one_worker(**plugin: Any) -> Any:
    return on_cluster(32, worker_kwargs={"plugins": [DevicePlugin(**plugin)]})


def where(*arrays: SimulatedArray) -> tuple[int, ...]:
    """The devices of the arguments; they can only be added on the device of the task."""
    sum(array.sum() for array in arrays)
    return tuple(array.device.device_id for array in arrays)


def copied_to(worker: Any, device: int) -> Any:
    return worker.data.spill.counts(Device(device))["copies"]


class Stuck(list):
    """A type whose device is known, and not how it moves."""


@one_worker()
async def test_an_input_that_cannot_move_stays_there_while_it_is_used(client: Any) -> None:
    device_of.register(Stuck, lambda stuck: 0)
    stuck = client.submit(Stuck, [1])
    pins = submit_on(
        client, 1, lambda stuck, key: get_worker().data.values_of([key])[0].pins, stuck, stuck.key
    )
    assert await pins == 1


def traffic(worker: Worker) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Copies, saved copies and bytes by the devices' ordinals."""
    return {
        (Device(row["source"]).device_id, Device(row["destination"]).device_id): (
            row["copies"],
            row["saved"],
            row["nbytes"],
        )
        for row in worker.metrics["devctx-traffic"](worker)
    }


@one_worker(tasks_per_device=8)
async def test_one_copy_is_shared_and_goes_with_its_key(
    client: Client, worker: Worker, machine: SimulatedMachine
) -> None:
    """Many ask for it while it is made."""
    x = submit_on(client, 0, make, pure=False)
    await x
    machine.faults.inject("cuMemAlloc", None, when=lambda nbytes: time.sleep(0.2))
    tasks = [submit_on(client, 3, where, x, pure=False) for _ in range(20)]
    assert await client.gather(tasks) == [(3,)] * 20
    assert [*traffic(worker).values()] == [(1, 19, 800)]
    assert copied_to(worker, 3) == machine.gpus[3].used_memory == 800
    x.release()
    # a thread drops it, once the key is gone
    await async_poll_for(lambda: copied_to(worker, 3) == 0, timeout=10)
    assert x.key not in worker.data


@one_worker()
async def test_inputs_move_while_the_task_waits(client: Client, worker: Worker) -> None:
    """A device that is busy is sent the input of a task in its queue before that task starts."""
    x, y = (submit_on(client, number, make, pure=False) for number in (0, 1))
    await wait([x, y])
    with dask.annotate(device=1):
        busy = client.submit(device_at_the_gate, y, "ahead", pure=False)
        await until(_gates["ahead, started"].is_set)
        waiting = client.submit(where, x, pure=False)
        await async_poll_for(lambda: traffic(worker), timeout=5)
        assert (busy.done(), waiting.done()) == (False, False)
        _gates["ahead"].set()
        assert await waiting == (1,)
    assert [counts[:2] for counts in traffic(worker).values()] == [(1, 0)]


@one_worker(move_inputs=False)
async def test_inputs_stay_where_they_are(client: Client, worker: Worker) -> None:
    x = submit_on(client, 0, make, pure=False)
    with dask.annotate(device=1):
        assert await client.submit(lambda array: array.device.device_id, x) == 0
        with pytest.raises(DevctxError, match="cannot be used on cuda:1"):
            await client.submit(where, x)
        lost = await _scattered_lost(client)  # it is not looked for
        assert await client.submit(lambda value: 5, lost, pure=False) == 5
    assert traffic(worker) == {}


_gates: dict[str, threading.Event] = defaultdict(threading.Event)


until = partial(async_poll_for, timeout=20)


@one_worker()
async def test_a_cancelled_task_that_runs_late_leaves_no_copy(
    client: Client, worker: Worker, machine: SimulatedMachine
) -> None:
    """What it brings stands for a key that is gone, and is not taken for what comes after."""
    begun, go_on = threading.Event(), threading.Event()
    x = submit_on(client, 0, make, 1.0, key="x")
    await x
    machine.faults.inject("cuMemAlloc", None, when=lambda nbytes: begun.set() or not go_on.wait(10))
    late = submit_on(client, 1, where, x, key="late")
    await until(begun.is_set)  # it brings its input
    await late.cancel()
    x.release()
    await until(lambda: "x" not in worker.data)
    go_on.set()
    await until(lambda: "late" not in worker.state.tasks)
    assert traffic(worker) == {(0, 1): (1, 0, 800)}
    assert copied_to(worker, 1) == 0
    x = submit_on(client, 0, make, 2.0, key="x")
    assert await submit_on(client, 1, lambda array: float(array.sum()), x, pure=False) == 200.0


@pytest.mark.parametrize("maker", [make, lambda: secede() or make()])
@pytest.mark.parametrize("reader", ["client", "task without a device"])
def test_what_is_read_on_other_streams_waits_for_the_work_that_makes_it(
    reader: str,
    maker: Callable[[], SimulatedArray],
    machine: SimulatedMachine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[tuple[int, int]] = []

    @one_worker()
    async def body(client: Client) -> None:
        x, y = (submit_on(client, 1, maker, pure=False) for _ in range(2))
        await wait([x, y])
        monkeypatch.setattr(events, "current_streams", lambda device: (PER_THREAD_STREAM,))

        async def read(future: Any) -> None:
            if reader == "client":
                await future
            else:
                await submit_on(client, "none", type, future, pure=False)

        event_loop = threading.get_ident()

        def note(stream: Any, event: Any, flags: int) -> bool:
            if threading.get_ident() != event_loop:
                waits.append((Device.current().device_id, int(stream)))  # type: ignore[union-attr]
            return False

        machine.faults.inject("cuStreamWaitEvent", None, when=note)
        await read(x)
        assert waits == []  # the work is done
        machine.faults.inject("cuEventQuery", CUresult.CUDA_ERROR_NOT_READY, times=2)
        await read(y)
        assert waits[0] == (1, PER_THREAD_STREAM)

    body()


class Maker:
    array: SimulatedArray | None = None

    def __init__(self) -> None:
        self.array = make()

    def make(self) -> SimulatedArray:
        return make()

    async def make_later(self) -> SimulatedArray:
        return make()


@one_worker()
async def test_what_an_actor_answers_waits_for_the_work_that_makes_it(
    client: Client, machine: SimulatedMachine
) -> None:
    maker = await submit_on(client, 1, Maker, actor=True)
    pending = work_is_pending(machine)
    made = asyncio.ensure_future(maker.make())
    made_later = asyncio.ensure_future(maker.make_later())
    await asyncio.sleep(0.3)
    assert not made.done()
    assert not made_later.done()
    pending[0] = False
    assert float((await made).sum()) == float((await made_later).sum()) == 100.0
    machine.faults.clear()
    machine.faults.inject("cuEventQuery", CUresult.CUDA_ERROR_NOT_READY, times=5)
    asked = machine.faults.calls["cuEventQuery"]
    assert float((await maker.array).sum()) == 100.0
    assert machine.faults.calls["cuEventQuery"] > asked + 5


class Holder:
    """Has an array on another device than its own."""

    reads = 0

    def __init__(self) -> None:
        with Device(1):
            self.array = make()

    @property
    def read(self) -> tuple[int, int]:
        self.reads += 1
        return self.reads, self.array.device.device_id


@one_worker()
async def test_a_property_is_read_on_the_actor_and_no_copy(client: Client) -> None:
    holder = await submit_on(client, 3, Holder, actor=True)
    assert [await holder.read for _ in range(2)] == [(1, 1), (2, 1)]


class Reader:
    def read(self, x: SimulatedArray, rest: Any = ()) -> Any:
        return tuple(each.device.device_id for each in (x, *rest))

    async def read_later(self, x: SimulatedArray) -> Any:
        await asyncio.sleep(0)
        return self.read(x)

    def ask(self, other: Any) -> Any:
        return other.read(make()).result()


@pytest.mark.filterwarnings("ignore:The `Worker.actors` attribute:FutureWarning")  # dask's own
@pytest.mark.parametrize("move_inputs", [True, False])
def test_an_actors_method_is_given_its_arguments_on_its_device(move_inputs: bool) -> None:
    """What arrives is unpacked on the worker's first device; what another actor has, on its own."""

    @one_worker(move_inputs=move_inputs)
    async def body(client: Client) -> None:
        reader = await submit_on(client, 3, Reader, actor=True)
        other = await submit_on(client, 2, Reader, actor=True, pure=False)
        with Device(1):
            x = make()
        assert await reader.read(x, rest=[x]) == ((3, 3) if move_inputs else (0, 0))
        assert await reader.read_later(x) == ((3,) if move_inputs else (0,))
        assert await other.ask(reader) == ((3,) if move_inputs else (2,))

    body()


def launch_and_raise(array: SimulatedArray) -> None:
    raise ValueError(array.device.device_id)


async def launch_in_a_coroutine_and_raise(array: SimulatedArray) -> None:
    raise ValueError(array.device.device_id)


async def launch_in_a_coroutine(array: SimulatedArray) -> int:
    return array.device.device_id


@pytest.mark.parametrize(
    "launch", [launch_and_raise, launch_in_a_coroutine_and_raise, launch_in_a_coroutine]
)
@one_worker()
async def test_a_copy_outlives_the_kernels_of_a_task(
    client: Client,
    worker: Worker,
    machine: SimulatedMachine,
    launch: Callable[[SimulatedArray], Any],
) -> None:
    x = submit_on(client, 0, make, pure=False)
    await x
    pending = work_is_pending(machine)
    task = submit_on(client, 1, launch, x, pure=False)
    await wait([task])
    assert str(await (task.exception() if task.status == "error" else task)) == "1"
    task.release()
    x.release()
    await until(lambda: not worker.state.tasks)
    gc.collect()
    await until(lambda: copied_to(worker, 1) == 0)
    assert machine.gpus[1].used_memory == 800
    pending[0] = False
    await until(lambda: machine.gpus[1].used_memory == 0)


def device_at_the_gate(array: SimulatedArray, gate: str) -> int:
    if gate:
        _gates[f"{gate}, started"].set()
        _gates[gate].wait(10)
    return array.device.device_id


@pytest.mark.parametrize("gate", ["", "outlives"])
@on_cluster(32)
async def test_what_is_read_when_the_plugin_goes_is_let_go_after_that(
    client: Client, worker: Worker, machine: SimulatedMachine, gate: str
) -> None:
    """By a task that is done, or by one that runs on."""
    await client.register_plugin(DevicePlugin())
    x = submit_on(client, 0, make, pure=False)
    await x
    pending = work_is_pending(machine)
    task = submit_on(client, 1, device_at_the_gate, x, gate)
    await (until(_gates[f"{gate}, started"].is_set) if gate else task)
    await client.unregister_worker_plugin("devctx")
    _gates[gate].set()
    assert await task == 1
    x.release()
    task.release()
    await until(lambda: not worker.state.tasks)
    gc.collect()
    assert [gpu.used_memory for gpu in machine.gpus[:2]] == [800, 800]
    pending[0] = False
    await until(lambda: not any(gpu.used_memory for gpu in machine.gpus))


class Lost:
    """Lives somewhere, but nobody can say where."""


def _raise(value: Lost) -> Device:
    raise LookupError("where is it?")


async def _scattered_lost(client: Client) -> Any:
    device_of.register(Lost, _raise)
    return await client.scatter(Lost())


@one_worker()
async def test_a_type_whose_function_raises_fails_its_task(client: Client) -> None:
    lost = await _scattered_lost(client)
    failed = client.submit(type, lost, pure=False)
    assert isinstance(await failed.exception(), LookupError)
    steps = traceback.extract_tb(await failed.traceback())
    assert steps[-1].name == _raise.__name__  # where it is to be mended


@pytest.mark.parametrize("n_workers", [1, 4])
def test_array_jobs(n_workers: int) -> None:
    """``x.dot(y)`` and ``(x + x.T).sum()`` on chunks that live on all devices."""
    rng = np.random.default_rng(0)
    a, b = rng.random((60, 60)), rng.random((60, 60))
    with started(n_workers=n_workers, processes=True) as client:
        x, y = (
            da.from_array(each, chunks=20).map_blocks(
                SimulatedArray.asarray, meta=SimulatedArray((0, 0))
            )
            for each in (a, b)
        )
        dot = x.dot(y).map_blocks(operator.methodcaller("get"), meta=np.empty((0, 0)))
        total = (x + x.T).sum().map_blocks(operator.methodcaller("get"), meta=np.empty(()))
        assert np.allclose(client.compute(dot).result(), a @ b, rtol=1e-10)
        assert np.isclose(client.compute(total).result(), (a + a.T).sum(), rtol=1e-10)
