"""Tasks of several GPUs: NCCL, multi-GPU FFT, while others fill the rest.

Each scenario has a process of its own, with one worker for all of its GPUs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import dask
import pytest
from distributed import Client

from dask_devctx import task_devices
from tests.gpu.own_process import answer_of, connected

pytestmark = pytest.mark.timeout(320)

COUNTS = [pytest.param(n, marks=pytest.mark.gpu(count=n)) for n in (2, 4)]
FILLERS = 400
LENGTH = 1 << 20


# -- what the tasks do; each returns whether its result is right


def cupy_all_reduce(_: int = 0) -> bool:
    import cupy
    from cupy.cuda import nccl

    devices = task_devices()
    communicators = nccl.NcclCommunicator.initAll([int(one) for one in devices])
    arrays = []
    for n, one in enumerate(devices):
        with one:
            arrays.append(cupy.full(LENGTH, n + 1, dtype="f4"))
    nccl.groupStart()
    for one, communicator, array in zip(devices, communicators, arrays, strict=True):
        with one:
            pointer = array.data.ptr
            communicator.allReduce(
                pointer,
                pointer,
                LENGTH,
                nccl.NCCL_FLOAT32,
                nccl.NCCL_SUM,
                cupy.cuda.Stream.null.ptr,
            )
    nccl.groupEnd()
    total = sum(range(1, len(devices) + 1))
    right = []
    for one, array in zip(devices, arrays, strict=True):
        with one:
            right.append(bool((array == total).all()))
    for communicator in communicators:
        communicator.destroy()
    return all(right)


def cufft(_: int = 0) -> bool:
    import cupy
    import numpy

    rng = numpy.random.default_rng(0)
    x = (rng.random(LENGTH) + 1j * rng.random(LENGTH)).astype("c8")
    cupy.fft.config.use_multi_gpus = True
    cupy.fft.config.set_cufft_gpus([int(one) for one in task_devices()])
    try:
        found = cupy.asnumpy(cupy.fft.fft(cupy.asarray(x)))
    finally:
        cupy.fft.config.use_multi_gpus = False
    expected = numpy.fft.fft(x)
    return bool(abs(found - expected).max() <= 1e-4 * abs(expected).max())


TASKS = {one.__name__: one for one in (cupy_all_reduce, cufft)}


# -- the scenarios


def _timed(task: Callable[[int], Any], number: int) -> tuple[Any, list[int], float, float]:
    start = time.perf_counter()
    answer = task(number)
    return answer, [int(one) for one in task_devices()], start, time.perf_counter()


def _fill(_: int) -> int:
    import cupy

    x = cupy.random.random((1024, 1024), dtype="f4")
    for _n in range(4):
        x = x @ x / 1024
    cupy.cuda.get_current_stream().synchronize()
    return int(task_devices()[0])


def beside_others(count: int, name: str) -> dict[str, Any]:
    """Tasks of all GPUs while tasks of one fill the rest: right, and never beside each other."""
    with connected(n_workers=1, devices=list(range(count))) as client:
        runs = _run(client, count, name)
    spans: dict[int, list[tuple[float, float]]] = {}
    for _, devices, start, end in [*runs[0], *runs[1]]:
        for one in devices:
            spans.setdefault(one, []).append((start, end))
    overlaps = 0
    for one in spans.values():
        one.sort()
        overlaps += sum(b[0] < a[1] for a, b in itertools.pairwise(one))
    return {
        "right": all(answer is True for answer, *_ in runs[0]),
        "devices": sorted({len(devices) for _, devices, *_ in runs[0]}),
        "filled": sorted({one for _, devices, *_ in runs[1] for one in devices}),
        "overlaps": overlaps,
    }


def _run(client: Client, count: int, name: str) -> tuple[list[Any], list[Any]]:
    client.gather(client.map(_fill, range(count), pure=False))  # the libraries are loaded
    with dask.annotate(devices=count):
        client.submit(_timed, TASKS[name], 0, pure=False).result(120)
    fillers = client.map(lambda n: _timed(_fill, n), range(FILLERS), pure=False)
    with dask.annotate(devices=count, priority=1):
        large = client.map(lambda n: _timed(TASKS[name], n), range(10), pure=False)
    return client.gather(large), client.gather(fillers)


# -- the tests


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", TASKS)
def test_work_of_several_gpus_beside_that_of_one(name: str, count: int) -> None:
    pytest.importorskip("cupy")
    # NCCL's multicast over NVLink needs rights that a shared machine may not give.
    found = answer_of(beside_others, count, name, NCCL_NVLS_ENABLE="0")
    assert found["right"]
    assert found["devices"] == [count]
    assert found["filled"] == list(range(count))
    assert found["overlaps"] == 0
