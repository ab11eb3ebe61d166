"""Devices that fail for real: an illegal address, and 1 TiB asked for.

Each scenario runs in a process of its own with a cluster of its own, and what breaks is a worker of
that cluster: nothing that is broken here is ever used by the tests' process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

import dask
import pytest
from distributed import Client

from dask_devctx import LocalDeviceCluster
from tests.gpu.own_process import answer_of

pytestmark = [pytest.mark.gpu(count=1), pytest.mark.timeout(320)]

MIB = 2**20

ILLEGAL = r"""
extern "C" __global__ void write(long long where, unsigned long long wait_cycles) {
    unsigned long long start = clock64();  // so a clock that jumps back ends the wait
    while (clock64() - start < wait_cycles) {}
    *(volatile int*)where = 1;
}
"""


# -- what runs in the workers


def pid_after(number: int, seconds: float = 0.01) -> tuple[int, int]:
    time.sleep(seconds)
    return number, os.getpid()


def square_sum(number: int) -> tuple[int, int, int]:
    import cupy

    values = cupy.arange(1000, dtype=cupy.int64) + number
    return number, int((values * values).sum()), values.device.id


def expected(number: int) -> int:
    return sum((value + number) ** 2 for value in range(1000))


def write_to_an_illegal_address(wait_cycles: int) -> None:
    import cupy
    import numpy

    kernel = cupy.RawKernel(ILLEGAL, "write")
    kernel((1,), (1,), (numpy.int64(16), numpy.int64(wait_cycles)))
    cupy.cuda.get_current_stream().synchronize()


def allocate(library: str, nbytes: int) -> int:
    if library == "cupy":
        import cupy

        return int(cupy.empty(nbytes, dtype=cupy.uint8).nbytes)
    import torch

    return int(torch.empty(nbytes, dtype=torch.uint8, device="cuda").numel())


# -- the scenarios, each in a process of its own


def start(stack: ExitStack) -> Any:
    cluster = stack.enter_context(LocalDeviceCluster(n_workers=1, dashboard_address=":0"))
    return stack.enter_context(Client(cluster))


def describe(error: BaseException | None) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "cause": type(getattr(error, "__cause__", None)).__name__,
        **{
            name: getattr(error, name)
            for name in ("status", "suspects", "free_nbytes", "requested_nbytes")
            if hasattr(error, name)
        },
    }


def failing() -> dict[str, Any]:
    with ExitStack() as stack:
        client = start(stack)
        first = client.map(square_sum, range(20))
        before = {pid for _, pid in client.gather(client.map(pid_after, range(4)))}
        client.gather(first)
        with dask.annotate(device=0):  # the kernel runs for a quarter of a second
            bad = client.submit(write_to_an_illegal_address, 500_000_000)
        others = client.map(square_sum, range(20, 60))
        error = bad.exception(timeout=120)
        right = [
            value == expected(number)
            for number, value, _ in client.gather(first + others, errors="raise")
        ]
        after = {pid for _, pid in client.gather(client.map(pid_after, range(10, 14)))}
        return {
            "error": describe(error),
            "bad": bad.key,
            "right": right,
            "another process": not before & after,
        }


def one_tebibyte(library: str) -> dict[str, Any]:
    with ExitStack() as stack:
        client = start(stack)
        (before,) = client.run(os.getpid).values()
        with dask.annotate(device=0):
            error = client.submit(allocate, library, 2**40).exception(timeout=120)
        fits = client.submit(allocate, library, MIB).result(timeout=60)
        (after,) = client.run(os.getpid).values()
        return {"error": describe(error), "fits": fits, "same process": before == after}


# -- the tests


def need(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


@pytest.mark.gpu(count=2)
def test_an_illegal_address() -> None:
    need("cupy")
    seen = answer_of("tests.gpu.test_failures", "failing")
    assert seen["error"]["type"] == "DeviceFailedError", seen
    assert seen["error"]["status"] in ("CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED")
    assert seen["error"]["cause"] in ("CUDARuntimeError", "CUDADriverError")
    assert [suspect.partition(" on ")[0] for suspect in seen["error"]["suspects"]] == [seen["bad"]]
    assert seen["right"]
    assert all(seen["right"])
    assert seen["another process"]


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("library", ["cupy", "torch", "numba"])
def test_only_the_task_errs_whose_kernel_breaks_the_device_later(
    library: str, workers: int
) -> None:
    need(library)
    rounds = ("--times", "2", "--tasks", "60", "--json")
    seen = answer_of("tests.blame", "--library", library, "--workers", str(workers), *rounds)
    assert seen == {"rounds": 2, "wrong": 0, "not found": 0}


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_one_tebibyte(library: str) -> None:
    need(library)
    seen = answer_of("tests.gpu.test_failures", "one_tebibyte", library)
    assert seen["error"]["type"] == "DeviceOutOfMemoryError", seen
    assert seen["error"]["cause"] == "OutOfMemoryError"
    assert seen["error"]["requested_nbytes"] == 2**40
    assert seen["error"]["free_nbytes"] > 0
    assert seen["fits"] == MIB
    assert seen["same process"], "out of memory is no reason to end a process"


if __name__ == "__main__":
    # Workers import this module by its name.
    from tests.gpu import test_failures

    print(json.dumps(getattr(test_failures, sys.argv[1])(*sys.argv[2:])))
