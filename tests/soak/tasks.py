"""The functions that the tasks call, with CuPy or on simulated devices; each worker loads them."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import threading
from typing import Any

import numpy as np
from cuda.bindings.driver import CUresult
from distributed import get_worker

from dask_devctx import Device, SimulatedArray, device_of, driver, task_devices
from dask_devctx.cuda.scope import open_scopes
from tests.blame import bad_cupy

# How a signal breaks a worker's devices while no task is guilty of it. With the first one
# dask-devctx knows that the hardware failed; the second one looks like the work of a task.
BREAKS = {
    signal.SIGUSR1: CUresult.CUDA_ERROR_ECC_UNCORRECTABLE,
    signal.SIGUSR2: CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,
}


def faults() -> Any:
    """Return the faults of the simulated machine; None on real GPUs."""
    machine = driver.backend().machine
    return None if machine is None else machine.faults


def array_of(host: np.ndarray) -> Any:
    """Return an array on the current device: CuPy's where the GPUs are real."""
    if faults() is not None:
        return SimulatedArray.asarray(host)
    import cupy

    return cupy.asarray(host)


def make(number: int, length: int) -> Any:
    array = array_of(np.arange(length) + number)
    assert device_of(array) is Device.current() is not None
    return array


def change(array: Any) -> Any:
    assert device_of(array) is Device.current(), "an input was not moved"
    return array + 1


def total(*arrays: Any) -> int:
    here = Device.current()
    assert here is not None
    assert all(device_of(array) is here for array in arrays), "an input was not moved"
    return sum(int(array.sum()) for array in arrays)


async def total_later(*arrays: Any) -> int:
    here = Device.current()
    await asyncio.sleep(0.001)
    assert Device.current() is here
    return total(*arrays)


def total_on_host(*arrays: Any) -> int:
    theirs = get_worker().plugins["devctx"].worker_devices
    here = Device.current()
    assert here is (None if Device(0) in theirs else theirs[0]), here
    return sum(int(array.get().sum()) for array in arrays)


def total_across(array: Any, count: int) -> int:
    """Sum an array in ``count`` parts, each on a device of its own."""
    devices = task_devices()
    assert len(set(devices)) == count, devices
    found = 0
    for device, part in zip(devices, np.array_split(array.get(), count), strict=True):
        with device:
            found += int(array_of(part).sum())
    return found


def meet(function: str, status: CUresult, at_exit: bool, *arrays: Any) -> int:
    """Sum arrays; a call of a simulated driver fails, half of the times, in this task's thread."""
    if faults() is None:
        return total(*arrays)
    me = threading.get_ident()

    def mine(*args: Any) -> bool:
        return threading.get_ident() == me and (not at_exit or int(args[0]) == 0)

    if random.random() < 0.5:
        faults().inject(function, status, when=mine)
    return total(*[array.copy_to(array.device) for array in arrays])


def break_device(after_s: float) -> str:
    """Leave a kernel that breaks the device; count as done, unless it breaks at once."""
    if faults() is None:
        return bad_cupy(after_s)
    faults().poison(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, after_s=after_s)
    return "looks good"


# -- in each worker


def dask_setup(worker: Any) -> None:
    """Let signals break the worker's devices."""
    loop = worker.loop.asyncio_loop

    def soon(status: CUresult) -> None:
        if status is CUresult.CUDA_ERROR_ILLEGAL_ADDRESS and _has_one_suspect(worker):
            loop.call_later(0.01, soon, status)
        else:
            faults().poison(status)

    for number, status in BREAKS.items():
        signal.signal(number, lambda *_, status=status: loop.call_soon_threadsafe(soon, status))


def _has_one_suspect(worker: Any) -> bool:
    """Return whether one task alone could have broken a device: nobody can tell that it did not."""
    plugin = worker.plugins.get("devctx")
    if plugin is None or plugin.extension is None:
        return False
    return len({one.key for one in plugin.extension.monitor.suspects.named()}) == 1


async def left_in_worker(dask_worker: Any) -> dict[str, int]:
    """Return the device memory that nobody gave back, and the scopes that are open."""
    peers = dask_worker.plugins["devctx"].extension.peers
    gc.collect()
    for _ in range(100):
        if not peers.in_use:
            break
        await asyncio.sleep(0.05)
    await peers.give_back()
    return {
        "values": len(dask_worker.data),
        "values in bytes": used_memory(dask_worker),
        "scopes": len(open_scopes()),
        "bytes on their way": int(peers.in_use),
    }


def used_memory(dask_worker: Any) -> int:
    """Return the bytes of device memory that a worker uses."""
    machine = driver.backend().machine
    if machine is not None:
        return sum(gpu.used_memory for gpu in machine.gpus)
    import cupy

    used = 0
    for device in dask_worker.plugins["devctx"].worker_devices:
        with device:
            used += int(cupy.get_default_memory_pool().used_bytes())
    return used
