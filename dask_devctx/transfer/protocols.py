"""How a type of value is taken apart, and one like it put together around other parts.

A source is only read: with the functions of its built-in base, past whatever its own class does.
"""

from __future__ import annotations

import copyreg
import types
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

# Py_TPFLAGS_HEAPTYPE: a class statement's types have it.
_HEAP_TYPE = 1 << 9


class Parts(list[Any]):
    """What is in a value; ``names`` says which attributes the last of them are."""

    names: Sequence[Any] = ()


class Protocol(ABC):
    """How a type of value is taken apart and put together again.

    Parameters
    ----------
    kind
        The type.
    base
        Its nearest base that is not written in Python.

    Attributes
    ----------
    by_reduce
        Whether the type says itself how it is copied, as for pickle; then its parts are only looked
        at, and a value like it is made by :class:`Reduced`.
    """

    base: type = object
    # Names that a type defines to say how it is pickled, and so copied.
    _said: tuple[str, ...] = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.by_reduce = kind in copyreg.dispatch_table or any(
            inherited(kind, name) is not inherited(self.base, name) for name in self._said
        )
        self._slots = [
            member
            for each in kind.__mro__
            if "__slots__" in vars(each)
            for member in vars(each).values()
            if type(member) is types.MemberDescriptorType
        ]
        self._has_dict = kind.__dictoffset__ != 0
        # One of a library in another language is made by its own code alone.
        self.by_reduce |= any(
            not each.__flags__ & _HEAP_TYPE and each not in (self.base, object)
            for each in kind.__mro__[: kind.__mro__.index(self.base)]
        )

    @abstractmethod
    def items(self, value: Any) -> list[Any]:
        """Return what is inside but for attributes."""

    def first(self, parts: Parts) -> int:
        """Return how many of the parts :meth:`begin` needs; :meth:`finish` is given the others."""
        return 0

    @abstractmethod
    def begin(self, value: Any, parts: list[Any]) -> Any:
        """Return a new value of the type, which may be without its other parts yet."""

    def finish(self, value: Any, made: Any, items: list[Any]) -> None:
        """Put what is inside into a value that :meth:`begin` made, where that was not needed."""
        return

    def some(self, value: Any, at_most: int) -> tuple[list[Any], int]:
        """Return about so many of the parts, from everywhere, and how many there are."""
        items, n_items = self.some_items(value, at_most)
        attributes, _ = self.attributes(value)
        return [*items, *attributes], n_items + len(attributes)

    def some_items(self, value: Any, at_most: int) -> tuple[Sequence[Any], int]:
        """Return so many of what is inside but for attributes, and how much there is."""
        items = self.items(value)
        return spread(items, at_most), len(items)

    def attributes(self, value: Any) -> tuple[list[Any], list[Any]]:
        """Return a value's attributes, and their names: a slot's is its descriptor."""
        if not (self._has_dict or self._slots):
            return [], []
        found: list[Any] = []
        names: list[Any] = []
        if self._has_dict:
            attributes = object.__getattribute__(value, "__dict__")
            names += attributes
            found += attributes.values()
        for slot in self._slots:
            try:
                found.append(slot.__get__(value))
            except AttributeError:  # not set
                continue
            names.append(slot)
        return found, names

    def parts(self, value: Any) -> Parts:
        """Return what is inside, then its attributes."""
        parts = Parts(self.items(value))
        attributes, parts.names = self.attributes(value)
        parts += attributes
        return parts

    def fill(self, value: Any, made: Any, parts: list[Any], names: Sequence[Any]) -> None:
        """Put the other parts into a value that :meth:`begin` made, and give it its attributes."""
        n_items = len(parts) - len(names)
        self.finish(value, made, parts[:n_items])
        for name, part in zip(names, parts[n_items:], strict=True):
            if type(name) is types.MemberDescriptorType:
                name.__set__(made, part)
            else:
                object.__getattribute__(made, "__dict__")[name] = part


def inherited(kind: type, name: str) -> Any:
    """Return what a type has under a name, whatever its metaclass says."""
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


def spread(parts: Sequence[Any], at_most: int) -> Sequence[Any]:
    """Return so many of some parts: the first, the last, and others at even steps."""
    n = len(parts)
    if n <= at_most:
        return parts
    return [parts[index * (n - 1) // (at_most - 1)] for index in range(at_most)]


class Reduced(Protocol):
    """A value as its own ``__reduce_ex__`` says, or what ``copyreg`` knows: as it is pickled."""

    def items(self, value: Any) -> list[Any]:
        reduce = copyreg.dispatch_table.get(self.kind)
        said = value.__reduce_ex__(4) if reduce is None else reduce(value)
        if not isinstance(said, tuple):
            raise TypeError(f"its __reduce_ex__ names one global object, {said!r}")
        function, args = said[:2]
        state, items, pairs, set_state = (said[2:] + (None,) * 4)[:4]
        return [function, args, state, list(items or ()), list(pairs or ()), set_state]

    def parts(self, value: Any) -> Parts:
        return Parts(self.items(value))

    def first(self, parts: Parts) -> int:
        return 2

    def begin(self, value: Any, parts: list[Any]) -> Any:
        function, args = parts
        made = function(*args)
        if made is value:
            raise TypeError("its __reduce_ex__ gives the same object again")
        return made

    def finish(self, value: Any, made: Any, items: list[Any]) -> None:
        state, members, pairs, set_state = items
        if state is not None:
            if type(state) is dict:
                state = dict(state)  # it may be the source's own, and be kept
            if set_state is not None:
                set_state(made, state)
            elif hasattr(made, "__setstate__"):
                made.__setstate__(state)
            else:
                slots = None
                if isinstance(state, tuple) and len(state) == 2:
                    state, slots = state
                made.__dict__.update(state or {})
                for name, part in (slots or {}).items():
                    object.__setattr__(made, name, part)
        for member in members:
            made.append(member)
        for key, part in pairs:
            made[key] = part
