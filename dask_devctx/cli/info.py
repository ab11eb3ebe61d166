"""``dask devctx info``: the GPUs of this machine, or of all machines of a cluster."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import click
from distributed import Client, Worker

from dask_devctx import config
from dask_devctx.cli.connection import connected, finds_scheduler
from dask_devctx.client.tables import aligned
from dask_devctx.config.options import Options
from dask_devctx.cuda.discovery import DeviceInfo
from dask_devctx.cuda.inspection import Machine, inspect_machine
from dask_devctx.errors.base import nbytes_text
from dask_devctx.plugin import DevicePlugin


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("address", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("--scheduler", help="The same as the address.")
@finds_scheduler
@click.pass_context
def info(
    context: click.Context,
    /,
    address: str | None,
    as_json: bool,
    scheduler: str | None,
    **where: Any,
) -> None:
    """Show the GPUs, their peer access, the hidden GPUs, and problems.

    With the ADDRESS of a scheduler, show those of all machines of its cluster.

    The command creates no CUDA context. Its exit status is 1 if no GPU can be used.
    """
    if address is not None and scheduler is not None:
        raise click.UsageError(f"two addresses: {address} and --scheduler {scheduler}")
    scheduler = address or scheduler
    if scheduler is not None or where["scheduler_file"] is not None:
        with connected(scheduler, **where) as client:
            found = _views(client)
        click.echo(json.dumps(_cluster_as_json(found), indent=2) if as_json else _of_cluster(found))
        context.exit(0 if any(view.uses for view in found) else 1)
    machine = inspect_machine()
    machine = replace(machine, problems=(*machine.problems, *_problems_of_the_configuration()))
    click.echo(json.dumps(_as_json(machine), indent=2) if as_json else _as_text(machine))
    context.exit(0 if machine.usable else 1)


def _problems_of_the_configuration() -> list[str]:
    found = config.unknown_keys()
    try:
        Options()
    except (TypeError, ValueError) as error:
        found.append(str(error))
    return found


def _of_cluster(found: list[WorkerView]) -> str:
    parts = []
    for host, of_host in itertools.groupby(found, lambda view: view.host):
        workers = list(of_host)
        lines = [f"Host {host}", *(_uses_text(view) for view in workers)]
        # Processes of one host may see different devices: each view is shown once.
        shown = [_as_text(view.machine) for view in workers if isinstance(view.machine, Machine)]
        parts += ["\n".join(lines), *dict.fromkeys(shown)]
    return "\n\n".join(parts) if parts else "the cluster has no workers"


def _cluster_as_json(found: list[WorkerView]) -> dict[str, Any]:
    return {
        view.address: {
            "name": view.name,
            "host": view.host,
            "uses": None if view.uses is None else list(view.uses),
            "machine": None if isinstance(view.machine, str) else _as_json(view.machine),
            "problem": view.machine if isinstance(view.machine, str) else None,
        }
        for view in found
    }


def _as_text(machine: Machine) -> str:
    shown = "not set" if machine.visible_devices is None else repr(machine.visible_devices)
    order = "" if machine.device_order is None else f", CUDA_DEVICE_ORDER={machine.device_order}"
    simulated = " simulated" if machine.simulated else ""
    cuda = f"CUDA {machine.cuda_version}" if machine.cuda_version else "CUDA not available"
    parts = [
        f"{len(machine.devices)}{simulated} device{'' if len(machine.devices) == 1 else 's'}, "
        f"{cuda}, CUDA_VISIBLE_DEVICES {shown}{order}"
    ]
    if machine.devices:
        head = ("device", "name", "uuid", "PCI bus id", "compute", "free", "total", "NUMA", "CPUs")
        parts.append(aligned(head, [_row(machine, device) for device in machine.devices]))
    if len(machine.devices) > 1 and machine.peers:
        parts.append("Peer access, from each row's device to each column's memory:")
        names = [f"cuda:{device.device_id}" for device in machine.devices]
        parts.append(
            aligned(
                ("", *names),
                [
                    (name, *(_reach(machine, one, other) for other in machine.devices))
                    for name, one in zip(names, machine.devices, strict=True)
                ],
            )
        )
    if machine.hidden:
        parts.append("Hidden by CUDA_VISIBLE_DEVICES:")
        rows = [(d.nvml_index, d.name, d.uuid, d.pci_bus_id) for d in machine.hidden]
        parts.append(aligned(("NVML index", "name", "uuid", "PCI bus id"), rows))
    if machine.problems:
        parts.append("\n".join(["Problems:", *(f"- {problem}" for problem in machine.problems)]))
    return "\n\n".join(parts)


def _row(machine: Machine, device: DeviceInfo) -> tuple[object, ...]:
    free = machine.memory[device.uuid]
    capability = device.compute_capability
    return (
        f"cuda:{device.device_id}",
        device.name,
        device.uuid,
        device.pci_bus_id,
        None if capability is None else "{}.{}".format(*capability),
        nbytes_text(free[0] if free else None),
        nbytes_text(device.total_memory),
        device.numa_node,
        _ranges(device.cpu_affinity),
    )


def _reach(machine: Machine, one: DeviceInfo, other: DeviceInfo) -> str:
    if one.uuid == other.uuid:
        return "-"
    if one.uuid not in machine.peers:
        return "?"
    return "yes" if other.uuid in machine.peers[one.uuid] else "no"


def _ranges(numbers: frozenset[int] | None) -> str | None:
    """Return ``"0-3,8"`` for 0, 1, 2, 3 and 8."""
    if numbers is None:
        return None
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _as_json(machine: Machine) -> dict[str, Any]:
    def fields(device: DeviceInfo) -> dict[str, Any]:
        cpus = device.cpu_affinity
        return device._asdict() | {"cpu_affinity": None if cpus is None else sorted(cpus)}

    devices = []
    for device in machine.devices:
        memory = machine.memory[device.uuid]
        devices.append(
            {
                **fields(device),
                "free_memory": memory[0] if memory else None,
                "peers": list(machine.peers.get(device.uuid, ())),
            }
        )
    return {
        "devices": devices,
        "hidden": [fields(device) for device in machine.hidden],
        "cuda_visible_devices": machine.visible_devices,
        "cuda_device_order": machine.device_order,
        "cuda_version": machine.cuda_version,
        "simulated": machine.simulated,
        "problems": list(machine.problems),
    }


# -- the machines of a cluster


@dataclass(frozen=True)
class WorkerView:
    """One worker of a cluster."""

    address: str
    name: str
    host: str
    uses: tuple[str, ...] | None
    machine: Machine | str


def _views(client: Client) -> list[WorkerView]:
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


def _uses_text(view: WorkerView) -> str:
    head = f"worker {view.name} ({view.address})"
    if isinstance(view.machine, str):
        return f"{head} does not answer: {view.machine}"
    if view.uses is None:
        return f"{head} does not run the plugin: client.register_plugin(DevicePlugin())"
    if not view.uses:
        return f"{head} has no devices"
    names = {device.uuid: f"cuda:{device.device_id}" for device in view.machine.devices}
    return f"{head} uses {', '.join(names.get(uuid, uuid) for uuid in view.uses)}"
