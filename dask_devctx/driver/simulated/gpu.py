"""A simulated GPU and the contexts on it: plain state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cuda.bindings import driver as types

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
    numa_node: int = 0
    peers: frozenset[int] | None = None  # the GPUs whose memory it can reach; None for all
    nvlinks: frozenset[int] | None = None  # those that it reaches over NVLink; None for all
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
    cache_config: Any = types.CUfunc_cache.CU_FUNC_CACHE_PREFER_NONE
    peers: set[int] = field(default_factory=set)

    def revive(self, number: int) -> None:
        """Become a new context behind the old handle, as a primary context does."""
        self.alive, self.id, self.flags = True, number, self.gpu.primary_flags
        self.limits = dict(_LIMITS)
        self.cache_config = types.CUfunc_cache.CU_FUNC_CACHE_PREFER_NONE
        self.peers = set()
