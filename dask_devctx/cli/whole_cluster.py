"""``dask devctx info --scheduler``: the GPUs of all machines of a cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributed import Client, Worker

from dask_devctx.cuda.inspection import Machine, inspect_machine
from dask_devctx.plugin import DevicePlugin


@dataclass(frozen=True)
class WorkerView:
    """One worker of a cluster.

    Parameters
    ----------
    address, name, host
        The worker.
    uses
        The UUIDs of the devices that it uses; None without the plugin.
    machine
        Its machine as its process sees it, or the reason why it does not say.
    """

    address: str
    name: str
    host: str
    uses: tuple[str, ...] | None
    machine: Machine | str


def views(client: Client) -> list[WorkerView]:
    """Return all workers of a cluster, by host and name."""
    # `client.scheduler_info()` may lack the workers: dask refreshes what it returns without them.
    known: Mapping[str, Any] = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    answers = client.run(_of_worker, on_error="return")
    found = []
    for address, worker in known.items():
        answer = answers.get(address, "it left")
        machine, uses = answer if isinstance(answer, tuple) else (repr(answer), None)
        found.append(WorkerView(address, str(worker["name"]), worker["host"], uses, machine))
    return sorted(found, key=lambda view: (view.host, view.name))


def _of_worker(dask_worker: Worker) -> tuple[Machine, tuple[str, ...] | None]:
    plugin = dask_worker.plugins.get(DevicePlugin.name)
    devices = getattr(plugin, "worker_devices", None)
    uses = None if devices is None else tuple(device.uuid for device in devices)
    return inspect_machine(), uses


def by_machine(workers: list[WorkerView]) -> dict[str, list[WorkerView]]:
    """Return the workers of each host."""
    found: defaultdict[str, list[WorkerView]] = defaultdict(list)
    for view in workers:
        found[view.host].append(view)
    return dict(found)


def uses_text(view: WorkerView) -> str:
    """Return a line that says which devices a worker uses."""
    head = f"worker {view.name} ({view.address})"
    if isinstance(view.machine, str):
        return f"{head} does not answer: {view.machine}"
    if view.uses is None:
        return f"{head} does not run the plugin: client.register_plugin(DevicePlugin())"
    if not view.uses:
        return f"{head} has no devices"
    names = {device.uuid: f"cuda:{device.device_id}" for device in view.machine.devices}
    return f"{head} uses {', '.join(names.get(uuid, uuid) for uuid in view.uses)}"
