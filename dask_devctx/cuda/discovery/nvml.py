"""Reading NVML, which needs no context and may leave any question unanswered."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from dask_devctx.cuda.naming import DeviceInfo
from dask_devctx.driver.backends import Backend

T = TypeVar("T")

_WORD_BITS = 64


@dataclass(frozen=True)
class NvmlGPU:
    """A GPU as NVML shows it; NVML ignores ``CUDA_VISIBLE_DEVICES``."""

    # Their `device_id` is -1: NVML does not know ordinals.
    info: DeviceInfo
    mig_enabled: bool = False
    mig: tuple[DeviceInfo, ...] = ()


def read(nvml: Any) -> tuple[list[NvmlGPU], list[str]]:
    """Return the GPUs in NVML's order, which is that of the PCI bus, and a list of problems."""
    nvml.nvmlInit()  # NVML counts the calls; a forked process needs its own
    found: list[NvmlGPU] = []
    problems: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            found.append(_gpu(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index)))
        except _error() as error:
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
    import pynvml

    try:
        backend.nvml.nvmlDeviceGetUUID(_handle(backend.nvml, info))
    except pynvml.NVMLError as error:
        return bool(error.value == pynvml.NVML_ERROR_GPU_IS_LOST)
    except LookupError:
        pass
    return False


def _ask(backend: Backend, info: DeviceInfo, function: str, *arguments: int) -> Any:
    nvml = backend.nvml
    question = getattr(nvml, function, None)  # a simulated GPU has no power
    try:
        return None if question is None else question(_handle(nvml, info), *arguments)
    except (_error(), LookupError):
        return None


def _error() -> type[Exception]:
    import pynvml  # takes a while; whoever has a backend has imported it

    error: type[Exception] = pynvml.NVMLError
    return error


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
        info._replace(
            uuid=_uuid(nvml, instance),
            name=_or_none(nvml.nvmlDeviceGetName, instance) or info.name,
            total_memory=_or_none(lambda h: int(nvml.nvmlDeviceGetMemoryInfo(h).total), instance),
        )
        for instance in _instances(nvml, handle)
    )
    return NvmlGPU(info, True, instances)


def _instances(nvml: Any, handle: Any) -> Iterator[Any]:
    for number in range(_or_none(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except _error():
            continue  # a number without an instance answers NOT_FOUND


def _or_none(question: Callable[[Any], T], handle: Any) -> T | None:
    """Return NVML's answer, or None: on WSL, Jetson and in some containers NVML answers less."""
    try:
        return question(handle)
    except _error():
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
    """Return the first node of the memory affinity."""
    # Not nvmlDeviceGetNumaNodeId: it only answers if the GPU's memory is itself a node.
    return next(_bits(nvml.nvmlDeviceGetMemoryAffinity(handle, 1, 0)), None)


def _bits(words: Any) -> Iterator[int]:
    for place, word in enumerate(words):
        for bit in range(_WORD_BITS):
            if int(word) >> bit & 1:
                yield place * _WORD_BITS + bit
