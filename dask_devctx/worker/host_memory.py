"""The host memory of a worker as dask counts it: values on devices do not count."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext

from distributed import Worker

from dask_devctx.dask_internals.worker import has_automatic_limit, limited_memory, spilling
from dask_devctx.transfer import nbytes_by_device


def counting_host_memory(
    worker: Worker,
    *,
    written: Callable[[Hashable, object], None],
    read_back: Callable[[Hashable, object], None],
) -> AbstractContextManager[None]:
    """While it is open, only values in host memory count towards a worker's spilling to disk."""
    # dask counts the bytes of a CuPy array like those of a NumPy array, and writes values to disk
    # if they exceed a fraction of `memory_limit`, which is host memory. A machine whose GPUs have
    # more memory than its host would spill long before the GPUs are full, and free no host memory
    # by it. This concerns the fraction `distributed.worker.memory.target`. When the process itself
    # grows beyond `….spill`, dask chooses values by age alone, also values on devices.
    return spilling(worker, weigh=_in_host_memory, written=written, read_back=read_back)


def fair_limit(worker: Worker, fair: int) -> AbstractContextManager[None]:
    """While it is open, a worker's automatic memory limit is its fair part of the host's memory."""
    # dask's `memory_limit="auto"` follows from `nthreads`, which is generous for a worker with
    # devices. Several such workers would have more memory together than there is.
    limit = worker.memory_manager.memory_limit
    if has_automatic_limit(worker) and fair < limit:
        return limited_memory(worker, fair)
    return nullcontext()


def _in_host_memory(value: object, counted: float) -> float:
    try:
        on_devices = sum(nbytes_by_device.estimated(value).places.values())
    except Exception:  # of a user's type; the task that gets the value fails with it
        return counted
    # dask counts some libraries' arrays smaller than they are.
    return max(counted - on_devices, 0)
