"""Simulated GPUs and their contexts as plain state; the CUDA driver's process and devices."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from cuda.bindings import driver as types

from dask_devctx.driver.simulated.faults import Faults, Refused, Status, function
from dask_devctx.driver.visible import PhysicalDevice, visible_devices

_LIMITS = {
    types.CUlimit.CU_LIMIT_STACK_SIZE: 1024,
    types.CUlimit.CU_LIMIT_PRINTF_FIFO_SIZE: 8_650_752,
    types.CUlimit.CU_LIMIT_MALLOC_HEAP_SIZE: 8_388_608,
    types.CUlimit.CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT: 2048,
    types.CUlimit.CU_LIMIT_MAX_L2_FETCH_GRANULARITY: 64,
    types.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE: 11_796_480,
    types.CUlimit.CU_LIMIT_SHMEM_SIZE: 232_448,
    types.CUlimit.CU_LIMIT_CIG_ENABLED: 0,
}


@dataclass(eq=False)
class SimulatedGPU:
    """One simulated GPU; its attributes may be changed before ``cuInit``."""

    index: int
    uuid: str  # "GPU-…"
    total_memory: int = 16 * 2**30
    name: str = "Simulated GPU"
    compute_capability: tuple[int, int] = (9, 0)
    mig: tuple[str, ...] | None = None  # the "MIG-…" UUIDs; None where MIG mode is off
    peers: frozenset[int] | None = None  # the GPUs whose memory it can reach; None for all
    compute_mode: str = "default"  # "exclusive" while another process has it, or "prohibited"
    lost: bool = False  # whether it has fallen off the bus
    used_memory: int = 0
    primary: Context | None = None
    primary_flags: int = 0
    primary_retained: int = 0

    @property
    def pci_bus_id(self) -> str:
        return f"0000:{self.index + 1:02x}:00.0"


@dataclass(eq=False)
class Context:
    handle: int
    id: int
    gpu: SimulatedGPU
    ordinal: int
    flags: int
    is_primary: bool
    alive: bool = True
    limits: dict[Any, int] = field(default_factory=lambda: dict(_LIMITS))
    peers: set[int] = field(default_factory=set)

    def revive(self, number: int) -> None:
        """Become a new context behind the old handle, as a primary context does."""
        self.alive, self.id, self.flags = True, number, self.gpu.primary_flags
        self.limits = dict(_LIMITS)
        self.peers = set()


class SimulatedDevices:
    """The functions of ``cuda.bindings.driver`` for devices, which need no context."""

    def __init__(self, gpus: Sequence[SimulatedGPU], faults: Faults) -> None:
        self._gpus = gpus
        self._faults = faults
        self._lock = threading.RLock()
        self._pid: int | None = None
        self._visible: list[tuple[SimulatedGPU, str]] = []

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the simulated driver has no {name}: it cannot be simulated")

    def _check(self, function: str) -> None:
        """Refuse a call that fails whatever its arguments."""

    # -- the process

    @function(0, needs_init=False)
    def cuInit(self, flags: int) -> Any:
        with self._lock:
            if self._pid not in (None, os.getpid()):
                raise Refused(Status.CUDA_ERROR_NOT_INITIALIZED)
            if self._pid is not None:
                return
            physical = [
                PhysicalDevice(gpu.uuid, gpu.mig or (), gpu.mig is not None)
                for gpu in self._gpus
                if not gpu.lost
            ]
            seen = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), physical)
            if not seen.uuids:
                twice = seen.stopped_at is not None and "twice" in seen.reason
                wrong = Status.CUDA_ERROR_INVALID_DEVICE if twice else Status.CUDA_ERROR_NO_DEVICE
                raise Refused(wrong)
            owner = {g.uuid: g for g in self._gpus}
            owner |= {mig: g for g in self._gpus for mig in g.mig or ()}
            self._visible = [(owner[name], name) for name in seen.uuids]
            self._pid = os.getpid()

    @function(1, needs_init=False)
    def cuDriverGetVersion(self) -> Any:
        return 13000

    @function(1, needs_init=False)
    def cuGetErrorString(self, status: Any) -> Any:
        words = status.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower()
        return words.encode()

    # -- devices

    @function(1)
    def cuDeviceGetCount(self) -> Any:
        return len(self._visible)

    def _gpu(self, device: Any) -> SimulatedGPU:
        if not 0 <= int(device) < len(self._visible):
            raise Refused(Status.CUDA_ERROR_INVALID_DEVICE)
        return self._visible[int(device)][0]

    @function(1)
    def cuDeviceGet(self, ordinal: int) -> Any:
        self._gpu(ordinal)
        return types.CUdevice(ordinal)

    @function(1)
    def cuDeviceGetUuid(self, device: Any) -> Any:
        self._gpu(device)
        raw = uuid.UUID(self._visible[int(device)][1].partition("-")[2]).bytes
        return SimpleNamespace(bytes=raw)

    @function(1)
    def cuDeviceGetName(self, length: int, device: Any) -> Any:
        return self._gpu(device).name.encode()[: length - 1] + b"\0"

    @function(1)
    def cuDeviceGetPCIBusId(self, length: int, device: Any) -> Any:
        return self._gpu(device).pci_bus_id.encode()[: length - 1] + b"\0"

    @function(1)
    def cuDeviceTotalMem(self, device: Any) -> Any:
        return self._gpu(device).total_memory

    @function(1)
    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> Any:
        name = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_"
        which = [getattr(types.CUdevice_attribute, name + part) for part in ("MAJOR", "MINOR")]
        if attribute not in which:
            raise AttributeError(f"the simulated driver has no {attribute}")
        return self._gpu(device).compute_capability[which.index(attribute)]

    @function(1)
    def cuDeviceCanAccessPeer(self, device: Any, peer: Any) -> Any:
        return int(self._reaches(self._gpu(device), self._gpu(peer)))

    @staticmethod
    def _reaches(gpu: SimulatedGPU, other: SimulatedGPU) -> bool:
        return gpu is not other and (gpu.peers is None or other.index in gpu.peers)
