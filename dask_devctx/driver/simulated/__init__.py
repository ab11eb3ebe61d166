"""Simulated GPUs: the whole package runs on them, and is tested on them.

The simulated driver and NVML have the functions, arguments and returned shapes of
``cuda.bindings.driver`` and ``pynvml``, and answer as a driver 580 on H200s was seen to
answer: a current context per thread, NULL, primary contexts that are inactive until they are
retained, handles of destroyed contexts, memory that runs out and that other processes open, and
``CUDA_VISIBLE_DEVICES`` read when ``cuInit`` is called. What cannot be simulated is not there:
asking for it raises ``AttributeError``.
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
