"""Arrays of 4 GiB on two devices of 1 GiB: reduced, transposed and shuffled, to the last bit."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import psutil
import pytest
from distributed import Client, wait

from dask_devctx import SimulatedArray
from tests.distributed import peers
from tests.distributed.memory.test_spilling import counts, read, threads

GIB = 2**30
CHUNKS, CHUNK = 8, 2904
N = CHUNKS * CHUNK  # 4.02 GiB
# Each number of the array is the sum of its row's number and its column's.
ROWS, COLUMNS = np.random.default_rng(0).integers(0, 2**30, (2, N))
ORDER = np.random.default_rng(1).permutation(N)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        psutil.virtual_memory().available < 12 * GIB,
        reason="simulated devices are host memory, and less than 12 GiB of it are available",
    ),
]


def block(block_info: Any = None) -> SimulatedArray:
    rows, columns = (slice(*ends) for ends in block_info[None]["array-location"])
    return SimulatedArray.asarray(np.add.outer(ROWS[rows], COLUMNS[columns]))


def array() -> da.Array:
    sizes = ((CHUNK,) * CHUNKS,) * 2
    return da.map_blocks(block, chunks=sizes, dtype=int, meta=np.empty((0, 0), int))


def check_transposed(x: da.Array) -> None:
    found = read((x + x.T).sum(axis=0).compute())
    assert (found == ROWS.sum() + N * COLUMNS + N * ROWS + COLUMNS.sum()).all()


def check_sums(client: Client) -> da.Array:
    x = array().persist()
    wait(x)
    assert counts(client)["spills"] >= CHUNKS**2 // 3  # two devices have room for fewer than 30
    assert read(x.sum().compute()) == N * int(ROWS.sum() + COLUMNS.sum())
    check_transposed(x)
    return x


def check_all(client: Client) -> None:
    x = check_sums(client)
    columns = x.rechunk((N, CHUNK // 4), method="tasks")
    assert (read(columns.max(axis=0).compute()) == ROWS.max() + COLUMNS).all()
    shuffled = da.take(x, ORDER, axis=0)
    assert (read(shuffled.sum(axis=1).compute()) == N * ROWS[ORDER] + COLUMNS.sum()).all()


def test_reduced_and_transposed() -> None:
    with threads(1 * GIB) as client:
        check_sums(client)


@pytest.mark.long
def test_rechunked_and_shuffled() -> None:
    with threads(1 * GIB) as client:
        check_all(client)


@pytest.mark.long
def test_with_two_tasks_at_a_time() -> None:
    with threads(1 * GIB, tasks_per_device=2) as client:
        check_all(client)


@pytest.mark.long
def test_through_the_disk(tmp_path: Path) -> None:
    with (
        dask.config.set({"distributed.worker.memory.spill": False}),  # simulated devices would
        dask.config.set({"distributed.worker.memory.pause": False}),  # count as host memory
        threads(1 * GIB, memory_limit="1 GiB", local_directory=str(tmp_path)) as client,
    ):
        most = [0]

        def look() -> None:
            while most[0] >= 0:
                on_disk = client.run(lambda dask_worker: len(dask_worker.data.disk))
                most[0] = max(most[0], *on_disk.values())
                time.sleep(0.2)

        looking = threading.Thread(target=look)
        looking.start()
        try:
            check_all(client)
        finally:
            found, most[0] = most[0], -1
            looking.join()
        assert found > 0


@pytest.mark.long
def test_with_a_worker_killed() -> None:
    with (
        dask.config.set({"devctx.simulated-memory": "1 GiB"}),
        peers.cluster(2, memory_limit=0) as (client, workers),
    ):
        x = array()
        check_transposed(x)
        killing = threading.Timer(
            8.0,
            lambda: client.run(
                lambda: os.kill(os.getpid(), signal.SIGKILL), workers=workers[1:], on_error="ignore"
            ),
        )
        killing.start()
        check_transposed(x)
        killing.join()
        check_transposed(x)
