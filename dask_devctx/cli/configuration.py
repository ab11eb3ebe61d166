"""``dask devctx config``: the configuration of a running cluster."""

from __future__ import annotations

import json
from typing import Any

import click
import dask
from distributed import Client, Worker

from dask_devctx.cli.connection import connected, finds_scheduler
from dask_devctx.client.tables import aligned
from dask_devctx.errors.base import counted, nbytes_text
from dask_devctx.plugin import DevicePlugin

_BYTES = ("memory_limit", "device_memory_limit", "rmm_pool_size", "rmm_maximum_pool_size")
_OF_HOST_MEMORY = (
    "memory_limit",
    "memory_target_fraction",
    "memory_spill_fraction",
    "memory_pause_fraction",
)


@click.command(
    "config",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  dask devctx config tcp://scheduler:8786
  dask devctx config --scheduler-file scheduler.json --json
""",
)
@click.argument("scheduler", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@finds_scheduler
def configuration(scheduler: str | None, as_json: bool, **where: Any) -> None:
    """Show the options, devices and memory limits of a cluster's workers.

    The exit status is 1 if the scheduler cannot be reached, and 2 for wrong options.
    """
    with connected(scheduler, **where) as client:
        found = cluster_configuration(client)
    click.echo(json.dumps(found, indent=2, default=str) if as_json else _as_text(found))


def _as_text(found: dict[str, Any]) -> str:
    scheduler, workers = found["scheduler"], found["workers"]
    parts = [
        f"scheduler {scheduler['address']}, worker_ttl {scheduler['worker_ttl']} s, "
        + counted(len(workers), "worker")
    ]
    head = ("worker", "address", "threads", "host memory", "devices")
    rows = [
        (
            one["name"],
            address,
            one["nthreads"],
            nbytes_text(one["memory_limit"]),
            "no plugin" if one["devctx"] is None else len(one["devctx"]["devices"]),
        )
        for address, one in workers.items()
    ]
    if rows:
        parts.append(aligned(head, rows))
    devices = [
        (one["name"], *_row(device))
        for one in workers.values()
        if one["devctx"]
        for device in one["devctx"]["devices"].values()
    ]
    if devices:
        head = ("worker", "device", "memory limit", "RMM pool", "its maximum")
        parts.append(aligned(head, devices))
    tables: dict[str, list[str]] = {}  # the names of the workers with the same options
    for one in workers.values():
        if one["devctx"]:
            given = one["devctx"]["options"].items()
            table = [(name, _shown(value)) for name, value in given if value is not None]
            tables.setdefault(aligned(("option", "value"), table), []).append(str(one["name"]))
    for table_text, names in tables.items():
        owners = "all workers" if len(tables) == 1 else f"worker {', '.join(names)}"
        parts.append(f"Options of {owners}:\n\n{table_text}")
    return "\n\n".join(parts)


def _row(device: dict[str, Any]) -> tuple[object, ...]:
    limits = (device[name] for name in _BYTES[1:])
    return device["device"], *(None if nbytes is None else nbytes_text(nbytes) for nbytes in limits)


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def cluster_configuration(client: Client) -> Any:
    """Return the configuration of a cluster, as plain data."""
    return client.sync(_collected, client)


async def _collected(client: Client) -> dict[str, Any]:
    workers = await client.run(_of_worker)
    address = client.scheduler.address
    ttl: Any = await client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.worker_ttl)
    return {
        "scheduler": {
            "address": address,
            "protocol": address.partition("://")[0],
            "worker_ttl": ttl,
        },
        "workers": dict(sorted(workers.items(), key=lambda item: str(item[1]["name"]))),
    }


def _of_worker(dask_worker: Worker) -> dict[str, Any]:
    plugins = [one for one in dask_worker.plugins.values() if isinstance(one, DevicePlugin)]
    return {
        "name": dask_worker.name,
        "nthreads": dask_worker.state.nthreads,
        **{name: getattr(dask_worker.memory_manager, name) for name in _OF_HOST_MEMORY},
        "timeouts": dask.config.get("distributed.comm.timeouts"),
        "devctx": plugins[0].configuration() if plugins else None,
    }
