"""Objects of classes that are written in Python, and which type is taken apart in which way."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from dask_devctx.transfer import containers
from dask_devctx.transfer.protocols import Protocol, inherited


class ObjectLike(Protocol):
    """Objects of classes written in Python: their attributes, dataclasses' as all others'."""

    _said = (*Protocol._said, "__getnewargs__", "__getnewargs_ex__")

    def __init__(self, kind: type) -> None:
        super().__init__(kind)
        # Two that end what one has begun would end it twice.
        self._ends_something = inherited(kind, "__del__") is not None
        # One with torch's ``to`` lives on one device, whose name it may keep.
        self._on_one_device = inherited(kind, "to") is not None

    @property
    def holds_nothing(self) -> bool:
        """Whether such a value has no attributes."""
        return not (self._has_dict or self._slots)

    def some(self, value: Any, at_most: int) -> tuple[list[Any], int]:
        attributes = self.attributes(value)[0]
        return attributes, len(attributes)

    def items(self, value: Any) -> list[Any]:
        return []

    def begin(self, value: Any, parts: list[Any]) -> Any:
        if self._ends_something:
            raise TypeError("it has a __del__, and a second one like it would end the same twice")
        new: Any = self.base.__new__
        return new(self.kind)

    def fill(self, value: Any, made: Any, parts: list[Any], names: Sequence[Any]) -> None:
        if self._on_one_device:
            parts = [_RENAMED.get(type(part), _as_it_is)(part) for part in parts]
        super().fill(value, made, parts, names)


def _as_it_is(part: Any) -> Any:
    return part


# By type: what returns the name of the current device for that of another.
_RENAMED: dict[type, Callable[[Any], Any]] = {}


def register_name(kind: type, renamed: Callable[[Any], Any]) -> None:
    """Say how a library's name of a device is made one of the device that is current."""
    _RENAMED[kind] = renamed


class NamespaceLike(ObjectLike):
    base = types.SimpleNamespace


_BASES: dict[type, Callable[[type], Protocol]] = {
    defaultdict: containers.DefaultDictLike,
    OrderedDict: containers.OrderedDictLike,
    dict: containers.DictLike,
    list: containers.ListLike,
    tuple: containers.TupleLike,
    set: containers.SetLike,
    frozenset: containers.FrozenSetLike,
    deque: containers.QueueLike,
    functools.partial: containers.PartialLike,
    types.MethodType: containers.MethodLike,
    types.SimpleNamespace: NamespaceLike,
}


def built_in(kind: type, is_foreign: Callable[[type], bool]) -> Protocol | None:
    """Return how values of a type are taken apart, or None for those that hold no arrays.

    Parameters
    ----------
    kind
        The type.
    is_foreign
        Whether a class belongs to a library whose objects hold no arrays on devices.
    """
    if tuple in kind.__mro__ and inherited(kind, "n_sequence_fields") is not None:
        return containers.StructSequence(kind)
    made: Callable[[type], Protocol] = ObjectLike
    for each in kind.__mro__:
        if each in _BASES:
            made = _BASES[each]
            break
        if each is not object and is_foreign(each):
            return None
    protocol = made(kind)
    if isinstance(protocol, ObjectLike) and protocol.holds_nothing:
        return None
    return protocol
