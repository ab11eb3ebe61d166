"""``dask devctx info``: the GPUs of this machine."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import click

from dask_devctx import config, driver
from dask_devctx.client.live import aligned
from dask_devctx.config.options import Options
from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.naming import DeviceInfo, Inventory
from dask_devctx.driver.backends import Backend, environment
from dask_devctx.errors import DevctxError, counted, nbytes_text


@click.command()
@click.pass_context
def info(context: click.Context) -> None:
    """Show the GPUs, their peer access, the hidden GPUs, and problems.

    The command creates no CUDA context. Its exit status is 1 if no GPU can be used.
    """
    found, noun, version = Inventory(()), "device", "CUDA not available"
    problems: list[str] = []
    rows: list[Sequence[object]] = []
    links: list[Sequence[object]] = []
    visible, order = environment()
    try:
        backend = driver.backend()
        noun = "simulated device" if backend.simulated else noun
        found = discovery.inventory(backend)
        problems += found.problems
        rows = [_row(one, discovery.memory_info(backend, one)) for one in found.devices]
        if rows:
            number = backend.driver().version()
            version = f"CUDA {number // 1000}.{number % 1000 // 10}"
        for one in found.devices:
            links.append(_links(backend, one, found.devices))
    except DevctxError as error:
        problems.append(str(error))
    problems += config.unknown_keys()
    try:
        Options()
    except (TypeError, ValueError) as error:
        problems.append(str(error))
    seen = f"CUDA_VISIBLE_DEVICES {'not set' if visible is None else repr(visible)}"
    parts = [f"{counted(len(rows), noun)}, {version}, {seen}"]
    parts[0] += "" if order is None else f", CUDA_DEVICE_ORDER={order}"
    if rows:
        head = ("device", "name", "uuid", "PCI bus id", "compute", "free", "total", "CPUs")
        parts.append(aligned(head, rows))
    if len(links) > 1:
        parts.append("Peer access, from each row's device to each column's memory:")
        names = [f"cuda:{one.device_id}" for one in found.devices]
        parts.append(aligned(("", *names), links))
    if found.hidden:
        parts.append("Hidden by CUDA_VISIBLE_DEVICES:")
        hides = [(one.nvml_index, one.name, one.uuid, one.pci_bus_id) for one in found.hidden]
        parts.append(aligned(("NVML index", "name", "uuid", "PCI bus id"), hides))
    if problems:
        parts.append("\n".join(["Problems:", *(f"- {one}" for one in dict.fromkeys(problems))]))
    click.echo("\n\n".join(parts))
    context.exit(0 if links else 1)


def _links(backend: Backend, info: DeviceInfo, all_: Sequence[DeviceInfo]) -> Sequence[object]:
    """Return a device's name, and whether it reaches the others; raise if CUDA hides it."""
    discovery.driver_ordinal(backend, info)
    reaches = Device(info.uuid).can_access_peer
    known = ("-" if one is info else ("no", "yes")[reaches(one.uuid)] for one in all_)
    return f"cuda:{info.device_id}", *known


def _row(info: DeviceInfo, memory: tuple[int, int] | None) -> Sequence[object]:
    capability, cpus = info.compute_capability, info.cpu_affinity
    return (
        f"cuda:{info.device_id}",
        *(info.name, info.uuid, info.pci_bus_id),
        None if capability is None else "{}.{}".format(*capability),
        nbytes_text(memory and memory[0]),
        nbytes_text(info.total_memory),
        None if cpus is None else _ranges(cpus),
    )


def _ranges(numbers: Collection[int]) -> str:
    """Return ``"0-3,8"`` for 0, 1, 2, 3 and 8."""
    groups = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in groups]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
