"""Which devices this process may use, found without creating a context.

NVML lists the devices, and the rule of ``CUDA_VISIBLE_DEVICES`` predicts which ones CUDA will show.
If NVML cannot answer, or if only CUDA knows its own order, this asks the driver: initialising it
creates no context either. Only the UUID joins NVML's indices and CUDA's ordinals.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from dask_devctx.cuda.naming import DeviceInfo, Inventory
from dask_devctx.driver.backends import Backend, ProcessLock, environment
from dask_devctx.driver.visible import UUID_KINDS, PhysicalDevice, visible_devices
from dask_devctx.errors import DriverUnavailableError, VisibleDevicesError

_WORD_BITS = 64
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
    shown, wanted = backend.uuids(), _bare(info.uuid)
    ordinal = shown.index(wanted) if wanted in shown else -1
    if ordinal != info.device_id:
        raise _misfit(
            f"CUDA {'does not show' if ordinal < 0 else f'has as {ordinal}'} the device {info} of "
            "the environment. Set CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER before anything uses "
            "CUDA, and do not change them afterwards",
        )
    return ordinal


def by_driver_ordinal(backend: Backend, ordinal: int) -> DeviceInfo:
    """Return the device that the driver knows by an ordinal, joined by its UUID."""
    wanted = backend.uuids()[ordinal]
    for info in inventory(backend).devices:
        if info.uuid.lower().endswith(wanted):  # the driver's has no prefix
            return info
    raise _misfit(
        f"CUDA uses the device {wanted}, which the variable hides. CUDA read it when it was "
        "initialised: do not change it afterwards",
    )


def _misfit(why: str) -> VisibleDevicesError:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = "not set" if visible is None else repr(visible)
    return VisibleDevicesError(f"CUDA_VISIBLE_DEVICES is {seen}: {why}")


def _bare(uuid: str) -> str:
    return uuid.partition("-")[2].lower()


def _discover(backend: Backend, visible: str | None, order: str | None) -> Inventory:
    try:
        gpus, problems = read(backend.nvml)
    except backend.nvml.NVMLError as error:
        gpus, problems = [], [f"NVML does not answer: {error}"]
    lost = tuple(problems) if gpus else ()
    if not gpus and not problems:
        problems.append("NVML shows no GPU")
    rule = visible_devices(
        visible,
        [
            PhysicalDevice(info.uuid, tuple(i.uuid for i in mig or ()), mig is not None)
            for info, mig in gpus
        ],
    )
    known = {info.uuid: info for gpu, mig in gpus for info in (gpu, *(mig or ()))}
    shown = tuple(known[uuid]._replace(device_id=n) for n, uuid in enumerate(rule.uuids))
    if problems or (rule.uuids and not _order_is_known(gpus, visible, order)):
        try:
            shown = tuple(_joined(backend, known))
        except DriverUnavailableError as error:
            if not gpus:  # the reason says all of it
                raise type(error)("; ".join([*problems, str(error)])) from None
            if not problems:
                raise
            problems.append(f"the CUDA driver cannot say what it shows: {error}")
    if gpus and rule.stopped_at is not None:
        problems.append(
            f"CUDA_VISIBLE_DEVICES={visible!r}: the entry {rule.stopped_at!r} hides itself and "
            f"all after it: {rule.reason}"
        )
    whole = [info for info, mig in gpus if mig is None]
    usable = whole + [info for _, mig in gpus for info in mig or ()]
    seen = {info.uuid for info in shown}
    beside = any(info.uuid in seen for info in whole)
    for info, mig in gpus:
        if mig is not None and (beside or not mig):
            why = "it is hidden beside whole GPUs" if mig else "it has no instance"
            problems.append(f"{info.uuid} is in MIG mode: {why}")
    hidden = tuple(info for info in usable if info.uuid not in seen)
    return Inventory(shown, hidden, visible, tuple(problems), lost)


def _order_is_known(gpus: list[NvmlGPU], visible: str | None, order: str | None) -> bool:
    """Return whether the environment alone determines the ordinal of each device."""
    # CUDA puts the fastest device first. Among equal devices it uses the order of the bus, as NVML
    # does. With several kinds, only CUDA knows which one it considers the fastest. UUIDs keep the
    # order in which they are given.
    kinds = {(info.name, info.compute_capability) for info, _ in gpus}
    return (
        order == "PCI_BUS_ID"
        or len(kinds) == 1
        or (visible is not None and visible.startswith(UUID_KINDS))
    )


def _joined(backend: Backend, known: Mapping[str, DeviceInfo]) -> Iterator[DeviceInfo]:
    """Yield the driver's devices in its order; the driver describes those that NVML left out."""
    by_bare = {_bare(uuid): info for uuid, info in known.items()}
    calls = backend.driver()
    for ordinal, uuid in enumerate(backend.uuids()):
        info = by_bare.get(uuid)
        yield (
            info._replace(device_id=ordinal)
            if info is not None
            else DeviceInfo(
                device_id=ordinal,
                uuid=f"GPU-{uuid}",
                name=calls.device_name(ordinal),
                pci_bus_id=calls.device_pci_bus_id(ordinal),
                compute_capability=calls.device_compute_capability(ordinal),
                total_memory=calls.device_total_memory(ordinal),
            )
        )


# -- NVML, which needs no context and may leave any question unanswered


# A GPU, and the instances of it; None where it is not in MIG mode. Their `device_id` is -1: NVML
# knows no ordinals, and ignores ``CUDA_VISIBLE_DEVICES``.
NvmlGPU = tuple[DeviceInfo, tuple[DeviceInfo, ...] | None]


def read(nvml: Any) -> tuple[list[NvmlGPU], list[str]]:
    """Return the GPUs in NVML's order, which is that of the PCI bus, and a list of problems."""
    nvml.nvmlInit()  # NVML counts the calls; a forked process needs its own
    found: list[NvmlGPU] = []
    problems: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            found.append(_gpu(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index)))
        except nvml.NVMLError as error:
            problems.append(f"NVML index {index} is left out: {error}")
    return found, problems


# -- questions about a device; None where NVML does not say


def memory_info(backend: Backend, info: DeviceInfo) -> tuple[int, int] | None:
    """Return free and total bytes of a device; any process may hold the rest."""
    memory = _ask(backend, info, "nvmlDeviceGetMemoryInfo")
    return None if memory is None else (int(memory.free), int(memory.total))


def processes(backend: Backend, info: DeviceInfo) -> tuple[tuple[int, int | None], ...]:
    """Return the processes that compute on a device, by their ids, and the bytes each holds."""
    # In a container, NVML shows the container's own processes only, or none.
    return tuple(
        (int(one.pid), None if one.usedGpuMemory is None else int(one.usedGpuMemory))
        for one in _ask(backend, info, "nvmlDeviceGetComputeRunningProcesses") or ()
    )


def memory_of_others(backend: Backend, info: DeviceInfo) -> int | None:
    """Return the bytes that other processes hold on a device."""
    found = processes(backend, info)
    if any(nbytes is None for _, nbytes in found):
        return None
    return sum(nbytes or 0 for pid, nbytes in found if pid != os.getpid())


def utilization(backend: Backend, info: DeviceInfo) -> tuple[float, float] | None:
    """Return the shares of the last moment in which a device computed and used its memory."""
    # The moment is between a sixth of a second and a second. MIG instances have no answer.
    rates = _ask(backend, info, "nvmlDeviceGetUtilizationRates")
    return None if rates is None else (rates.gpu / 100, rates.memory / 100)


def power_and_temperature(backend: Backend, info: DeviceInfo) -> tuple[float | None, float | None]:
    """Return the watts that a device takes now, and its degrees Celsius."""
    milliwatts = _ask(backend, info, "nvmlDeviceGetPowerUsage")
    # The sensor 0 is the GPU's own.
    degrees = _ask(backend, info, "nvmlDeviceGetTemperature", 0)
    return None if milliwatts is None else milliwatts / 1000, degrees


def is_lost(backend: Backend, info: DeviceInfo) -> bool:
    """Return whether NVML says that a device fell off the bus."""
    nvml = backend.nvml
    with suppress(LookupError):
        try:
            nvml.nvmlDeviceGetUUID(_handle(nvml, info))
        except nvml.NVMLError as error:
            return bool(error.value == nvml.NVML_ERROR_GPU_IS_LOST)
    return False


def _ask(backend: Backend, info: DeviceInfo, function: str, *arguments: int) -> Any:
    try:
        handle = _handle(backend.nvml, info)
    except (backend.nvml.NVMLError, LookupError):
        return None
    return _answer(backend.nvml, handle, function, *arguments)


def _answer(nvml: Any, handle: Any, function: str, *arguments: int) -> Any:
    """Return NVML's answer, or None: on WSL, Jetson and in some containers NVML answers less."""
    question = getattr(nvml, function, None)  # a simulated GPU has no clock and no power
    try:
        return None if question is None else question(handle, *arguments)
    except nvml.NVMLError:
        return None


def _handle(nvml: Any, info: DeviceInfo) -> Any:
    if info.nvml_index is None:
        raise LookupError(info)
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(info.nvml_index)
    if info.uuid.startswith("MIG-"):
        for instance in _instances(nvml, handle):
            if nvml.nvmlDeviceGetUUID(instance) == info.uuid:
                return instance
        raise LookupError(info)
    return handle


def _gpu(nvml: Any, index: int, handle: Any) -> NvmlGPU:
    ask = partial(_answer, nvml, handle)
    pci, n_words = ask("nvmlDeviceGetPciInfo"), -(-(os.cpu_count() or 1) // _WORD_BITS)
    words = ask("nvmlDeviceGetCpuAffinity", n_words) or ()
    cpus = sum(int(word) << n * _WORD_BITS for n, word in enumerate(words))
    info = DeviceInfo(
        device_id=-1,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=ask("nvmlDeviceGetName"),
        pci_bus_id=None if pci is None else _cuda_bus_id(pci.busId),
        compute_capability=ask("nvmlDeviceGetCudaComputeCapability"),
        total_memory=_total_memory(nvml, handle),
        nvml_index=index,
        cpu_affinity=frozenset(n for n in range(cpus.bit_length()) if cpus >> n & 1) or None,
    )
    mode = ask("nvmlDeviceGetMigMode")
    if not mode or not mode[0]:
        return info, None
    instances = tuple(
        info._replace(
            uuid=nvml.nvmlDeviceGetUUID(instance),
            name=_answer(nvml, instance, "nvmlDeviceGetName") or info.name,
            total_memory=_total_memory(nvml, instance),
        )
        for instance in _instances(nvml, handle)
    )
    return info, instances


def _total_memory(nvml: Any, handle: Any) -> int | None:
    memory = _answer(nvml, handle, "nvmlDeviceGetMemoryInfo")
    return None if memory is None else int(memory.total)


def _instances(nvml: Any, handle: Any) -> Iterator[Any]:
    for number in range(_answer(nvml, handle, "nvmlDeviceGetMaxMigDeviceCount") or 0):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:
            continue  # a number without an instance answers NOT_FOUND


def _cuda_bus_id(value: str) -> str:
    """Return a bus id as CUDA writes it: NVML writes the domain with eight digits, in capitals."""
    domain, _, rest = value.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"
