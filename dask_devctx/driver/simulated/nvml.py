"""NVML for simulated GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pynvml

from dask_devctx.driver.simulated.devices import SimulatedGPU


@dataclass(frozen=True)
class _Instance:
    """The handle of a MIG instance."""

    gpu: SimulatedGPU
    uuid: str


class SimulatedNvml:
    """``pynvml`` for simulated GPUs; the GPUs themselves are the handles."""

    NVMLError = pynvml.NVMLError
    NVML_ERROR_GPU_IS_LOST = pynvml.NVML_ERROR_GPU_IS_LOST

    def __init__(self, gpus: Sequence[SimulatedGPU]) -> None:
        self._gpus = gpus
        self.error = 0  # the error that calls raise; 0 for none

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the simulated NVML has no {name}: it cannot be simulated")

    def _check(self, handle: SimulatedGPU | _Instance) -> SimulatedGPU:
        self.nvmlInit()
        gpu = handle.gpu if isinstance(handle, _Instance) else handle
        if gpu.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return gpu

    def nvmlInit(self) -> None:
        if self.error:
            raise pynvml.NVMLError(self.error)

    def nvmlDeviceGetCount(self) -> int:
        self.nvmlInit()
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        if not 0 <= index < len(self._gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._check(self._gpus[index])

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        self._check(handle)
        return str(handle.uuid)

    def nvmlDeviceGetName(self, handle: Any) -> str:
        gpu = self._check(handle)
        return f"{gpu.name} MIG" if isinstance(handle, _Instance) else gpu.name

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        # NVML writes the domain with eight digits, CUDA with four.
        return SimpleNamespace(busId="0000" + self._check(handle).pci_bus_id)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        gpu = self._check(handle)
        free = gpu.total_memory - gpu.used_memory
        return SimpleNamespace(total=gpu.total_memory, used=gpu.used_memory, free=free)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        gpu = self._check(handle)
        if gpu.primary is None or not gpu.primary.alive:
            return []
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=gpu.used_memory)]

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]:
        return self._check(handle).compute_capability

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        on = int(self._check(handle).mig is not None)
        return [on, on]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return 7 if self._check(handle).mig is not None else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:
        gpu = self._check(handle)
        if index >= len(gpu.mig or ()):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return _Instance(gpu, (gpu.mig or ())[index])

    def nvmlDeviceGetCpuAffinity(self, handle: Any, words: int) -> Any:
        self._check(handle)
        return [2**64 - 1] * words
