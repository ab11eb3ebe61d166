"""The meaning of some driver statuses for a process, and their remedies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeGuard

from dask_devctx.errors import DriverError

# After one of these no GPU can be used in the process any more. CUDA's documentation says: "the
# process must be terminated and relaunched". The numbers are those of `CUresult`; older bindings
# lack some of them.
STICKY: Final[Mapping[int, str]] = {
    214: "CUDA_ERROR_ECC_UNCORRECTABLE",
    220: "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    226: "CUDA_ERROR_CONTAINED",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    702: "CUDA_ERROR_LAUNCH_TIMEOUT",
    710: "CUDA_ERROR_ASSERT",
    714: "CUDA_ERROR_HARDWARE_STACK_ERROR",
    715: "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    716: "CUDA_ERROR_MISALIGNED_ADDRESS",
    717: "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    718: "CUDA_ERROR_INVALID_PC",
    719: "CUDA_ERROR_LAUNCH_FAILED",
    721: "CUDA_ERROR_TENSOR_MEMORY_LEAK",
    810: "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    911: "CUDA_ERROR_EXTERNAL_DEVICE",
}

# A device is gone when a probe of it gets one of these: it fell off the bus, the driver or MPS lost
# it, or somebody reset its context and so lost its data. When a context is created, these statuses
# have other causes, and the process is healthy.
GONE: Final[Mapping[int, str]] = {
    46: "CUDA_ERROR_DEVICE_UNAVAILABLE",
    101: "CUDA_ERROR_INVALID_DEVICE",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    709: "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    805: "CUDA_ERROR_MPS_CONNECTION_FAILED",
    806: "CUDA_ERROR_MPS_RPC_FAILURE",
    999: "CUDA_ERROR_UNKNOWN",
}

# These failures are of the hardware, or of MPS. No task can cause them.
HARDWARE: Final = frozenset({214, 220, 226, 805, 806})

OUT_OF_MEMORY: Final = 2
NOT_INITIALIZED: Final = 3
UNSUPPORTED_LIMIT: Final = 215
NOT_READY: Final = 600
PEER_ACCESS_ALREADY_ENABLED: Final = 704
CONTEXT_IS_DESTROYED: Final = 709
# The legacy default stream waits for a stream that is being captured into a graph.
CAPTURE_IMPLICIT: Final = 906

REMEDIES: Final[Mapping[int, str]] = {
    34: "libcuda.so is the toolkit's stub: take it out of LD_LIBRARY_PATH",
    36: "the driver is older than cuda-bindings: update the driver, or install the cuda-bindings "
    "of the driver's CUDA version",
    46: "another process has the device for itself (compute mode Exclusive_Process, or Prohibited: "
    "nvidia-smi -q -d COMPUTE), or it fell off the bus (dmesg, nvidia-smi)",
    100: "CUDA_VISIBLE_DEVICES hides every device, or this container was given none "
    "(docker run --gpus all)",
    304: "the device files cannot be opened: check the permissions of /dev/nvidia*",
    709: "something reset the device (cudaDeviceReset, numba.cuda.close()) or destroyed the "
    "context, and its data is gone: start the program again",
    802: "the machine's NVSwitches are not up: start nvidia-fabricmanager of the driver's version",
    803: "the kernel module and libcuda.so are of different versions: reboot, or reload the module",
    804: "CUDA's forward compatibility package does not support this GPU: update the driver",
    805: "MPS does not answer: start nvidia-cuda-mps-control, or unset CUDA_MPS_PIPE_DIRECTORY",
    807: "the MPS server is not ready: try again",
    808: "the MPS server has reached its limit of clients",
}


def is_sticky(error: object) -> TypeGuard[DriverError]:
    """Return whether an error says that no GPU can be used in the process any more."""
    return isinstance(error, DriverError) and error.code in STICKY


def failed(code: int) -> bool:
    """Return whether a process has to end whose probe of a device got this status."""
    return code in STICKY or code in GONE
