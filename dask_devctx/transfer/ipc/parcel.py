"""A value packed as one pickle without its bytes on a device, and those bytes; unpacked again.

One pickle holds the whole value. Its parts still share the same memory and objects afterwards, and
containers such as a dictionary, a data class or a module need no code of their own here.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import cloudpickle

from dask_devctx.cuda.device import Device
from dask_devctx.driver.relaxed import RelaxedCapture

# -- messages between processes, pickled


class Place(NamedTuple):
    """Bytes in a buffer of another process: its handle, their offset and length."""

    handle: bytes
    offset: int
    nbytes: int


class Described(NamedTuple):
    """A part that arrives: the library that allocates memory for it, its bytes, and details."""

    kind: str
    nbytes: int
    detail: Any


class Header(NamedTuple):
    """A transfer: the source's UUID, its parts, and their place."""

    source: str
    parts: tuple[Described, ...]
    place: Place


# -- the bytes on a device


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


# -- pickles


class Parts:
    """The parts of a value that are on a device; each is listed once."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self.gathered = False  # whether this thread's current streams make some of them as copies
        self._known: dict[tuple[str, int, int, str], _Index] = {}

    def add(self, part: Part) -> object:
        """Add a part; return an object that represents it in a pickle."""
        name = (part.kind, part.pointer, part.nbytes, str(part.detail))
        place = self._known.get(name) if part.pointer else None
        if place is None:
            place = self._known[name] = _Index(len(self.all))
            self.all.append(part)
        return place


class _Index:
    """Represents a part in a pickle: unpickling gives the part's memory."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.place,)


# Returns the reduced value of an object, like ``__reduce_ex__``, with the results of `Parts.add` in
# the place of device memory.
Reduce = Callable[[Any, Parts], Any]
# Returns the function for a type; None if the type has nothing on a device.
Find = Callable[[type], Reduce | None]


@dataclass(eq=False)
class Parcel:
    """A packed value: a pickle, and the host and device memory that is not in it."""

    pickled: bytes
    buffers: list[memoryview] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    gathered: bool = False  # as in `Parts`


def pack(value: object, find: Find) -> Parcel:
    """Return a value as a pickle and the memory that is not in the pickle."""
    file, parts = io.BytesIO(), Parts()
    buffers: list[memoryview] = []

    def leave_out(buffer: pickle.PickleBuffer) -> bool:
        try:
            buffers.append(buffer.raw())
        except BufferError:  # the memory has gaps
            return True
        return False

    pickler = _Pickler(file, protocol=5, buffer_callback=leave_out)
    pickler.find, pickler.parts = find, parts
    pickler.dump(value)
    return Parcel(file.getvalue(), buffers, parts.all, parts.gathered)


def unpack(pickled: Any, buffers: Sequence[Any], parts: Sequence[Any]) -> Any:
    """Return a value from its pickle and memory; ``parts`` are objects of their libraries."""
    before, _unpacking.parts = _unpacking.parts, parts
    try:
        return pickle.loads(pickled, buffers=buffers)
    finally:
        _unpacking.parts = before


class _Unpacking(threading.local):
    parts: Sequence[Any] = ()


_unpacking = _Unpacking()


def _arrived(place: int) -> Any:
    return _unpacking.parts[place]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    find: Find
    parts: Parts

    def reducer_override(self, value: Any) -> Any:
        reduce = self.find(type(value))
        found = NotImplemented if reduce is None else reduce(value, self.parts)
        return super().reducer_override(value) if found is NotImplemented else found
