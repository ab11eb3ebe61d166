"""Reading NVML, which needs no context and may leave any question unanswered."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from pynvml import NVML_ERROR_GPU_IS_LOST, NVMLError

from dask_devctx.cuda.inventory import DeviceInfo

__all__ = ["NVMLError", "NvmlGPU", "is_lost", "memory_info", "memory_of_others"]
__all__ += ["processes", "read", "utilization"]

T = TypeVar("T")

_WORD_BITS = 64


@dataclass(frozen=True)
class NvmlGPU:
    """A GPU as NVML shows it; NVML ignores ``CUDA_VISIBLE_DEVICES``.

    Parameters
    ----------
    info
        The GPU, with ``device_id`` -1: NVML does not know ordinals.
    mig_enabled
        Whether MIG mode is on.
    mig
        Its MIG instances, with ``device_id`` -1.
    """

    info: DeviceInfo
    mig_enabled: bool = False
    mig: tuple[DeviceInfo, ...] = ()


def read(nvml: Any) -> tuple[list[NvmlGPU], list[str]]:
    """Return the GPUs in NVML's order, which is that of the PCI bus, and a list of problems.

    Raises
    ------
    NVMLError
        NVML is missing or does not start.
    """
    nvml.nvmlInit()  # NVML counts the calls; a forked process needs its own
    found: list[NvmlGPU] = []
    problems: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            found.append(_gpu(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index)))
        except NVMLError as error:
            problems.append(f"NVML index {index} is left out: {error}")
    return found, problems


def memory_info(nvml: Any, info: DeviceInfo) -> tuple[int, int] | None:
    """Return free and total bytes of a device, or None if NVML does not say.

    References
    ----------
    ``nvmlDeviceGetMemoryInfo``. Any process may hold the memory that is not free.
    """
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(_handle(nvml, info))
    except (NVMLError, LookupError):
        return None
    return int(memory.free), int(memory.total)


def processes(nvml: Any, info: DeviceInfo) -> tuple[tuple[int, int | None], ...]:
    """Return pairs of a process's id and the bytes that it holds; empty if NVML does not say.

    References
    ----------
    ``nvmlDeviceGetComputeRunningProcesses``. In a container, NVML shows the container's own
    processes only, or none.
    """
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses(_handle(nvml, info))
    except (NVMLError, LookupError):
        return ()
    return tuple(
        (int(one.pid), None if one.usedGpuMemory is None else int(one.usedGpuMemory))
        for one in found
    )


def memory_of_others(nvml: Any, info: DeviceInfo) -> int | None:
    """Return the bytes that other processes hold on a device, or None if NVML does not say.

    References
    ----------
    ``nvmlDeviceGetComputeRunningProcesses``; see :func:`processes`.
    """
    found = processes(nvml, info)
    if any(nbytes is None for _, nbytes in found):
        return None
    return sum(nbytes or 0 for pid, nbytes in found if pid != os.getpid())


def utilization(nvml: Any, info: DeviceInfo) -> tuple[float, float] | None:
    """Return the shares of the last moment in which a device computed and used its memory.

    References
    ----------
    ``nvmlDeviceGetUtilizationRates``. The moment is between a sixth of a second and a second, and
    MIG instances have no answer.
    """
    try:
        rates = nvml.nvmlDeviceGetUtilizationRates(_handle(nvml, info))
    except (NVMLError, LookupError):
        return None
    return rates.gpu / 100, rates.memory / 100


def is_lost(nvml: Any, info: DeviceInfo) -> bool:
    """Return whether NVML says that a device fell off the bus; False if NVML does not answer."""
    try:
        nvml.nvmlDeviceGetUUID(_handle(nvml, info))
    except NVMLError as error:
        return bool(error.value == NVML_ERROR_GPU_IS_LOST)
    except LookupError:
        return False
    return False


def _handle(nvml: Any, info: DeviceInfo) -> Any:
    if info.nvml_index is None:
        raise LookupError(info)
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(info.nvml_index)
    if info.uuid.startswith("MIG-"):
        for instance in _instances(nvml, handle):
            if _uuid(nvml, instance) == info.uuid:
                return instance
        raise LookupError(info)
    return handle


def _gpu(nvml: Any, index: int, handle: Any) -> NvmlGPU:
    info = DeviceInfo(
        device_id=-1,
        uuid=_uuid(nvml, handle),
        name=_or_none(nvml.nvmlDeviceGetName, handle),
        pci_bus_id=_or_none(lambda h: _cuda_bus_id(nvml.nvmlDeviceGetPciInfo(h).busId), handle),
        compute_capability=_or_none(
            lambda h: _pair(nvml.nvmlDeviceGetCudaComputeCapability(h)), handle
        ),
        total_memory=_or_none(lambda h: int(nvml.nvmlDeviceGetMemoryInfo(h).total), handle),
        nvml_index=index,
        numa_node=_or_none(lambda h: _numa_node(nvml, h), handle),
        cpu_affinity=_or_none(lambda h: _cpu_affinity(nvml, h), handle),
    )
    mode = _or_none(nvml.nvmlDeviceGetMigMode, handle)
    if not mode or not mode[0]:
        return NvmlGPU(info)
    instances = tuple(
        DeviceInfo(
            device_id=-1,
            uuid=_uuid(nvml, instance),
            name=_or_none(nvml.nvmlDeviceGetName, instance) or info.name,
            pci_bus_id=info.pci_bus_id,
            compute_capability=info.compute_capability,
            total_memory=_or_none(lambda h: int(nvml.nvmlDeviceGetMemoryInfo(h).total), instance),
            nvml_index=index,
            numa_node=info.numa_node,
            cpu_affinity=info.cpu_affinity,
        )
        for instance in _instances(nvml, handle)
    )
    return NvmlGPU(info, True, instances)


def _instances(nvml: Any, handle: Any) -> Iterator[Any]:
    for number in range(_or_none(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except NVMLError:
            continue  # a number without an instance answers NOT_FOUND


def _or_none(question: Callable[[Any], T], handle: Any) -> T | None:
    """Return NVML's answer, or None: on WSL, Jetson and in some containers NVML answers less."""
    try:
        return question(handle)
    except NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _uuid(nvml: Any, handle: Any) -> str:
    return _text(nvml.nvmlDeviceGetUUID(handle))


def _cuda_bus_id(value: str | bytes) -> str:
    """Return a bus id as CUDA writes it: NVML writes the domain with eight digits, in capitals."""
    domain, _, rest = _text(value).lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _pair(value: tuple[int, int]) -> tuple[int, int]:
    major, minor = value
    return int(major), int(minor)


def _cpu_affinity(nvml: Any, handle: Any) -> frozenset[int] | None:
    words = -(-(os.cpu_count() or 1) // _WORD_BITS)
    return frozenset(_bits(nvml.nvmlDeviceGetCpuAffinity(handle, words))) or None


def _numa_node(nvml: Any, handle: Any) -> int | None:
    """Return the first node of the memory affinity, not the GPU's own node number.

    That number (``nvmlDeviceGetNumaNodeId``) only exists if the GPU's memory is itself a node.
    """
    return next(_bits(nvml.nvmlDeviceGetMemoryAffinity(handle, 1, 0)), None)


def _bits(words: Any) -> Iterator[int]:
    for place, word in enumerate(words):
        for bit in range(_WORD_BITS):
            if int(word) >> bit & 1:
                yield place * _WORD_BITS + bit
