"""Which devices this process may use, found without creating a context.

NVML answers, and the rule of ``CUDA_VISIBLE_DEVICES`` foretells what CUDA will show. Where NVML
cannot answer, and where only CUDA knows its own order, the driver is asked: initialising it
creates no context either. NVML's indices and CUDA's ordinals are joined by UUID alone.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import replace

import pynvml

from dask_devctx.discovery import nvml
from dask_devctx.discovery.inventory import DeviceInfo, Inventory
from dask_devctx.driver.backends import Backend
from dask_devctx.driver.calls import Calls
from dask_devctx.driver.visible import PhysicalDevice, visible_devices
from dask_devctx.errors import DriverUnavailableError, VisibleDevicesError

__all__ = [
    "DeviceInfo",
    "Inventory",
    "driver_ordinal",
    "inventory",
    "is_lost",
    "memory_info",
    "processes",
]

_Key = tuple[str | None, str | None]
_known: weakref.WeakKeyDictionary[Backend, dict[_Key, Inventory]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def inventory(backend: Backend) -> Inventory:
    """Return the devices of this machine, as the environment shows them.

    Raises
    ------
    DriverUnavailableError
        Neither NVML nor the driver is there.

    Notes
    -----
    Asked once per value of ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``, and not again
    once CUDA was initialised: it has read them then.
    """
    with _lock:
        known = _known.setdefault(backend, {})
        if backend.initialised and known:
            return next(reversed(known.values()))
        key = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")
        found = known.pop(key, None) or _discover(backend, *key)
        known[key] = found  # the newest is the last
        return found


def memory_info(backend: Backend, info: DeviceInfo) -> tuple[int, int] | None:
    """Return free and total bytes by NVML, or None where it does not say."""
    return nvml.memory_info(backend.nvml, info)


def processes(backend: Backend, info: DeviceInfo) -> tuple[tuple[int, int | None], ...]:
    """Return the processes that compute on a device and the bytes each holds, as NVML sees them."""
    return nvml.processes(backend.nvml, info)


def is_lost(backend: Backend, info: DeviceInfo) -> bool:
    """Return whether NVML says that a device is not there any more."""
    return nvml.is_lost(backend.nvml, info)


def driver_ordinal(backend: Backend, info: DeviceInfo) -> int:
    """Return the ordinal by which the driver knows a device, found by its UUID.

    Raises
    ------
    DriverUnavailableError
        There is no driver.
    VisibleDevicesError
        The driver does not show this device, or shows it at another place.
    """
    calls = backend.driver()
    shown = [calls.device_uuid(ordinal) for ordinal in range(calls.device_count())]
    wanted = _bare(info.uuid)
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted not in map(str, shown):
        raise VisibleDevicesError(
            value,
            f"NVML shows {info}, and CUDA does not. CUDA read the variable when it was "
            "initialised: set it before anything uses CUDA, and do not change it afterwards",
        )
    ordinal = [str(uuid) for uuid in shown].index(wanted)
    if ordinal != info.device_id:
        raise VisibleDevicesError(
            value,
            f"CUDA numbers {info.uuid} as {ordinal}, the environment says {info.device_id}. Set "
            "CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER before anything uses CUDA, and do not "
            "change them afterwards",
        )
    return ordinal


def _bare(uuid: str) -> str:
    return uuid.partition("-")[2].lower()


def _discover(backend: Backend, visible: str | None, order: str | None) -> Inventory:
    try:
        gpus, problems = nvml.read(backend.nvml)
    except pynvml.NVMLError as error:
        return _from_driver(backend, visible, f"NVML does not answer: {error}")
    if not gpus:
        return _from_driver(backend, visible, *problems or ["NVML shows no GPU"])
    everything = {info.uuid: info for gpu in gpus for info in (gpu.info, *gpu.mig)}
    if order == "PCI_BUS_ID" or len({(g.info.name, g.info.compute_capability) for g in gpus}) == 1:
        # CUDA's own order puts the fastest first, and among equals goes by the bus, as NVML does.
        rule = visible_devices(
            visible,
            [
                PhysicalDevice(gpu.info.uuid, tuple(i.uuid for i in gpu.mig), gpu.mig_enabled)
                for gpu in gpus
            ],
        )
        uuids = rule.uuids
        if rule.stopped_at is not None:
            problems.append(
                f"CUDA_VISIBLE_DEVICES={visible!r}: the entry {rule.stopped_at!r} hides itself and "
                f"all after it: {rule.reason}"
            )
    else:
        calls = backend.driver()  # only CUDA knows which of its devices is the fastest
        by_bare = {_bare(uuid): uuid for uuid in everything}
        uuids = tuple(
            by_bare[str(calls.device_uuid(ordinal))] for ordinal in range(calls.device_count())
        )
    shown = tuple(
        replace(everything[uuid], device_id=ordinal) for ordinal, uuid in enumerate(uuids)
    )
    whole = [gpu for gpu in gpus if not gpu.mig_enabled]
    for gpu in gpus:
        if gpu.mig_enabled and whole:
            problems.append(f"{gpu.info.uuid} is in MIG mode: it is hidden beside whole GPUs")
    usable = [gpu.info for gpu in whole] + [info for gpu in gpus for info in gpu.mig]
    hidden = tuple(info for info in usable if info.uuid not in uuids)
    return Inventory(shown, hidden, visible, "nvml", tuple(problems))


def _from_driver(backend: Backend, visible: str | None, *problems: str) -> Inventory:
    try:
        calls = backend.driver()
    except DriverUnavailableError as error:
        raise DriverUnavailableError(
            f"{'; '.join(problems)}; {error.reason}", error.remedy
        ) from error
    devices = tuple(_driver_info(calls, ordinal) for ordinal in range(calls.device_count()))
    return Inventory(devices, (), visible, "driver", problems)


def _driver_info(calls: Calls, ordinal: int) -> DeviceInfo:
    return DeviceInfo(
        device_id=ordinal,
        uuid=f"GPU-{calls.device_uuid(ordinal)}",
        name=calls.device_name(ordinal),
        pci_bus_id=calls.device_pci_bus_id(ordinal),
        compute_capability=calls.device_compute_capability(ordinal),
        total_memory=calls.device_total_memory(ordinal),
    )
