"""Arrays larger than the devices' memory: right to the last bit, and never too much on a device."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import UserDict
from collections.abc import Iterator
from typing import Any, ClassVar

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, Event, LocalCluster, futures_of, wait

from dask_devctx import Device, DevicePlugin, SimulatedArray, driver, report
from dask_devctx.driver.simulated import SimulatedMachine
from tests.distributed import peers
from tests.distributed.devices import started
from tests.transfer.hostile import NotPickled

MIB = 2**20


def block(block_info: Any = None) -> SimulatedArray:
    """One chunk of whole numbers that tell the chunk, on the current device."""
    (row, column), shape = block_info[None]["chunk-location"], block_info[None]["chunk-shape"]
    return SimulatedArray.asarray(numbers(row, column, shape))


def numbers(row: int, column: int, shape: tuple[int, int]) -> Any:
    return np.random.default_rng((row, column)).integers(0, 1000, shape)


def array(n: int, chunk: int) -> da.Array:
    sizes = (chunk,) * (n // chunk)
    return da.map_blocks(block, chunks=(sizes, sizes), dtype=int, meta=np.empty((0, 0), int))


def on_the_host(n: int, chunk: int) -> Any:
    steps = range(n // chunk)
    return np.block([[numbers(i, j, (chunk, chunk)) for j in steps] for i in steps])


@contextlib.contextmanager
def small_devices(nbytes: int, count: int = 2) -> Iterator[SimulatedMachine]:
    with driver.use(SimulatedMachine(count, total_memory=nbytes).backend()) as backend:
        yield backend.machine


@contextlib.contextmanager
def threads(nbytes: int = 1 * MIB, count: int = 2, **kwargs: Any) -> Iterator[Client]:
    """A cluster in this process on devices of so many bytes."""
    kwargs = {"memory_limit": 0, **kwargs}
    with small_devices(nbytes, count), started(**kwargs) as client:
        yield client


COUNTS = ("memory_limit", "memory_held", "memory_copies", "memory_spilled", "spills", "unspills")


def counts(client: Client) -> dict[str, int]:
    found = report(client).devices
    return {name: sum(getattr(row, name) for row in found) for name in COUNTS}


def read(array: Any) -> Any:
    return array.get() if isinstance(array, SimulatedArray) else array


# -- four times as much as the devices have, right to the last bit

N, CHUNK = 1024, 64  # 8 MiB in chunks of 32 KiB


def test_through_the_disk(tmp_path: Any) -> None:
    with (
        dask.config.set({"distributed.worker.memory.spill": False}),
        dask.config.set({"distributed.worker.memory.pause": False}),
        threads(memory_limit="4 MiB", local_directory=str(tmp_path)) as client,
    ):
        x = array(N, CHUNK).persist()
        wait(x)
        assert any(client.run(lambda dask_worker: len(dask_worker.data.disk)).values())
        assert peers.until(lambda: report(client).on_disk, 20), "a heartbeat tells the scheduler"
        assert read(x.sum().compute()) == on_the_host(N, CHUNK).sum()


_least: list[int] = []


def with_a_look(x: SimulatedArray) -> SimulatedArray:
    _least.append(Device.current().memory_info.free)  # type: ignore[union-attr]
    return x + 1


def test_the_limit_holds() -> None:
    """Also while tasks run: the driver's memory has room to spare the whole time."""
    _least.clear()
    with threads(4 * MIB, device_memory_limit=0.5) as client:
        x = array(N, CHUNK).map_blocks(with_a_look, dtype=int)
        x = x.persist()
        wait(x)
        assert min(_least) > 1.5 * MIB
        assert counts(client)["memory_held"] <= 4 * MIB


def full(n: int) -> SimulatedArray:
    return SimulatedArray.asarray(np.full(16384, n))


def totals(client: Client, futures: list[Any]) -> Any:
    return client.gather(client.map(lambda x: int(x.sum()), futures, pure=False))


def test_every_reader_gets_the_value() -> None:
    with threads() as client:
        x = array(N, CHUNK).persist()
        wait(x)
        kinds = client.run(
            lambda dask_worker: {
                *(type(value).__name__ for value in dask_worker.data.values()),
                *(type(dask_worker.data[key]).__name__ for key in list(dask_worker.data)),
            }
        )
        assert set().union(*kinds.values()) == {"SimulatedArray"}
        with dask.annotate(device="none"):
            names = client.map(lambda one: type(one).__name__, list(futures_of(x)), pure=False)
        assert set(client.gather(names)) == {"SimulatedArray"}
        kinds_here = {type(one.result()).__name__ for one in futures_of(x)}
        assert kinds_here == {"SimulatedArray"}


def test_views_of_one_value_come_back_sharing_and_those_of_others_alone() -> None:
    with threads(1 * MIB, 1) as client:
        both = client.submit(lambda: (lambda x: [x, x[::2], {"x": x}])(full(3)), pure=False)
        alone = client.submit(full, 5, pure=False)
        view = client.submit(lambda x: x[8192:], alone, pure=False)
        wait([both, alone, view])
        fill = client.map(full, range(10))
        wait(fill)
        for one in (both, alone, view):
            assert all(client.run(peers.is_away, one.key).values())
        assert client.submit(shares, both, pure=False).result() == [True, True, True]
        same = client.submit(lambda x, y: memory(x) == memory(y), alone, view)
        right = client.submit(lambda x, y: bool((x[8192:] == y).all()), alone, view)
        assert client.gather([same, right]) == [False, True]


def memory(x: SimulatedArray) -> Any:
    return x._memory and x._memory.block.base


def shares(both: list[Any]) -> list[bool]:
    x, view, named = both
    return [memory(x) == memory(view), named["x"] is x, int(view.sum()) == 3 * 8192]


@pytest.mark.long
def test_across_processes_and_with_a_worker_killed() -> None:
    with (
        dask.config.set({"devctx.simulated-memory": "12 MiB"}),
        peers.cluster(2, memory_limit=0) as (client, workers),
    ):
        expected = on_the_host(2 * N, 2 * CHUNK)
        x = array(2 * N, 2 * CHUNK)
        lazily = (x + x.T).sum(axis=0)
        assert read(lazily.compute()).tolist() == (expected + expected.T).sum(axis=0).tolist()
        future = client.compute(lazily)
        time.sleep(0.3)
        client.run(
            lambda: os.kill(os.getpid(), signal.SIGKILL), workers=workers[1:], on_error="ignore"
        )
        assert read(future.result(timeout=60)).tolist() == (
            (expected + expected.T).sum(axis=0).tolist()
        )


def test_without_a_limit_nothing_is_spilled() -> None:
    with threads(2 * MIB, 1, device_memory_limit=0) as client:
        futures = client.map(full, range(15), pure=False)  # nearly all of the device
        wait(futures)
        (row,) = report(client).devices
        assert (row.memory_limit, row.memory_held, row.spills) == (None, 15 * 16384 * 8, 0)
        assert totals(client, futures) == [n * 16384 for n in range(15)]
        client.unregister_worker_plugin("devctx")
        assert set(client.run(lambda dask_worker: type(dask_worker.data)).values()) == {dict}


def test_four_fifths_of_a_limit_stay() -> None:
    with threads(4 * MIB, 1, device_memory_limit="2 MiB") as client:
        futures = client.map(full, range(13), pure=False)
        assert totals(client, futures) == [n * 16384 for n in range(13)]
        (row,) = report(client).devices
        assert (row.memory_held, row.spills) == (13 * 16384 * 8, 0)


@pytest.mark.parametrize("protocol", ["inproc", "tcp"])
def test_values_that_are_away_outlive_the_plugin(protocol: str) -> None:
    with threads(1 * MIB, 1, protocol=protocol) as client:
        futures = client.map(full, range(16), pure=False)
        wait(futures)
        # Without the plugin, values come back, and no more are spilled: there has to be room.
        for failures in (25, 0) if protocol == "inproc" else (0,):  # dask sends 20 at a time
            assert peers.until(lambda: counts(client)["memory_spilled"] >= MIB * 10 // 8, 20)
            peers.fail("cuMemcpyHtoDAsync", 1, failures)
            assert not failures or read(futures[3].result(timeout=20))[0] == 3
        client.unregister_worker_plugin("devctx")
        if protocol == "tcp":  # they are sent as they are: the device has no room for all
            assert [read(one.result())[0] for one in futures] == [*range(16)]
        assert totals(client, [futures[3], futures[12]]) == [3 * 16384, 12 * 16384]
        client.register_plugin(DevicePlugin())
        assert totals(client, futures[:6]) == [n * 16384 for n in range(6)]
        kinds = client.run(
            lambda dask_worker: {type(value).__name__ for value in dask_worker.data.values()}
        )
        assert set().union(*kinds.values()) - {"int"} == {"SimulatedArray"}


def test_a_value_that_dask_cannot_write_to_disk_outlives_the_plugin(tmp_path: Any) -> None:
    with threads(4 * MIB, 1, memory_limit="1 MiB", local_directory=str(tmp_path)) as client:
        future = client.submit(lambda: [*map(full, range(8)), NotPickled(0)], key="unpicklable")
        wait(future)
        client.register_plugin(DevicePlugin())
        client.unregister_worker_plugin("devctx")
        client.register_plugin(DevicePlugin())  # it has the device again
        (found,) = client.run(lambda dask_worker: dask_worker.data["unpicklable"]).values()
        assert [read(one)[0] for one in found[:8]] == [*range(8)]


def slowly(n: int) -> SimulatedArray:
    x = full(n)
    time.sleep(0.1)
    return x


def test_a_plugin_that_is_replaced_while_its_tasks_run_keeps_none_of_their_results() -> None:
    with threads(1 * MIB, 1) as client:
        for _ in range(3):
            futures = client.map(slowly, range(12), pure=False)
            time.sleep(0.15)
            client.register_plugin(DevicePlugin())
            assert totals(client, futures) == [n * 16384 for n in range(12)]


def large_after(go_on: Event) -> int:
    Event("large-started").set()
    assert go_on.wait(20)
    return int(SimulatedArray(MIB // 8 - 16384, "i8").sum())


def test_idle_values_leave_for_a_task_of_the_plugin_before() -> None:
    with threads(1 * MIB, 1) as client:
        go_on = Event("go-on")
        task = client.submit(large_after, go_on)
        assert Event("large-started").wait(20)
        client.register_plugin(DevicePlugin())
        futures = client.map(full, range(6), pure=False)  # they are the new plugin's
        wait(futures)
        go_on.set()
        assert task.result(timeout=30) == 0
        assert totals(client, futures) == [n * 16384 for n in range(6)]


class OfAUser(UserDict[Any, Any]):
    """A mapping as dask allows one: its ``fast`` is no mapping, and it says what was read."""

    read: ClassVar[list[Any]] = []

    @property
    def fast(self) -> set[Any]:
        return set(self.data)

    def __getitem__(self, key: Any) -> Any:
        self.read.append(key)
        return super().__getitem__(key)


def test_a_mapping_of_the_users_holds_host_data_only_and_is_not_read_for_nothing() -> None:
    with started(LocalCluster, n_workers=1, threads_per_worker=8, data=OfAUser) as client:
        client.register_plugin(DevicePlugin(devices=[0], device_memory_limit="3 MiB"))
        (worker,) = client.cluster.workers.values()
        five = client.submit(int, 5)
        assert five.result() == 5
        assert worker.data == {five.key: 5}
        assert not worker.data != {five.key: 5}  # noqa: SIM202
        on_host = client.submit(np.zeros, 10)
        made = [client.submit(SimulatedArray.asarray, np.full(MIB // 8, n)) for n in range(6)]
        assert totals(client, made) == [n * MIB // 8 for n in range(6)]
        peers.until(lambda: counts(client)["spills"], 20)  # a thread spills, once dask has stored
        assert sum(row.spills for row in report(client).devices) > 0
        assert not {future.key for future in made} & worker.data.raw.data.keys()
        assert on_host.key in worker.data.raw.data
        OfAUser.read.clear()
        on_host.release()
        del five, made
        assert peers.until(lambda: not worker.data, 20)
        assert OfAUser.read == []
