"""The host memory of a worker: its fair part of the machine's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from distributed import Worker

from dask_devctx.dask_internals.worker import has_automatic_limit, limited_memory


def fair_limit(worker: Worker, fair: int) -> AbstractContextManager[None]:
    """While it is open, a worker's automatic memory limit is its fair part of the host's memory."""
    # dask's `memory_limit="auto"` follows from `nthreads`, which is generous for a worker with
    # devices. Several such workers would have more memory together than there is.
    limit = worker.memory_manager.memory_limit
    if has_automatic_limit(worker) and fair < limit:
        return limited_memory(worker, fair)
    return nullcontext()
