"""The answer of ``dask devctx config``: options and devices of a running cluster's workers."""

from __future__ import annotations

from typing import Any

import dask
from distributed import Client, Worker

from dask_devctx.plugin import DevicePlugin

_OF_MEMORY = (
    "memory_limit",
    "memory_target_fraction",
    "memory_spill_fraction",
    "memory_pause_fraction",
)


def cluster_configuration(client: Client) -> Any:
    """Return the configuration of a cluster, as plain data.

    Parameters
    ----------
    client
        A client of the cluster.

    Returns
    -------
    dict
        ``"scheduler"``: its address, protocol and ``worker_ttl``, in seconds. ``"workers"``: for
        each address, ``name``, ``nthreads``, ``memory_limit`` in bytes and dask's fractions of it,
        ``timeouts`` of connections, and ``devctx``. That is None for a worker without the plugin,
        and else has ``options`` and ``devices``: for each UUID ``device``,
        ``device_memory_limit`` and RMM's sizes, in bytes. An asynchronous client gets an awaitable.
    """
    return client.sync(_collected, client)


async def _collected(client: Client) -> dict[str, Any]:
    workers = await client.run(_of_worker)
    address = client.scheduler.address
    return {
        "scheduler": {
            "address": address,
            "protocol": address.partition("://")[0],
            "worker_ttl": await client.run_on_scheduler(_worker_ttl),
        },
        "workers": dict(sorted(workers.items(), key=lambda item: str(item[1]["name"]))),
    }


def _worker_ttl(dask_scheduler: Any) -> float | None:
    found: float | None = dask_scheduler.worker_ttl
    return found


def _of_worker(dask_worker: Worker) -> dict[str, Any]:
    plugins = [one for one in dask_worker.plugins.values() if isinstance(one, DevicePlugin)]
    return {
        "name": dask_worker.name,
        "nthreads": dask_worker.state.nthreads,
        **{name: getattr(dask_worker.memory_manager, name) for name in _OF_MEMORY},
        "timeouts": dask.config.get("distributed.comm.timeouts"),
        "devctx": plugins[0].configuration() if plugins else None,
    }
