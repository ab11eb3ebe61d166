"""The devices of this machine, as plain data: a record for each."""

from __future__ import annotations

from typing import NamedTuple


class DeviceInfo(NamedTuple):
    """One device, as found. A field is None if its value is unknown.

    Parameters
    ----------
    device_id
        CUDA's ordinal, after ``CUDA_VISIBLE_DEVICES``; -1 for a hidden device.
    uuid
        ``"GPU-…"``, or ``"MIG-…"`` for an instance: the identity that joins NVML and CUDA.
    name
        The product's name.
    pci_bus_id
        ``"0000:00:06.0"``, as CUDA writes it.
    compute_capability
        Major and minor number.
    total_memory
        Bytes.
    nvml_index
        NVML's index of the GPU; NVML ignores ``CUDA_VISIBLE_DEVICES``.
    numa_node
        The memory node that the GPU is nearest to.
    cpu_affinity
        The CPUs near the GPU, by their numbers.
    """

    device_id: int
    uuid: str
    name: str | None = None
    pci_bus_id: str | None = None
    compute_capability: tuple[int, int] | None = None
    total_memory: int | None = None
    nvml_index: int | None = None
    numa_node: int | None = None
    cpu_affinity: frozenset[int] | None = None

    def __str__(self) -> str:
        return f"cuda:{self.device_id} ({self.uuid})"


class Inventory(NamedTuple):
    """The devices of this machine, and how they were found.

    Parameters
    ----------
    devices
        The devices that this process may use, in CUDA's order: the position is the ordinal.
    hidden
        The devices that ``CUDA_VISIBLE_DEVICES`` hides from this process.
    visible_devices
        The value of ``CUDA_VISIBLE_DEVICES`` that applies, or None.
    source
        ``"nvml"``, or ``"driver"`` if NVML could not answer.
    problems
        The problems that were found, in words for a person; empty if there is none.
    """

    devices: tuple[DeviceInfo, ...]
    hidden: tuple[DeviceInfo, ...] = ()
    visible_devices: str | None = None
    source: str = "nvml"
    problems: tuple[str, ...] = ()
