"""Simulated GPUs: the whole package runs on them, and is tested on them.

The simulated driver and NVML have the functions, arguments and returned shapes of
``cuda.bindings.driver`` and ``pynvml``. They answer as driver 580 does on H200s: there is a current
context per thread, or none; primary contexts are inactive until they are retained; handles outlive
destroyed contexts; memory runs out, and other processes open it; ``cuInit`` reads
``CUDA_VISIBLE_DEVICES``. Functions that cannot be simulated are missing: their use raises
``AttributeError``.
"""

from dask_devctx.driver.simulated.contexts import SimulatedCrashError
from dask_devctx.driver.simulated.driver import SimulatedDriver
from dask_devctx.driver.simulated.gpu import SimulatedGPU
from dask_devctx.driver.simulated.machine import SimulatedMachine
from dask_devctx.driver.simulated.nvml import SimulatedNvml

__all__ = [
    "SimulatedCrashError",
    "SimulatedDriver",
    "SimulatedGPU",
    "SimulatedMachine",
    "SimulatedNvml",
]
