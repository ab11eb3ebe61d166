"""The messages of transfers between processes.

They are sent as tuples, and arrive as lists: ``read`` makes them what they were.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self


class Place(NamedTuple):
    """Bytes in a buffer of another process: its number and handle, their offset and length."""

    number: int
    handle: bytes
    offset: int
    nbytes: int

    @classmethod
    def read(cls, given: Any) -> Self:
        number, handle, offset, nbytes = given
        return cls(number, bytes(handle), offset, nbytes)


class Described(NamedTuple):
    """A part that arrives: the library that allocates memory for it, its bytes, and details."""

    kind: str
    nbytes: int
    detail: Any


class Header(NamedTuple):
    """A transfer: the name of its memory, the source's UUID, its parts, and their place."""

    memory: str
    source: str
    parts: tuple[Described, ...]
    place: Place

    @classmethod
    def read(cls, given: Any) -> Self:
        memory, source, parts, place = given
        return cls(memory, source, tuple(Described(*part) for part in parts), Place.read(place))
