"""Simulated GPUs: the whole package runs on them, and is tested on them.

The simulated driver and NVML have the functions, arguments and returned shapes of
``cuda.bindings.driver`` and ``pynvml``. They answer as driver 580 does on H200s: there is a current
context per thread, or none; primary contexts are inactive until they are retained; handles outlive
destroyed contexts; memory runs out, and other processes open it; ``cuInit`` reads
``CUDA_VISIBLE_DEVICES``. Functions that cannot be simulated are missing: their use raises
``AttributeError``.
"""

from __future__ import annotations

import os
import socket
import uuid

from dask_devctx.driver.backends import Backend
from dask_devctx.driver.simulated.contexts import SimulatedCrashError
from dask_devctx.driver.simulated.devices import SimulatedGPU
from dask_devctx.driver.simulated.driver import SimulatedDriver
from dask_devctx.driver.simulated.faults import Faults
from dask_devctx.driver.simulated.nvml import SimulatedNvml

__all__ = [
    "SimulatedCrashError",
    "SimulatedDriver",
    "SimulatedGPU",
    "SimulatedMachine",
    "SimulatedNvml",
]


class SimulatedMachine:
    """Simulated GPUs with a driver and an NVML, which stand in for the real ones.

    ``gpus`` are their states: changes before ``cuInit`` make another machine. ``faults`` injects
    faults into the driver, and counts its calls.
    """

    # The GPUs' UUIDs are made from the name of the host, so that each machine has its own.

    def __init__(
        self, count: int, *, host: str | None = None, total_memory: int = 16 * 2**30
    ) -> None:
        host = host or os.environ.get("DASK_DEVCTX__SIMULATED_HOST") or socket.gethostname()
        self.gpus = [
            SimulatedGPU(
                index,
                f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{index}.{host}')}",
                total_memory=total_memory,
            )
            for index in range(count)
        ]
        self.faults = Faults(SimulatedDriver)
        self.driver = SimulatedDriver(self.gpus, self.faults)
        self.nvml = SimulatedNvml(self.gpus)

    def backend(self) -> Backend:
        """Return this machine as an argument for :func:`dask_devctx.driver.use`."""
        return Backend(self.driver, self.nvml, machine=self)
