"""Breaks a device after its task's Python has returned, again and again; only that task may err.

Run it with ``make blame``. In each round, many good tasks run, and one whose kernel breaks its
device some time after the task counts as done. Every good task must give its right value. The bad
one must err with the device's error, and be its only suspect. A failure may end one worker only.

``--library`` names the library whose kernels run on real GPUs; by default, devices are simulated.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import dask
from distributed import Client, wait

from dask_devctx import DeviceFailedError, LocalDeviceCluster, driver

LENGTH = 1000
# How long the bad kernel runs before it breaks the device.
KERNEL_S = 0.2


def expected(number: int) -> int:
    return sum((value + number) ** 2 for value in range(LENGTH))


# -- the tasks of each library


def good_simulated(number: int) -> int:
    import numpy as np

    from dask_devctx import SimulatedArray

    time.sleep(0.002)
    values = SimulatedArray.asarray(np.arange(LENGTH) + number)
    return int((values * values).sum())


def bad_simulated() -> str:
    from cuda.bindings.driver import CUresult

    machine = driver.backend().machine
    assert machine is not None
    machine.faults.poison(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, after_s=KERNEL_S)
    return "looks good"


def good_cupy(number: int) -> int:
    import cupy

    values = cupy.arange(LENGTH, dtype=cupy.int64) + number
    return int((values * values).sum())


def bad_cupy(kernel_s: float = KERNEL_S) -> str:
    import cupy
    import numpy

    source = r"""
    extern "C" __global__ void write(long long where, unsigned long long cycles) {
        unsigned long long start = clock64();  // so a clock that jumps back ends the wait
        while (clock64() - start < cycles) {}
        *(volatile int*)where = 1;
    }
    """
    cycles = numpy.int64(kernel_s * 1.7e9)
    cupy.RawKernel(source, "write")((1,), (1,), (numpy.int64(16), cycles))
    return "looks good"


def good_torch(number: int) -> int:
    import torch

    values = torch.arange(LENGTH, dtype=torch.int64, device="cuda") + number
    return int((values * values).sum())


def bad_torch() -> str:
    import torch

    values = torch.zeros(8, device="cuda")
    far = torch.full((1,), 10**9, dtype=torch.int64, device="cuda")
    torch.cuda._sleep(int(KERNEL_S * 1.7e9))
    values[far] = 1.0  # the kernel asserts that the index is in range
    return "looks good"


@functools.cache
def numba_kernels() -> tuple[Any, Any]:
    import numpy

    if not hasattr(numpy, "row_stack"):  # older versions of Numba ask for it, NumPy 2.4 has it not
        numpy.row_stack = numpy.vstack
    from numba import cuda

    def square(values: Any, number: int) -> None:
        index = cuda.grid(1)
        if index < values.shape[0]:
            values[index] = (values[index] + number) ** 2

    def write(values: Any, where: int, times: int) -> None:
        for _ in range(times):
            cuda.nanosleep(500_000)
        values[where] = 1

    return cuda.jit(square), cuda.jit(write)


def good_numba(number: int) -> int:
    import numpy
    from numba import cuda

    square, _ = numba_kernels()
    values = cuda.to_device(numpy.arange(LENGTH, dtype=numpy.int64))
    square[8, 128](values, number)
    return int(values.copy_to_host().sum())


def bad_numba() -> str:
    import numpy
    from numba import cuda

    _, write = numba_kernels()
    values = cuda.to_device(numpy.zeros(8, dtype=numpy.int64))
    write[1, 1](values, 1 << 40, int(KERNEL_S / 0.0005))
    return "looks good"


TASKS: dict[str, tuple[Callable[[int], int], Callable[[], str]]] = {
    "simulated": (good_simulated, bad_simulated),
    "cupy": (good_cupy, bad_cupy),
    "torch": (good_torch, bad_torch),
    "numba": (good_numba, bad_numba),
}


# -- the rounds


def pid() -> int:
    return os.getpid()


def failures(client: Client) -> int:
    return sum(event["action"] == "device-failed" for _, event in client.get_events("devctx"))


def _is_wrong(future: Any, number: int) -> bool:
    try:
        return bool(future.result(timeout=120) != expected(number))
    except Exception as error:
        print(f"INNOCENT: {error!r}", file=sys.stderr)
        return True


def play_round(client: Client, library: str, tasks: int, workers: int) -> tuple[int, int, int]:
    """Run one round; return how often a device failed, and how many tasks were wrong."""
    good, bad = TASKS[library]
    client.wait_for_workers(workers, timeout=120)
    before, failed = set(client.run(pid).values()), failures(client)
    first = client.map(good, range(tasks // 3), pure=False)
    culprit = client.submit(bad, pure=False)
    futures = first + client.map(good, range(tasks // 3, tasks), pure=False)
    wait(futures, timeout=300)
    until = time.monotonic() + 120
    while culprit.status != "error" and time.monotonic() < until:
        time.sleep(0.01)
    # Results that were lost with their worker are computed again, also while this waits.
    wrong = sum(_is_wrong(future, number) for number, future in enumerate(futures))
    error = culprit.exception() if culprit.status == "error" else None
    suspects = error.suspects if isinstance(error, DeviceFailedError) else ()
    found = len(suspects) == 1 and suspects[0].startswith(f"{culprit.key} on cuda:")
    if not found:
        print(f"NOT FOUND: {culprit.status}: {error!r}", file=sys.stderr)
    client.wait_for_workers(workers, timeout=120)
    failed = failures(client) - failed
    ended = before - set(client.run(pid).values())
    assert len(ended) <= failed, f"{len(ended)} workers ended by {failed} failures"
    return failed, wrong, int(not found)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=[*TASKS], default="simulated")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--workers", type=int, default=1, help="1 for all devices, or one for each")
    parser.add_argument("--json", action="store_true", help="only print what went wrong")
    arguments = parser.parse_args(given)
    if arguments.library == "simulated":
        os.environ[driver.SIMULATED_DEVICES_VARIABLE] = "4"
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as locks,  # others may use devices of the same names
        dask.config.set({"distributed.admin.log-length": 10_000, "devctx.lock-directory": locks}),
        LocalDeviceCluster(
            n_workers=arguments.workers, dashboard_address=":0", silence_logs=logging.CRITICAL
        ) as cluster,
        Client(cluster) as client,
    ):
        rounds = [
            play_round(client, arguments.library, arguments.tasks, arguments.workers)
            for _ in range(arguments.times)
        ]
    lost, wrong, not_found = map(sum, zip(*rounds, strict=True))
    if arguments.json:
        print(json.dumps({"rounds": arguments.times, "wrong": wrong, "not found": not_found}))
        return 0
    print(
        f"{arguments.times} rounds of {arguments.tasks} good tasks and a bad one, "
        f"{arguments.library}, {arguments.workers} workers: the bad task erred alone as its only "
        f"suspect in {arguments.times - not_found}; {wrong} good tasks were wrong or erred; "
        f"{lost} failures of devices; {time.monotonic() - began:.0f} s"
    )
    return int(bool(wrong or not_found))


if __name__ == "__main__":
    # Workers import this module by its name, and so compile each kernel once.
    from tests import blame

    sys.exit(blame.main())
