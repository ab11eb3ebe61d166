"""Requests for several devices, for a part of a device, and for memory of a device."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from dask.utils import parse_bytes

from dask_devctx.annotations.answers import answer_of, is_function
from dask_devctx.annotations.names import DEVICE, DEVICES, MEMORY, SHARE
from dask_devctx.cuda import naming
from dask_devctx.cuda.naming import AUTO, CURRENT, NO_DEVICE

ALL: Final = "all"


class Request(NamedTuple):
    """A task's request that is not just for one device.

    Parameters
    ----------
    names
        The devices that it names, each an argument for :class:`~dask_devctx.Device`; empty for any.
    number
        How many devices it asks for; None for all devices of its worker.
    share
        The part of each device that it takes, at most 1; None if it does not say.
    nbytes
        The bytes that it reserves on each device; None if it does not say.
    """

    names: tuple[Any, ...] = ()
    number: int | None = 1
    share: float | None = None
    nbytes: int | None = None

    @property
    def any_device(self) -> bool:
        """Whether the worker chooses the devices."""
        return not self.names and self.number is not None

    def __str__(self) -> str:
        devices = f"devices={list(self.names)!r}" if self.names else f"devices={self.number or ALL}"
        share = "" if self.share is None else f", {SHARE}={self.share:g}"
        memory = "" if self.nbytes is None else f", {MEMORY}={self.nbytes}"
        return devices + share + memory


def of_function(carried: object) -> tuple[Any, ...]:
    """Return the devices that a function carries by their names; empty if it carries any or none.

    Parameters
    ----------
    carried
        The argument of ``on_device``, or None.
    """
    if isinstance(carried, list | tuple):
        return tuple(carried)
    if carried is None or (isinstance(carried, str) and carried in CURRENT):
        return ()
    return (carried,)


def _differ(names: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether names surely mean other devices than these; a UUID may be any ordinal's."""
    if len(names) != len(others):
        return True
    pairs = [(naming.read(a), naming.read(b)) for a, b in zip(names, others, strict=True)]
    return any(a != b for a, b in pairs if a.kind == b.kind == "ordinal")


def carried_by(which: Sequence[object]) -> Request:
    """Return the request of a function that carries several devices: ``on_device([0, 1])(fn)``."""
    names = tuple(which)
    return Request(names, len(names))


def read(annotations: Mapping[str, Any], key: Hashable, carried: object = None) -> Request | None:
    """Return the request of a task, or None if it asks for no device.

    Parameters
    ----------
    annotations
        The task's annotations, with at least one of ``devices``, ``device_share`` and
        ``device_memory``.
    key
        The task's key, the argument of a function.
    carried
        The device or devices that its function carries, or None.

    Raises
    ------
    TypeError, ValueError
        An annotation has no meaning, is out of range, or contradicts another one.
    """
    one, several = _said(annotations, DEVICE, key), _said(annotations, DEVICES, key)
    share, memory = _said(annotations, SHARE, key), _said(annotations, MEMORY, key)
    if DEVICE in annotations and DEVICES in annotations:
        raise ValueError(
            f"the annotations {DEVICE!r} and {DEVICES!r} exclude each other, got "
            f"{DEVICE}={one!r} and {DEVICES}={several!r}. Give {DEVICE} for one device, {DEVICES} "
            "for several at once"
        )
    names: tuple[Any, ...] = ()
    count: int | None = 1
    none = False
    if DEVICES in annotations:
        none = several is None or (isinstance(several, str) and several == NO_DEVICE)
        if not none:
            names, count = _several(several)
    elif DEVICE in annotations:
        none = one is None or (isinstance(one, str) and one == NO_DEVICE)
        if not (none or (isinstance(one, str) and (one == AUTO or one in CURRENT))):
            names = (one,)
    held = () if none else of_function(carried)
    if held and not names and (DEVICES not in annotations or count == len(held)):
        names, count = held, len(held)
    elif held and DEVICES in annotations and count is not None and _differ(names, held):
        shown = list(several) if isinstance(several, tuple) else several
        raise ValueError(
            f"the annotation {DEVICES}={shown!r} and the task's function on_device({carried!r}) "
            "name different devices. Leave one of them out"
        )
    if none:
        if share is not None or memory is not None:
            raise ValueError(
                f"the task asks for no device ({DEVICE}=None), and for a part of one "
                f"({SHARE}={share!r}, {MEMORY}={memory!r}). Leave one of them out"
            )
        return None
    return Request(names, count, _share(share), _nbytes(memory))


def _said(annotations: Mapping[str, Any], name: str, key: Hashable) -> object:
    given = annotations.get(name)
    if is_function(given):
        given = answer_of(name, given, key)
    if isinstance(given, Exception):  # the function raised it
        raise given
    return given


def _several(given: object) -> tuple[tuple[Any, ...], int | None]:
    """Return the names and the number of devices that the annotation ``devices`` means."""
    if isinstance(given, str):
        if given == ALL:
            return (), None
        one = naming.read(given).kind != "unknown"
        remedy = f". To name one device, write dask.annotate({DEVICE}={given!r})" if one else ""
        if listed := naming.listed(given):
            remedy = f". Write dask.annotate({DEVICES}={listed})"
        raise _not_several(given, remedy)
    if isinstance(given, Sequence) and not isinstance(given, bytes | bytearray | memoryview):
        names = tuple(given)
        if not names:
            raise ValueError(f"the annotation {DEVICES!r} names no device: got {given!r}")
        for name in names:
            if isinstance(name, bool | float) or name is None:
                raise _not_several(given)
        return names, len(names)
    if isinstance(given, bool):
        raise _not_several(given)
    try:
        # Devices and their like of other libraries have an ordinal too, but are no number.
        count = operator.index(given) if isinstance(given, int) else _whole(given)
    except TypeError:
        remedy = f". To name one device, write dask.annotate({DEVICE}={given!r})"
        raise _not_several(given, remedy if _looks_like_a_device(given) else "") from None
    if count < 1:
        raise ValueError(
            f"the annotation {DEVICES!r} is a number of devices, at least 1, got {count}. To name "
            f"one device, write dask.annotate({DEVICE}={count})"
        )
    return (), count


def _whole(given: object) -> int:
    if type(given).__module__.partition(".")[0] != "numpy":
        raise TypeError(given)
    return operator.index(given)  # type: ignore[arg-type]


def _looks_like_a_device(given: object) -> bool:
    return type(given).__name__.lower().endswith("device")


def _not_several(given: object, remedy: str = "") -> TypeError:
    return TypeError(
        f"the annotation {DEVICES!r} is a number of devices (2), a list of devices "
        f'([0, 1], or UUIDs), "{ALL}" for all devices of a worker, or a function that is given the '
        f"task's key and returns one of these; got {given!r} of type {type(given).__name__}{remedy}"
    )


def _share(given: object) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool | str | bytes):
        share = math.nan
    else:
        try:
            share = float(given)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            share = math.nan
    if math.isnan(share):
        raise TypeError(
            f"the annotation {SHARE!r} is the part of a device that a task takes, a number above 0 "
            f"and at most 1; got {given!r} of type {type(given).__name__}"
        )
    if not 0 < share <= 1:
        raise ValueError(
            f"the annotation {SHARE!r} is the part of a device that a task takes, above 0 and at "
            f"most 1, got {given!r}. For several devices, write dask.annotate({DEVICES}=2)"
        )
    return share


def _nbytes(given: object) -> int | None:
    if given is None:
        return None
    wrong = (
        f"the annotation {MEMORY!r} is the memory that a task reserves on a device: bytes, at "
        f'least 1, or text such as "4 GiB"; got {given!r}'
    )
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        try:
            given = _whole(given)
        except TypeError:
            raise TypeError(f"{wrong} of type {type(given).__name__}") from None
    try:
        nbytes = parse_bytes(given)
    except (ValueError, OverflowError):
        raise ValueError(wrong) from None
    if nbytes < 1:
        raise ValueError(wrong)
    return int(nbytes)
