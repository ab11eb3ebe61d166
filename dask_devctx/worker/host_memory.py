"""What a worker holds in host memory, as dask counts it: not what is on its devices."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager

from distributed import Worker

from dask_devctx.dask_internals.worker import spilling
from dask_devctx.transfer import nbytes_by_device


def counting_host_memory(
    worker: Worker,
    *,
    written: Callable[[Hashable, object], None],
    read_back: Callable[[Hashable, object], None],
) -> AbstractContextManager[None]:
    """While it is open, a worker spills what is in host memory, and not for what is on devices.

    Parameters
    ----------
    worker
        The worker. What it holds when this is closed stays counted as it was.
    written
        Called with a key and its value whenever dask is about to write it to disk.
    read_back
        Called with a key and its value whenever dask has read it from disk.

    Notes
    -----
    dask counts the bytes of a CuPy array like those of a NumPy one, and writes to disk what goes
    beyond a share of ``memory_limit``, which is host memory. A machine whose GPUs have more memory
    than its host would spill long before they are full, and make no room by it.

    Concerns the share ``distributed.worker.memory.target``. What dask spills since the process
    itself has grown beyond ``…memory.spill``, it chooses by age alone, values on devices too.
    """
    return spilling(worker, weigh=_in_host_memory, written=written, read_back=read_back)


def _in_host_memory(value: object, counted: float) -> float:
    try:
        on_devices = sum(nbytes_by_device.estimated(value).places.values())
    except Exception:  # somebody's type; the task that is given the value will say so
        return counted
    # Not every library's arrays count as large as they are.
    return max(counted - on_devices, 0)
