"""The data that another process sends about its memory: checked before it is used.

A wrong address or length in a copy would break the device for the whole process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from dask_devctx.driver.work import IPC_HANDLE_NBYTES

_TEXT_LIMIT: Final = 256
# More bytes than any device has, and more parts than any message.
_NBYTES_LIMIT: Final = 2**48
_PARTS_LIMIT: Final = 2**20
_NUMBER_LIMIT: Final = 2**63


class MalformedHeaderError(ValueError):
    """Data of another process has wrong content; the text names the mistake."""


class Description(NamedTuple):
    """A piece of another process's memory.

    Parameters
    ----------
    number, handle
        The number and the handle of its buffer.
    offset, nbytes
        Its offset and length there.
    """

    number: int
    handle: bytes
    offset: int
    nbytes: int


class Header(NamedTuple):
    """The header of a transfer.

    Parameters
    ----------
    sender
        The token of the worker that sends.
    number
        Its number for the transfer.
    source
        The UUID of its device.
    piece
        The number of bytes of a piece.
    parts
        The kind, number of bytes and detail of each part.
    shown
        The first piece.
    """

    sender: str
    number: int
    source: str
    piece: int
    parts: tuple[tuple[str, int, Any], ...]
    shown: Description


def read_header(given: object) -> Header:
    """Return the header of a transfer from a message.

    Raises
    ------
    MalformedHeaderError
        A field is missing, or has a wrong type or value.
    """
    if not isinstance(given, Mapping):
        raise MalformedHeaderError(f"it is no mapping, but {type(given).__name__}")
    parts = given.get("parts")
    if not isinstance(parts, list | tuple) or len(parts) > _PARTS_LIMIT:
        raise MalformedHeaderError("'parts' is no list of parts")
    found = Header(
        text(given.get("sender"), "sender"),
        count(given.get("number"), "number"),
        text(given.get("source"), "source"),
        count(given.get("piece"), "piece", least=1),
        tuple(map(_part, parts)),
        read_description(given.get("shown")),
    )
    if sum(nbytes for _, nbytes, _ in found.parts) >= _NBYTES_LIMIT:
        raise MalformedHeaderError("'parts' have more bytes than any device")
    return found


def read_description(given: object) -> Description:
    """Return the description of a piece from a message; raise as :func:`read_header` does."""
    if not isinstance(given, list | tuple) or len(given) != len(Description._fields):
        raise MalformedHeaderError("a piece has not four fields")
    number, handle, offset, nbytes = given
    if not isinstance(handle, bytes | bytearray | memoryview) or len(handle) != IPC_HANDLE_NBYTES:
        raise MalformedHeaderError(f"a handle is not {IPC_HANDLE_NBYTES} bytes")
    return Description(
        count(number, "number"),
        bytes(handle),
        count(offset, "offset", most=_NBYTES_LIMIT),
        count(nbytes, "nbytes", most=_NBYTES_LIMIT),
    )


def _part(given: object) -> tuple[str, int, Any]:
    if not isinstance(given, list | tuple) or len(given) != 3:
        raise MalformedHeaderError("a part has not three fields")
    kind, nbytes, detail = given
    return text(kind, "kind"), count(nbytes, "nbytes", most=_NBYTES_LIMIT), detail


def text(given: object, name: str, *, most: int = _TEXT_LIMIT) -> str:
    """Return a short text from a message; raise as :func:`read_header` does."""
    if not isinstance(given, str) or not 0 < len(given) <= most:
        raise MalformedHeaderError(f"'{name}' is no text of 1 to {most} characters")
    return given


def count(given: object, name: str, *, least: int = 0, most: int = _NUMBER_LIMIT) -> int:
    """Return a whole number from a message; raise as :func:`read_header` does."""
    if not isinstance(given, int) or isinstance(given, bool) or not least <= given < most:
        raise MalformedHeaderError(f"'{name}' is no number from {least} to {most - 1}")
    return given
