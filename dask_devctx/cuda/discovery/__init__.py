"""Which devices this process may use, found without creating a context.

NVML lists the devices, and the rule of ``CUDA_VISIBLE_DEVICES`` predicts which ones CUDA will show.
If NVML cannot answer, or if only CUDA knows its own order, this asks the driver: initialising it
creates no context either. Only the UUID joins NVML's indices and CUDA's ordinals.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

from dask_devctx.cuda.discovery.nvml import (
    NvmlGPU,
    is_lost,
    memory_info,
    memory_of_others,
    power_and_temperature,
    processes,
    read,
    utilization,
)
from dask_devctx.cuda.naming import DeviceInfo, Inventory
from dask_devctx.driver.backends import Backend, environment
from dask_devctx.driver.process_lock import ProcessLock
from dask_devctx.driver.visible import UUID_KINDS, PhysicalDevice, visible_devices
from dask_devctx.errors import DriverUnavailableError, VisibleDevicesError

__all__ = [
    "DeviceInfo",
    "Inventory",
    "by_driver_ordinal",
    "driver_ordinal",
    "inventory",
    "is_lost",
    "memory_info",
    "memory_of_others",
    "ordinal_if_known",
    "power_and_temperature",
    "processes",
    "utilization",
]

_lock = ProcessLock()


def inventory(backend: Backend) -> Inventory:
    """Return the devices of this machine, as the environment variables show them."""
    # Looked up once per value of the variables, and not again after CUDA was initialised: CUDA has
    # read them by then.
    with _lock:
        known = backend.inventories
        key = backend.environment or environment()
        if key not in known:
            known[key] = _discover(backend, *key)
        found: Inventory = known[key]
        return found


def ordinal_if_known(backend: Backend, uuid: str) -> int | None:
    """Return the ordinal of a device among those found so far; asks neither NVML nor the driver."""
    known = backend.inventories.get(backend.environment or environment())
    found = () if known is None else known.devices
    return next((info.device_id for info in found if info.uuid == uuid), None)


def driver_ordinal(backend: Backend, info: DeviceInfo) -> int:
    """Return the ordinal by which the driver knows a device; it has to be the environment's."""
    shown = backend.uuids()
    wanted = _bare(info.uuid)
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted not in shown:
        raise VisibleDevicesError(
            value,
            f"the environment shows {info}, but CUDA does not. CUDA read the variable when it was "
            "initialised: set it before anything uses CUDA, and do not change it afterwards",
        )
    ordinal = shown.index(wanted)
    if ordinal != info.device_id:
        raise VisibleDevicesError(
            value,
            f"CUDA numbers {info.uuid} as {ordinal}, the environment says {info.device_id}. Set "
            "CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER before anything uses CUDA, and do not "
            "change them afterwards",
        )
    return ordinal


def by_driver_ordinal(backend: Backend, ordinal: int) -> DeviceInfo:
    """Return the device that the driver knows by an ordinal, joined by its UUID."""
    wanted = backend.uuids()[ordinal]
    for info in inventory(backend).devices:
        if info.uuid.lower().endswith(wanted):  # the driver's has no prefix
            return info
    raise VisibleDevicesError(
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        f"CUDA uses the device {wanted}, which the variable hides. CUDA read it when it was "
        "initialised: do not change it afterwards",
    )


def _bare(uuid: str) -> str:
    return uuid.partition("-")[2].lower()


def _discover(backend: Backend, visible: str | None, order: str | None) -> Inventory:
    from pynvml import NVMLError  # takes a while

    try:
        gpus, problems = read(backend.nvml)
    except NVMLError as error:
        return _from_driver(backend, visible, f"NVML does not answer: {error}")
    if not gpus:
        return _from_driver(backend, visible, *problems or ["NVML shows no GPU"])
    rule = visible_devices(
        visible,
        [
            PhysicalDevice(gpu.info.uuid, tuple(i.uuid for i in gpu.mig), gpu.mig_enabled)
            for gpu in gpus
        ],
    )
    known = {info.uuid: info for gpu in gpus for info in (gpu.info, *gpu.mig)}
    shown: tuple[DeviceInfo, ...]
    if problems or (rule.uuids and not _order_is_known(gpus, visible, order)):
        try:
            shown = tuple(_joined(backend, known))
        except DriverUnavailableError as error:
            if not problems:
                raise
            problems.append(f"the CUDA driver cannot say what it shows: {error.reason}")
            shown = _numbered(known, rule.uuids)
    else:
        shown = _numbered(known, rule.uuids)
    if rule.stopped_at is not None:
        problems.append(
            f"CUDA_VISIBLE_DEVICES={visible!r}: the entry {rule.stopped_at!r} hides itself and "
            f"all after it: {rule.reason}"
        )
    whole = [gpu for gpu in gpus if not gpu.mig_enabled]
    for gpu in gpus:
        if gpu.mig_enabled and whole:
            problems.append(f"{gpu.info.uuid} is in MIG mode: it is hidden beside whole GPUs")
    usable = [gpu.info for gpu in whole] + [info for gpu in gpus for info in gpu.mig]
    seen = {info.uuid for info in shown}
    hidden = tuple(info for info in usable if info.uuid not in seen)
    return Inventory(shown, hidden, visible, "nvml", tuple(problems))


def _order_is_known(gpus: list[NvmlGPU], visible: str | None, order: str | None) -> bool:
    """Return whether the environment alone determines the ordinal of each device."""
    # CUDA puts the fastest device first. Among equal devices it uses the order of the bus, as NVML
    # does. With several kinds, only CUDA knows which one it considers the fastest. UUIDs keep the
    # order in which they are given.
    kinds = {(gpu.info.name, gpu.info.compute_capability) for gpu in gpus}
    return (
        order == "PCI_BUS_ID"
        or len(kinds) == 1
        or (visible is not None and visible.startswith(UUID_KINDS))
    )


def _numbered(known: Mapping[str, DeviceInfo], uuids: Iterable[str]) -> tuple[DeviceInfo, ...]:
    return tuple(known[uuid]._replace(device_id=ordinal) for ordinal, uuid in enumerate(uuids))


def _joined(backend: Backend, known: Mapping[str, DeviceInfo]) -> Iterator[DeviceInfo]:
    """Yield the driver's devices in its order; the driver describes those that NVML left out."""
    by_bare = {_bare(uuid): info for uuid, info in known.items()}
    for ordinal, uuid in enumerate(backend.uuids()):
        info = by_bare.get(uuid)
        if info is None:
            yield _driver_info(backend, ordinal)
        else:
            yield info._replace(device_id=ordinal)


def _from_driver(backend: Backend, visible: str | None, *problems: str) -> Inventory:
    try:
        count = len(backend.uuids())
    except DriverUnavailableError as error:
        reason = f"{'; '.join(problems)}; {error.reason}"
        raise type(error)(reason, error.remedy) from None  # the reason says all of it
    devices = tuple(_driver_info(backend, ordinal) for ordinal in range(count))
    return Inventory(devices, (), visible, "driver", problems)


def _driver_info(backend: Backend, ordinal: int) -> DeviceInfo:
    calls = backend.driver()
    return DeviceInfo(
        device_id=ordinal,
        uuid=f"GPU-{backend.uuids()[ordinal]}",
        name=calls.device_name(ordinal),
        pci_bus_id=calls.device_pci_bus_id(ordinal),
        compute_capability=calls.device_compute_capability(ordinal),
        total_memory=calls.device_total_memory(ordinal),
    )
