"""``dask devctx info``: the GPUs of this machine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import click

from dask_devctx import config, driver
from dask_devctx.client.live import aligned
from dask_devctx.config.options import Options
from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.naming import DeviceInfo, Inventory
from dask_devctx.driver.backends import Backend, environment
from dask_devctx.errors import DevctxError, counted, nbytes_text

# The content of the JSON.
Found = dict[str, Any]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.pass_context
def info(context: click.Context, as_json: bool) -> None:
    """Show the GPUs, their peer access, the hidden GPUs, and problems.

    The command creates no CUDA context. Its exit status is 1 if no GPU can be used.
    """
    found = _machine()
    found["problems"] += _problems_of_the_configuration()
    click.echo(json.dumps(found, indent=2) if as_json else _as_text(found))
    context.exit(0 if any(device["peers"] is not None for device in found["devices"]) else 1)


def _problems_of_the_configuration() -> list[str]:
    found = config.unknown_keys()
    try:
        Options()
    except (TypeError, ValueError) as error:
        found.append(str(error))
    return found


def _machine() -> Found:
    """Return this machine's devices and the problems with them, as plain data; raise no error."""
    found, version, simulated = Inventory(()), None, False
    problems: list[str] = []
    devices: list[Found] = []
    visible, order = environment()
    try:
        backend = driver.backend()
        simulated, found = backend.simulated, discovery.inventory(backend)
        problems += found.problems
        if not found.devices and not problems:
            hidden = f", {len(found.hidden)} are hidden" if found.hidden else ""
            problems.append(f"CUDA_VISIBLE_DEVICES={visible!r} shows no device{hidden}")
        for info in found.devices:
            memory = discovery.memory_info(backend, info)
            devices.append(_fields(info) | {"free_memory": memory and memory[0], "peers": None})
        if devices:
            number = backend.driver().version()
            version = f"{number // 1000}.{number % 1000 // 10}"
        for info, device in zip(found.devices, devices, strict=True):
            try:
                device["peers"] = _peers(backend, info, found.devices)
            except DevctxError as error:
                problems.append(str(error))
    except DevctxError as error:
        problems.append(str(error))
    return {
        "devices": devices,
        "hidden": list(map(_fields, found.hidden)),
        "cuda_visible_devices": visible,
        "cuda_device_order": order,
        "cuda_version": version,
        "simulated": simulated,
        "problems": list(dict.fromkeys(problems)),
    }


def _fields(info: DeviceInfo) -> Found:
    cpus = info.cpu_affinity
    return info._asdict() | {"cpu_affinity": None if cpus is None else sorted(cpus)}


def _peers(backend: Backend, info: DeviceInfo, others: Sequence[DeviceInfo]) -> list[str]:
    """Return the devices whose memory one can reach; raise if CUDA hides it."""
    discovery.driver_ordinal(backend, info)
    device = Device(info.uuid)
    uuids = [other.uuid for other in others if other is not info]
    return [uuid for uuid in uuids if device.can_access_peer(uuid)]


def _as_text(found: Found) -> str:
    visible, order = found["cuda_visible_devices"], found["cuda_device_order"]
    devices, version = found["devices"], found["cuda_version"]
    parts = [
        counted(len(devices), "simulated device" if found["simulated"] else "device")
        + (f", CUDA {version}" if version else ", CUDA not available")
        + f", CUDA_VISIBLE_DEVICES {'not set' if visible is None else repr(visible)}"
        + ("" if order is None else f", CUDA_DEVICE_ORDER={order}")
    ]
    names = [f"cuda:{device['device_id']}" for device in devices]
    if devices:
        head = ("device", "name", "uuid", "PCI bus id", "compute", "free", "total", "NUMA", "CPUs")
        parts.append(aligned(head, list(map(_row, names, devices))))
    if len(devices) > 1:
        parts.append("Peer access, from each row's device to each column's memory:")
        rows = [
            (name, *("-" if one is other else _reach(one, other) for other in devices))
            for name, one in zip(names, devices, strict=True)
        ]
        parts.append(aligned(("", *names), rows))
    if found["hidden"]:
        parts.append("Hidden by CUDA_VISIBLE_DEVICES:")
        shown = ("NVML index", "name", "uuid", "PCI bus id")
        keys = ("nvml_index", "name", "uuid", "pci_bus_id")
        parts.append(aligned(shown, [[device[key] for key in keys] for device in found["hidden"]]))
    if found["problems"]:
        parts.append("\n".join(["Problems:", *(f"- {problem}" for problem in found["problems"])]))
    return "\n\n".join(parts)


def _row(name: str, device: Found) -> tuple[object, ...]:
    capability = device["compute_capability"]
    return (
        name,
        *(device[key] for key in ("name", "uuid", "pci_bus_id")),
        None if capability is None else "{}.{}".format(*capability),
        nbytes_text(device["free_memory"]),
        nbytes_text(device["total_memory"]),
        device["numa_node"],
        None if device["cpu_affinity"] is None else _ranges(device["cpu_affinity"]),
    )


def _reach(one: Found, other: Found) -> str:
    return "yes" if other["uuid"] in (one["peers"] or ()) else "no"


def _ranges(numbers: list[int]) -> str:
    """Return ``"0-3,8"`` for 0, 1, 2, 3 and 8."""
    groups = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in groups]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
