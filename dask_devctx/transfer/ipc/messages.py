"""The messages of transfers between processes. Each is checked once, where it arrives.

A wrong address or length in a copy would break the device for the whole process.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from dask_devctx.driver.work import IPC_HANDLE_NBYTES

# Processes with another number refuse each other. It changes with any message here.
PROTOCOL: Final = 2

# More than any device has bytes, any message has parts, and any text that is sent has characters.
_MOST: Final = 2**48
_MOST_ITEMS: Final = 2**20
_MOST_CHARACTERS: Final = 4096

T = TypeVar("T")


class MalformedMessageError(ValueError):
    """A message of another process has wrong content; the text names the mistake."""


class Place(NamedTuple):
    """Bytes in a buffer of another process: its number and handle, their offset and length."""

    number: int
    handle: bytes
    offset: int
    nbytes: int


class Hello(NamedTuple):
    """The question whether another worker shows its memory: who asks, in which process and host."""

    protocol: int
    address: str
    process: str
    host: str


class Shown(NamedTuple):
    """The answer: the name of the worker's memory, and a place with known content to try it on."""

    memory: str
    place: Place
    content: bytes


class Refused(NamedTuple):
    """The other answer: the reason, and whether it passes."""

    reason: str
    passes: bool


class Described(NamedTuple):
    """A part that arrives: the library that allocates memory for it, its bytes, and details."""

    kind: str
    nbytes: int
    detail: Any


class Header(NamedTuple):
    """A transfer: its memory and number, the source's UUID, a piece's bytes, parts, first place."""

    memory: str
    number: int
    source: str
    piece: int
    parts: tuple[Described, ...]
    place: Place


class Next(NamedTuple):
    """The question for a further piece of a transfer; those before ``read`` have been read."""

    memory: str
    number: int
    piece: int
    read: int


class Close(NamedTuple):
    """The request to close buffers of the asking worker's memory."""

    memory: str
    numbers: tuple[int, ...]


def read(kind: type[T], given: object) -> T:
    """Return a message that arrived; raise :class:`MalformedMessageError` where it is not one."""
    fields: tuple[tuple[str, Any], ...] = _fields(kind)  # type: ignore[arg-type]
    if not isinstance(given, list | tuple) or len(given) != len(fields):
        raise MalformedMessageError(f"a {kind.__name__} is a tuple of {len(fields)}")
    return kind(
        *(_checked(name, hint, value) for (name, hint), value in zip(fields, given, strict=True))
    )


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple((f"{kind.__name__}.{name}", hint) for name, hint in get_type_hints(kind).items())


def _checked(name: str, hint: Any, value: Any) -> Any:
    if hint is Any:
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple) or len(value) > _MOST_ITEMS:
            raise MalformedMessageError(f"{name} is no list")
        return tuple(_checked(name, get_args(hint)[0], each) for each in value)
    if issubclass(hint, tuple):
        return read(hint, value)
    if hint is bytes and isinstance(value, bytearray | memoryview):
        value = bytes(value)
    right = type(value) is hint
    if hint is int:
        right = right and 0 <= value < _MOST
    elif hint is not bool:
        right = right and len(value) <= _MOST_CHARACTERS
    if not right or (name == "Place.handle" and len(value) != IPC_HANDLE_NBYTES):
        raise MalformedMessageError(f"{name} has a wrong type or value")
    return value
