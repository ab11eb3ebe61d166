"""The protocol for objects of Python classes, and the choice of a protocol for each type."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from dask_devctx.transfer import containers
from dask_devctx.transfer.protocols import Protocol, inherited


class ObjectLike(Protocol):
    """Objects of classes written in Python, dataclasses included: their attributes are parts."""

    _said = (*Protocol._said, "__getnewargs__", "__getnewargs_ex__")

    def __init__(self, kind: type) -> None:
        super().__init__(kind)
        # A copy with a __del__ would end the same thing a second time.
        self._ends_something = inherited(kind, "__del__") is not None
        # An object with a ``to`` like torch's lives on one device, and may store the device's name.
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


# By type: a function that turns the name of any device into the name of the current device.
_RENAMED: dict[type, Callable[[Any], Any]] = {}


def register_name(kind: type, renamed: Callable[[Any], Any]) -> None:
    """Register a function that turns a library's device name into that of the current device."""
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
    """Return the protocol for values of a type, or None for a type that holds no arrays.

    Parameters
    ----------
    kind
        The type.
    is_foreign
        Whether a class belongs to a library whose objects hold no arrays on devices.
    """
    if tuple in kind.__mro__ and inherited(kind, "n_sequence_fields") is not None:
        return containers.StructSequence(kind)
    if (kind.__module__, kind.__name__) == ("numpy", "ndarray"):
        return containers.ObjectArrayLike(kind)
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
