"""A value as one pickle, with its bytes on a device left out of it: packed, and unpacked again.

It is pickled whole, so that what its parts share they share afterwards, and what it is made of,
such as a dictionary, a data class or a module, needs nobody who knows it.
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
    """The parts of a value that are on a device; each is listed once.

    Attributes
    ----------
    all
        The parts.
    gathered
        Whether some are copies that this thread's current streams were told to make.
    """

    def __init__(self) -> None:
        self.all: list[Part] = []
        self.gathered = False
        self._known: dict[tuple[str, int, int, str], _Place] = {}

    def add(self, part: Part) -> object:
        """Note a part; return what stands for it in a pickle."""
        name = (part.kind, part.pointer, part.nbytes, str(part.detail))
        place = self._known.get(name) if part.pointer else None
        if place is None:
            place = _Place(len(self.all))
            self.all.append(part)
            self._known[name] = place
        return place


class _Place:
    """Stands for a part in a pickle: it is the part's memory where it is unpickled."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.place,)


# How a value of a type is pickled: as ``__reduce_ex__`` says it, with what `Parts.add` returned in
# the place of memory.
Reduce = Callable[[Any, Parts], Any]
# Says how, given a type; None where it has nothing on a device.
Find = Callable[[type], Reduce | None]


@dataclass(eq=False)
class Parcel:
    """A value that is packed.

    Parameters
    ----------
    pickled
        All of it that is on the host.
    buffers
        The host's memory that the pickle left out.
    parts
        The device's.
    gathered
        Whether this thread's current streams were told to make some of those.
    """

    pickled: bytes
    buffers: list[memoryview] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    gathered: bool = False


def pack(value: object, find: Find) -> Parcel:
    """Return a value as a pickle and the memory that is left out of it.

    Parameters
    ----------
    value
        Anything that can be pickled.
    find
        Says for a type how its memory on a device is left out.
    """
    try:
        packed = _packed(_Pickler, value, find)
        if b"__main__" not in packed.pickled:
            return packed
    except Exception:  # such as of a function that has no name; the next one says what is wrong
        pass
    return _packed(_CloudPickler, value, find)


def unpack(pickled: Any, buffers: Sequence[Any], parts: Sequence[Any]) -> Any:
    """Return a value from its pickle and memory; ``parts`` are what their libraries have."""
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


def _packed(kind: Any, value: object, find: Find) -> Parcel:
    file = io.BytesIO()
    buffers: list[memoryview] = []

    def leave_out(buffer: pickle.PickleBuffer) -> bool:
        try:
            buffers.append(buffer.raw())
        except BufferError:  # it has gaps
            return True
        return False

    pickler = kind(file, protocol=5, buffer_callback=leave_out)
    pickler.find, pickler.parts = find, Parts()
    pickler.dump(value)
    parts = pickler.parts
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
