"""A value as one pickle without its bytes on a device: packed, and unpacked again.

One pickle holds the whole value. Its parts still share the same memory and objects afterwards, and
containers such as a dictionary, a data class or a module need no code of their own here.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from dask_devctx.transfer.ipc.frames import Part


class Parts:
    """The parts of a value that are on a device; each is listed once."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self.gathered = False  # whether this thread's current streams make some of them as copies
        self._known: dict[tuple[str, int, int, str], _Place] = {}

    def add(self, part: Part) -> object:
        """Add a part; return an object that represents it in a pickle."""
        name = (part.kind, part.pointer, part.nbytes, str(part.detail))
        place = self._known.get(name) if part.pointer else None
        if place is None:
            place = self._known[name] = _Place(len(self.all))
            self.all.append(part)
        return place

    def forget(self, first: int) -> None:
        """Forget the parts from an index on."""
        del self.all[first:]
        self._known = {name: one for name, one in self._known.items() if one.place < first}


class _Place:
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


def pack(value: object, find: Find, parts: Parts | None = None) -> Parcel:
    """Return a value as a pickle and the memory that is not in the pickle.

    With ``parts``, its parts are added to those of other values, which it may share.
    """
    parts = Parts() if parts is None else parts
    before = len(parts.all)
    try:
        packed = _packed(_Pickler, value, find, parts)
        if b"__main__" not in packed.pickled:
            return packed
    except Exception:  # a function without a name, for example; the next attempt raises or works
        pass
    parts.forget(before)
    return _packed(_CloudPickler, value, find, parts)


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


def _packed(kind: Any, value: object, find: Find, parts: Parts) -> Parcel:
    file = io.BytesIO()
    buffers: list[memoryview] = []

    def leave_out(buffer: pickle.PickleBuffer) -> bool:
        try:
            buffers.append(buffer.raw())
        except BufferError:  # the memory has gaps
            return True
        return False

    pickler = kind(file, protocol=5, buffer_callback=leave_out)
    pickler.find, pickler.parts = find, parts
    pickler.dump(value)
    return Parcel(file.getvalue(), buffers, parts.all, parts.gathered)


class _Pickler(pickle.Pickler):
    find: Find
    parts: Parts

    def reducer_override(self, value: Any) -> Any:
        reduce = self.find(type(value))
        return NotImplemented if reduce is None else reduce(value, self.parts)


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
    find: Find
    parts: Parts

    def reducer_override(self, value: Any) -> Any:
        reduce = self.find(type(value))
        found = NotImplemented if reduce is None else reduce(value, self.parts)
        return super().reducer_override(value) if found is NotImplemented else found
