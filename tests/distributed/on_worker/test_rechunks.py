"""dask's P2P rechunk of arrays on devices: it stays there, and is right to the last bit."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, Worker, futures_of, wait
from distributed.shuffle import _rechunk
from distributed.utils_test import async_poll_for

from dask_devctx import Device, DevicePlugin, DevicesInUseError, SimulatedArray, driver, report
from tests.distributed import peers
from tests.distributed.devices import on_cluster, with_plugin
from tests.distributed.memory.test_spilling import MIB, counts, threads

N = 480
BLOCKS = 24


def numbers() -> Any:
    return np.random.default_rng(0).integers(0, 10**9, (N, N))


def asarray(block: Any, order: str = "C") -> SimulatedArray:
    return SimulatedArray.asarray(block, order=order)


def on_devices(x: Any, chunks: Any, kind: Any = asarray, **kwargs: Any) -> da.Array:
    x = da.from_array(x, chunks=chunks)
    return x.map_blocks(kind, dtype=x.dtype, meta=np.empty((0,) * x.ndim, x.dtype), **kwargs)


def home(block: SimulatedArray) -> Any:
    """Return a block as NumPy's; its device is that of the task."""
    assert block.device is Device.current()
    return block.get()


def rechunked(x: da.Array, chunks: Any) -> da.Array:
    """Return an array whose blocks are rechunked as they are: dask joins no small ones before."""
    return x.rechunk(chunks, method="p2p", block_size_limit=1)


def read(x: da.Array) -> da.Array:
    return x.map_blocks(home, dtype=x.dtype, meta=np.empty((0,) * x.ndim, x.dtype))


@contextmanager
def layout(n_workers: int, n_devices: int = 4) -> Iterator[Client]:
    """A cluster of processes: one worker with all devices, or a worker for each."""
    per_worker = n_devices // n_workers
    with peers.cluster(n_workers, devices_per_worker=per_worker) as (client, _):
        yield client


def device_nbytes(dask_worker: Worker) -> int:
    """The bytes that a worker's process has on its devices, without staging memory."""
    gc.collect()
    extension = dask_worker.plugins["devctx"].extension
    staging = sum(one.nbytes for one in extension.peers.stagings.values())
    return sum(gpu.used_memory for gpu in driver.backend().machine.gpus) - staging


def nothing_left(client: Client) -> bool:
    """Whether no worker has anything on its devices."""
    return peers.until(lambda: not any(client.run(device_nbytes).values()), 20)


# -- as NumPy's

TYPES = [*map(np.dtype, ("f8", "f2", "i1", "c16", "M8[ns]")), np.dtype([("a", "f4"), ("b", "i1")])]


def split(rng: np.random.Generator, length: int) -> tuple[int, ...]:
    """Return random lengths of two or three chunks, some of them 0."""
    cuts = np.sort(rng.integers(0, length + 1, rng.integers(1, 3)))
    return tuple(map(int, np.diff([0, *cuts, length])))


def case(seed: int) -> tuple[Any, da.Array]:
    """Return an array and its rechunk, of which some are rechunked again."""
    rng = np.random.default_rng(seed)
    shape = [int(n) for n in rng.integers(3, 14, rng.integers(1, 4))]
    dtype = TYPES[rng.integers(len(TYPES))]
    x = rng.integers(0, 256, (*shape, dtype.itemsize), "u1").view(dtype)[..., 0]
    order = "F" if rng.random() < 0.3 else "C"
    found = on_devices(x, tuple(split(rng, n) for n in shape), order=order)
    if rng.random() < 0.2:
        step = (slice(None, None, rng.choice([-1, 2])),) * x.ndim
        x, found = x[step], found[step]
    for _ in range(2 if rng.random() < 0.2 else 1):
        chunks = tuple(split(rng, n) for n in x.shape)
        found = rechunked(found, chunks)
    return x, found


@pytest.mark.parametrize("count", [12, pytest.param(120, marks=pytest.mark.long)])
@pytest.mark.parametrize("n_workers", [1, 4])
def test_as_numpys(n_workers: int, count: int) -> None:
    """So many for each layout, 12 at a time: one worker with all devices, one for each."""
    with layout(n_workers) as client:
        for begin in range(100 * n_workers, 100 * n_workers + count, 12):
            cases = [case(seed) for seed in range(begin, begin + 12)]
            found = client.gather(client.compute([read(y) for _, y in cases]))
            for seed, ((x, y), z) in enumerate(zip(cases, found, strict=True), begin):
                assert z.tobytes() == x.tobytes(), f"{seed}: {y}"
        assert nothing_left(client)


def to_host_calls() -> int:
    calls = driver.backend().machine.faults.calls
    return int(calls["cuMemcpyDtoHAsync"])


@pytest.mark.parametrize(("n_workers", "transport"), [(1, "peer"), (2, "ipc")])
def test_pieces_touch_no_host_and_are_in_the_report(n_workers: int, transport: str) -> None:
    with layout(n_workers, 2) as client:
        for turn in range(2):  # in the first, workers try on each other's memory
            x = on_devices(numbers() + turn, (N, N // BLOCKS)).persist()
            wait(x)
            before = client.run(to_host_calls), report(client).transfers
            y = rechunked(x, (N // BLOCKS, N)).persist()
            wait(y)
            if turn:
                assert client.run(to_host_calls) == before[0]
                rows = [row for row in report(client).transfers if row.transport == transport]
                earlier = sum(row.nbytes for row in before[1] if row.transport == transport)
                # The other pieces are on the device of their task already.
                assert 0 < sum(row.nbytes for row in rows) - earlier < numbers().nbytes
                assert {row.transport for row in report(client).transfers} == {transport}
                if transport == "ipc":  # a worker asks for the pieces of many blocks at a time
                    asked = sum(row.copies for row in rows) - sum(row.copies for row in before[1])
                    assert 0 < asked <= 6  # of 24 blocks
        assert (read(y).compute() == numbers() + 1).all()
        del x, y
        assert nothing_left(client)


# -- memory


@pytest.mark.parametrize("persisted", [True, False])
def test_more_than_the_devices_have(persisted: bool) -> None:
    """Blocks that were spilled are read where they are, in host memory."""
    n, chunk = 768, 64  # 4.5 MiB
    x = np.random.default_rng(0).integers(0, 10**9, (n, n))
    with threads(1 * MIB, 2) as client:
        columns = on_devices(x, (n, chunk))
        if persisted:
            columns = columns.persist()
            wait(columns)
        before = to_host_calls()
        rows = rechunked(columns, (chunk, n)).persist()
        wait(rows)
        found = counts(client)
        assert found["spills"]
        if not persisted:
            assert not found["unspills"], "a block was restored as a whole for its pieces"
        # Of those that are kept, dask has some, which left before.
        assert to_host_calls() - before <= n // chunk * (1.5 if persisted else 2)
        del columns
        for at in range(0, n, chunk):
            block = rows.blocks[at // chunk].compute()
            assert (block.get() == x[at : at + chunk]).all()
        del rows, block
        gone = ("memory_held", "memory_spilled")
        assert peers.until(lambda: not any(counts(client)[name] for name in gone), 20)


@pytest.mark.parametrize("times", [1, 4])
@with_plugin(8)
async def test_memory_that_runs_out(client: Any, times: int) -> None:
    """Others make room, or the task is tried again."""
    x = client.persist(on_devices(numbers(), 160))
    await wait(x)
    peers.fail("cuMemAlloc", 2, times)  # out of memory
    assert (await client.compute(read(rechunked(x, (40, N)))) == numbers()).all()
    assert not driver.backend().machine.faults._planned


def test_pieces_that_arrive_where_a_device_was_full_come_in_host_memory() -> None:
    with layout(2, 2) as client:
        client.run(peers.fail, "cuIpcOpenMemHandle", 2)  # once, as out of memory
        x = on_devices(numbers(), (N, N // BLOCKS))
        assert (read(rechunked(x, (N // BLOCKS, N))).compute() == numbers()).all()
        assert "host" in peers.ways(client)


# -- a worker that dies


@pytest.mark.parametrize("phase", ["cuLaunchKernelEx", "cuIpcGetMemHandle"])
def test_a_worker_that_is_killed_in_the_middle(phase: str) -> None:
    def kill_at(dask_worker: Worker) -> None:
        def die(*args: Any) -> bool:
            os.kill(os.getpid(), signal.SIGKILL)
            return False

        driver.backend().machine.faults.inject(phase, None, when=die)

    with layout(3, 3) as client:
        first = next(iter(client.scheduler_info()["workers"]))
        client.run(kill_at, workers=[first])
        x = on_devices(numbers(), (N, N // 12))
        y = read(rechunked(x, (N // 12, N)))
        assert (y.compute() == numbers()).all()
        assert first not in client.scheduler_info()["workers"]
        client.wait_for_workers(3, timeout=60)
        assert nothing_left(client)


# -- other arrays


@with_plugin(4, 4, shared=True)
async def test_on_the_device_of_the_task_or_on_the_host_where_it_has_none(client: Any) -> None:
    x = on_devices(numbers(), 160)
    with dask.annotate(device=3):
        rows = rechunked(x, (40, N))
        found = await client.compute(
            rows.map_blocks(lambda x: np.full(x.shape, x.device.device_id), dtype=int)
        )
        assert (found == 3).all()
    with dask.annotate(device="none"):
        found = await client.compute(rechunked(x, (80, N)))  # other tasks than before
    own = await client.compute(rechunked(da.from_array(numbers(), chunks=160), (40, N)))
    for one in (found, own):  # NumPy's arrays are dask's own
        assert type(one) is np.ndarray
        assert (one == numbers()).all()
    assert _rechunk.ArrayRechunkRun.__name__ == "DeviceRechunk"
    await client.unregister_worker_plugin("devctx")
    assert _rechunk.ArrayRechunkRun.__name__ == "ArrayRechunkRun", "dask's own is back"


@with_plugin(4, 4, shared=True)
async def test_blocks_are_made_at_the_first_try_on_each_worker(client: Any, scheduler: Any) -> None:
    x = client.persist(on_devices(numbers(), (N, 40)))
    for task in (lambda y: y, read):  # a block alone, and with a task that dask fuses with it
        y = client.persist(task(rechunked(x, (40, N))))
        await wait(y)
        made = [scheduler.tasks[future.key] for future in futures_of(y)]
        for ts in made:
            assert [row[2] for row in scheduler.story(ts)].count("processing") == 1
        assert {len(ws.has_what & {*made}) for ws in scheduler.workers.values()} == {N // 40 // 2}
        del y


class Other(SimulatedArray):
    """An array on a device, of a type that nobody knows."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Other.asarray, "cannot take a Other on cuda:"),
        (lambda x, block_id=None: asarray(x) if any(block_id) else x, "cannot join arrays"),
    ],
)
@with_plugin(8)
async def test_refused_with_the_reason(client: Any, worker: Any, kind: Any, said: str) -> None:
    future = client.compute(rechunked(on_devices(numbers(), 160, kind), (40, N)))
    error: BaseException | None = await future.exception()
    while error is not None and not isinstance(error, TypeError):
        error = error.__cause__
    assert said in str(error)
    await async_poll_for(lambda: not worker.state.executing, timeout=10)  # the others fail, too


@on_cluster(4, 4)
async def test_a_worker_without_devices_makes_no_block(client: Any, a: Any, b: Any) -> None:
    with pytest.raises(DevicesInUseError):
        await client.register_plugin(DevicePlugin(devices_per_worker=4))  # all that there are
    none, has = sorted((a, b), key=lambda one: len(one.plugins["devctx"].worker_devices))
    x = client.persist(on_devices(numbers(), 160), workers=[has.address], optimize_graph=False)
    error = await client.compute(rechunked(x, (40, N)), optimize_graph=False).exception()
    assert f"the worker {none.address} uses no device" in str(error.__cause__)
