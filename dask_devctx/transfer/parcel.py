"""A value packed as one pickle without its bytes on a device, and those bytes; unpacked again.

One pickle holds the whole value. Its parts still share the same memory and objects afterwards, and
containers such as a dictionary, a data class or a module need no code of their own here.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle

from dask_devctx.cuda.device import Device
from dask_devctx.driver.relaxed import RelaxedCapture
from dask_devctx.transfer.libraries import MODULES, named

# -- messages between processes, pickled


class Described(NamedTuple):
    """A part that arrives: the library that allocates memory for it, its bytes, and details."""

    kind: str
    nbytes: int
    detail: Any


class Header(NamedTuple):
    """A transfer: the source's UUID, its parts, and where they lie in a buffer of its process."""

    source: str
    parts: tuple[Described, ...]
    handle: bytes  # the buffer's
    offset: int


# -- the bytes on a device


@dataclass(eq=False, slots=True)
class Part:
    """Bytes that travel unchanged from a device, or from host memory, to a device."""

    pointer: int
    nbytes: int
    kind: str  # the library that allocates memory for them, as in `libraries.named`
    detail: Any  # the shape and type that its memory has; None for plain bytes
    owner: Any  # keeps the bytes alive
    on_host: bool = False

    @property
    def description(self) -> Described:
        """The data that the other side needs to allocate memory for the part."""
        return Described(self.kind, self.nbytes, self.detail)


def part_of(frame: Any) -> Part:
    """Return the bytes of a frame that is on a device; it is dense and of any type."""
    said = frame.__cuda_array_interface__
    nbytes = getattr(frame, "nbytes", None)
    if nbytes is None:
        nbytes = int(said["typestr"][2:]) * math.prod(said["shape"])
    kind = type(frame).__module__.partition(".")[0]
    if kind == "cudf":
        kind = "rmm"
    elif kind not in MODULES:
        # The same order as in distributed's own comms, for a user's type that takes any memory.
        kind = next(one for one in ("rmm", "cupy", "numba") if one in sys.modules or one == "numba")
    return Part(int(said["data"][0] or 0), int(nbytes), kind, None, frame)


def allocate(parts: Iterable[Described], device: Device) -> tuple[list[Any], list[int]]:
    """Return memory for parts on the current device, and its addresses.

    Without enough memory, each library raises its own class: torch's is a ``RuntimeError``.
    """
    memory, pointers = [], []
    for kind, nbytes, detail in parts:
        shape, dtype = ((nbytes,), None) if detail is None else detail
        library = named(kind)
        with RelaxedCapture(device._backend.calls.work):
            made = library.empty(shape, dtype, device)
        if detail is not None and made.nbytes != nbytes:  # a copy into it would go beyond its end
            raise ValueError(f"{shape} of {dtype} is not {nbytes} bytes")
        memory.append(made)
        pointers.append(library.pointer(made))
    return memory, pointers


# -- pickles


@dataclass(eq=False)
class Parcel:
    """A packed value: a pickle, and the host and device memory that is not in it."""

    pickled: bytes = b""
    buffers: list[memoryview] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)  # each is listed once
    gathered: bool = False  # whether this thread's current streams make some of them as copies
    _known: dict[Any, _Index] = field(default_factory=dict, init=False)

    def add(self, part: Part) -> object:
        """Add a part; return an object that represents it in the pickle."""
        name = (part.kind, part.pointer, part.nbytes, str(part.detail))
        place = self._known.get(name) if part.pointer else None
        if place is None:
            place = self._known[name] = _Index(len(self.parts))
            self.parts.append(part)
        return place


class _Index:
    """Represents a part in a pickle: unpickling gives the part's memory."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.place,)


# Returns the reduced value of an object, like ``__reduce_ex__``, around results of `Parcel.add`.
Reduce = Callable[[Any, Parcel], Any]
# Returns the function for a type; None if the type has nothing on a device.
Find = Callable[[type], Reduce | None]


def pack(value: object, find: Find) -> Parcel:
    """Return a value as a pickle and the memory that is not in the pickle."""
    parcel, file = Parcel(), io.BytesIO()

    def leave_out(buffer: pickle.PickleBuffer) -> bool:
        try:
            parcel.buffers.append(buffer.raw())
        except BufferError:  # the memory has gaps
            return True
        return False

    pickler = _Pickler(file, protocol=5, buffer_callback=leave_out)
    pickler.find, pickler.parcel = find, parcel
    pickler.dump(value)
    parcel.pickled = file.getvalue()
    return parcel


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
    parcel: Parcel

    def reducer_override(self, value: Any) -> Any:
        reduce = self.find(type(value))
        found = NotImplemented if reduce is None else reduce(value, self.parcel)
        return super().reducer_override(value) if found is NotImplemented else found
