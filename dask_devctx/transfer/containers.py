"""Containers: looked into, and rebuilt only around what moves."""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

_SAMPLE = 100  # so many items of a container say where all of it lives


class Container(ABC):
    """How a type of container is taken apart and put together again."""

    can_hold_itself = True

    @abstractmethod
    def parts(self, value: Any) -> Sequence[Any]:
        """Return what is inside, in an order that :meth:`fill` knows."""

    @abstractmethod
    def fill(self, value: Any, parts: Sequence[Any], into: Any) -> Any:
        """Return a container like ``value`` with other parts.

        ``into`` is a shallow copy of it to be changed; a type that cannot be changed leaves it.
        """

    def sample(self, value: Any) -> tuple[Sequence[Any], float]:
        """Return some parts, and how many times as many there are."""
        return self.parts(value), 1.0

    def shell(self, value: Any) -> Any:
        """Return a shallow copy, to be filled."""
        return copy.copy(value)


class ListLike(Container):
    """Lists and queues."""

    def parts(self, value: Any) -> Sequence[Any]:
        return list(value)

    def fill(self, value: Any, parts: Sequence[Any], into: Any) -> Any:
        for index, part in enumerate(parts):
            into[index] = part
        return into

    def sample(self, value: Any) -> tuple[Sequence[Any], float]:
        if len(value) <= _SAMPLE or not isinstance(value, (list, tuple)):
            some = list(islice(value, _SAMPLE))
        else:
            some = list(value[:: -(-len(value) // _SAMPLE)])
        return some, len(value) / (len(some) or 1)


class TupleLike(ListLike):
    """Tuples and named tuples."""

    can_hold_itself = False

    def shell(self, value: Any) -> Any:
        return None

    def fill(self, value: Any, parts: Sequence[Any], into: Any) -> Any:
        # Past any __new__ of a named tuple's or a user's own, whose arguments nobody knows.
        made = tuple.__new__(type(value), parts)
        if hasattr(value, "__dict__"):
            made.__dict__.update(value.__dict__)
        return made


class SetLike(ListLike):
    """Sets and frozen sets; what is in them moves where it can be hashed there too."""

    can_hold_itself = False

    def shell(self, value: Any) -> Any:
        return None

    def fill(self, value: Any, parts: Sequence[Any], into: Any) -> Any:
        return type(value)(parts)


class DictLike(Container):
    """Dictionaries, keys and values: an optimizer's state has tensors for keys."""

    def parts(self, value: Any) -> Sequence[Any]:
        return list(chain.from_iterable(value.items()))

    def fill(self, value: Any, parts: Sequence[Any], into: Any) -> Any:
        keys, values = parts[::2], parts[1::2]
        if any(map(lambda old, new: old is not new, value, keys)):
            into.clear()  # keeps the type, and a default's factory
        for key, item in zip(keys, values, strict=True):
            into[key] = item
        return into

    def sample(self, value: Any) -> tuple[Sequence[Any], float]:
        some = list(chain.from_iterable(islice(value.items(), _SAMPLE)))
        return some, 2 * len(value) / (len(some) or 1)


class DataclassLike(Container):
    """Dataclasses, frozen ones and those with slots too; fields only."""

    def __init__(self, kind: Any) -> None:
        self.names = [field.name for field in dataclasses.fields(kind)]

    def parts(self, value: Any) -> Sequence[Any]:
        return [getattr(value, name, None) for name in self.names]

    def fill(self, value: Any, parts: Sequence[Any], into: Any) -> Any:
        for name, old, new in zip(self.names, self.parts(value), parts, strict=True):
            if new is not old:
                object.__setattr__(into, name, new)
        return into


BUILT_IN: dict[type, Container] = {
    list: ListLike(),
    deque: ListLike(),
    tuple: TupleLike(),
    set: SetLike(),
    frozenset: SetLike(),
    dict: DictLike(),
}
