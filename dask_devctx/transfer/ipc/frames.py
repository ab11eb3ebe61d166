"""The bytes on a device that a value is made of: where they are, and memory for them elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dask_devctx.cuda.device import Device
from dask_devctx.driver.relaxed import RelaxedCapture
from dask_devctx.transfer.ipc.messages import Described


@dataclass(eq=False, slots=True)
class Part:
    """Bytes that travel unchanged from a device, or from host memory, to a device."""

    pointer: int
    nbytes: int
    kind: str  # the library that allocates memory for them: a key of `allocators`
    detail: Any  # plain data that it needs beside the number of bytes
    owner: Any  # keeps the bytes alive
    on_host: bool = False

    @property
    def description(self) -> Described:
        """The data that the other side needs to allocate memory for the part."""
        return Described(self.kind, self.nbytes, self.detail)


# Functions that allocate memory on the current device, by kind. From the number of bytes, the
# detail and the device they return the library's own object and its address.
Allocate = Callable[[int, Any, Device], tuple[Any, int]]
allocators: dict[str, Allocate] = {}

# By the first part of the name of the module that defines a frame's type.
_KINDS: Final = {
    "cupy": "cupy",
    "numba": "numba",
    "numba_cuda": "numba",
    "rmm": "rmm",
    "cudf": "rmm",
    "torch": "torch",
    "dask_devctx": "simulated",
}


def is_on_device(frame: object) -> bool:
    """Return whether a frame is device memory."""
    return hasattr(frame, "__cuda_array_interface__")


def part_of(frame: Any) -> Part:
    """Return the bytes of a frame that is on a device; it is dense and of any type."""
    said = frame.__cuda_array_interface__
    nbytes = getattr(frame, "nbytes", None)
    if nbytes is None:
        nbytes = int(said["typestr"][2:])
        for length in said["shape"]:
            nbytes *= length
    kind = _KINDS.get(type(frame).__module__.partition(".")[0]) or _any_kind()
    return Part(int(said["data"][0] or 0), int(nbytes), kind, None, frame)


def _any_kind() -> str:
    # The same order as in distributed's own comms, for a user's type that takes any memory.
    return next(kind for kind in ("rmm", "cupy", "numba") if kind in sys.modules or kind == "numba")


def allocate(kind: str, nbytes: int, detail: Any, device: Device) -> tuple[Any, int]:
    """Return memory for a part on the current device, and its address.

    Without enough memory, each library raises its own class: torch's is a ``RuntimeError``.
    """
    with RelaxedCapture(device._backend.calls.work):
        return allocators[kind](nbytes, detail, device)


def _cupy(nbytes: int, detail: Any, device: Device) -> tuple[Any, int]:
    import cupy

    array = cupy.empty(nbytes, cupy.uint8)
    return array, array.data.ptr


def _numba(nbytes: int, detail: Any, device: Device) -> tuple[Any, int]:
    import numpy
    from numba import cuda

    # Numba keeps its own record of the device that a thread uses: set that, too.
    with cuda.gpus[device.device_id]:
        array = cuda.device_array(nbytes, numpy.uint8)
    return array, int(array.__cuda_array_interface__["data"][0] or 0)


def _rmm(nbytes: int, detail: Any, device: Device) -> tuple[Any, int]:
    import rmm

    buffer = rmm.DeviceBuffer(size=nbytes)
    return buffer, buffer.ptr


def _torch(nbytes: int, detail: Any, device: Device) -> tuple[Any, int]:
    import torch

    storage = torch.empty(
        nbytes, dtype=torch.uint8, device=torch.device("cuda", device.device_id)
    ).untyped_storage()
    return storage, storage.data_ptr()


def _jax(nbytes: int, detail: Any, device: Device) -> tuple[Any, int]:
    import jax
    import numpy

    shape, dtype = detail
    for candidate in jax.local_devices(backend="gpu"):
        if candidate.local_hardware_id == device.device_id:
            with jax.default_device(candidate):
                array = jax.numpy.empty(tuple(shape), numpy.dtype(dtype)).block_until_ready()
            if array.nbytes != nbytes:  # a copy into it would go beyond its end
                raise ValueError(f"{shape} of {dtype} is not {nbytes} bytes")
            return array, array.unsafe_buffer_pointer()
    raise LookupError(f"JAX has no device for {device}; it has {jax.local_devices()}")


allocators.update(cupy=_cupy, numba=_numba, rmm=_rmm, torch=_torch, jax=_jax)
